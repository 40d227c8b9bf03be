"""The registry: what is built in, how a kind or a vendor is added, and what is said of one that cannot be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roost.cluster.hardware import BUILT_IN, Accelerator, DetectedAccelerators, HardwareConfig, installed_registry
from roost.cluster.hardware.accelerators.nvidia import NVIDIA

ROOT = Path(__file__).parents[2]


class XArm(HardwareConfig):
    kind = "XArm"
    identifying_fields = ("robot_ip",)
    robot_ip: str | None = None


class Nameless(HardwareConfig):
    pass


class Reserved(HardwareConfig):
    kind = "Accelerator"


class Misled(HardwareConfig):
    kind = "Misled"
    identifying_fields = ("serial",)


class SecondFranka(HardwareConfig):
    kind = "Franka"


def vendor(type: str, count: int) -> Accelerator:
    """A vendor with so many devices on every machine."""
    found = DetectedAccelerators(count, type, None, tuple(map(str, range(count))))
    return replace(NVIDIA, type=type, vendor=type, detect=lambda environ: found)


def test_order_of_detection() -> None:
    types = [str(known.type) for known in BUILT_IN.accelerators]
    assert types == ["SIMULATED", "AMD_GPU", "NPU", "INTEL_GPU", "KUNLUN_XPU", "MUSA_GPU", "NV_GPU"]


@pytest.mark.parametrize("name", BUILT_IN.kind_names)
def test_built_in_kinds_have_the_name_they_are_found_by(name: str) -> None:
    kind = BUILT_IN.kind(name)
    assert kind is not None
    assert kind.kind == name
    assert set(kind.identifying_fields) <= set(kind.model_fields)


@pytest.mark.parametrize("name", ["franka", "Accelerator", ""])
def test_unknown_kinds_are_none(name: str) -> None:
    assert BUILT_IN.kind(name) is None


def test_unknown_accelerators_are_none() -> None:
    assert BUILT_IN.accelerator("NO_ACCEL") is None


def test_adding_gives_another_registry() -> None:
    registry = BUILT_IN.with_kind(XArm).with_accelerator(vendor("ACME", 2))
    assert registry.kind("XArm") is XArm
    assert registry.kind_names == (*BUILT_IN.kind_names, "XArm")
    assert registry.accelerator("ACME") is not None
    assert BUILT_IN.kind("XArm") is None and BUILT_IN.accelerator("ACME") is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(
            SecondFranka, "hardware kind 'Franka' is already registered; give SecondFranka another", id="taken"
        ),
        pytest.param(Nameless, "Nameless.kind is ''; set it to the `type` that users are to write", id="nameless"),
        pytest.param(Reserved, "Reserved.kind is 'Accelerator'; set it", id="reserved"),
        pytest.param(Misled, r"Misled.identifying_fields names \['serial'\], not among its fields", id="no such field"),
        pytest.param(int, "is not a kind of hardware; derive it from HardwareConfig", id="another class"),
        pytest.param("XArm", "is not a kind of hardware; derive it from HardwareConfig", id="a string"),
    ],
)
def test_kinds_that_cannot_be_added(kind: type[HardwareConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BUILT_IN.with_kind(kind)


def test_a_vendor_can_be_added_once() -> None:
    with pytest.raises(ValueError, match="accelerator 'NV_GPU' is already registered"):
        BUILT_IN.with_accelerator(NVIDIA)


@pytest.mark.parametrize(
    ("added", "environ", "expected"),
    [
        pytest.param([("A", 2)], {}, "A", id="an added vendor comes before those built in"),
        pytest.param([("A", 2), ("B", 1)], {}, "B", id="the latest first"),
        pytest.param([("A", 2), ("B", 0)], {}, "A", id="a vendor whose devices are masked is passed over"),
        pytest.param([("A", 2)], {"ROOST_FAKE_ACCELERATORS": "4"}, "SIMULATED", id="simulation before all"),
    ],
)
def test_detection(added: list[tuple[str, int]], environ: dict[str, str], expected: str) -> None:
    registry = BUILT_IN
    for type, count in added:
        registry = registry.with_accelerator(vendor(type, count))
    found = registry.detect(environ)
    assert found is not None
    assert str(found[0].type) == expected


def test_a_machine_without_accelerators_has_none() -> None:
    registry = replace(BUILT_IN, accelerators=(vendor("A", 0),))
    assert registry.detect({}) is None


def test_planning_does_not_pay_for_robots() -> None:
    code = (
        "import sys; from roost.cluster.hardware.registry import BUILT_IN; "
        "print([name for name in ('pydantic', 'torch', 'ray') if name in sys.modules])"
    )
    # -S: an installed package may import anything when the interpreter starts.
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


PACKAGE = """\
from roost.cluster.hardware import HardwareConfig

class Hand(HardwareConfig):
    kind = "Hand"

class SecondHand(HardwareConfig):
    kind = "Hand"

NOT_HARDWARE = 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on the path, whose entry points a test may write."""
    (tmp_path / "acme_hands.py").write_text(PACKAGE)
    (tmp_path / "acme_fails.py").write_text("raise OSError('no driver')\n")
    info = tmp_path / "acme_hands-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hands\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield info
    for name in ("acme_hands", "acme_fails"):
        sys.modules.pop(name, None)


def offer(package: Path, line: str) -> None:
    (package / "entry_points.txt").write_text(f"[roost.hardware]\n{line}\n")


@pytest.mark.parametrize(
    ("line", "variable"),
    [
        pytest.param("hand = acme_hands:Hand", "", id="entry point"),
        pytest.param("", "acme_hands:Hand", id="variable"),
        pytest.param("", " acme_hands:Hand , ", id="variable with blanks"),
        pytest.param("hand = acme_hands:Hand", "acme_hands:Hand", id="both, the same"),
    ],
)
def test_installed_kinds(package: Path, line: str, variable: str) -> None:
    offer(package, line)
    registry = installed_registry({"ROOST_HARDWARE": variable})
    kind = registry.kind("Hand")
    assert kind is not None and kind.__name__ == "Hand"


def test_an_accelerator_may_be_installed(package: Path) -> None:
    (package.parent / "acme_hands.py").write_text(
        "from dataclasses import replace\nfrom roost.cluster.hardware.accelerators.nvidia import NVIDIA\n"
        "CHIP = replace(NVIDIA, type='ACME_CHIP')\n"
    )
    registry = installed_registry({"ROOST_HARDWARE": "acme_hands:CHIP"})
    assert registry.accelerator("ACME_CHIP") is not None
    assert registry.accelerators[0].type == "ACME_CHIP"


OURS = "write ROOST_HARDWARE=package.module:Name with a name that can be imported"
THEIRS = "repair or uninstall acme-hands"


@pytest.mark.parametrize(
    ("line", "variable", "message"),
    [
        pytest.param(
            "",
            "acme_hands",
            f"ROOST_HARDWARE 'acme_hands' cannot be used: .* is not of the form .*; {OURS}",
            id="no name",
        ),
        pytest.param(
            "",
            "acme_missing:Hand",
            f"ROOST_HARDWARE 'acme_missing:Hand' cannot be used: ModuleNotFoundError.*; {OURS}",
            id="no module",
        ),
        pytest.param(
            "",
            "acme_hands:Foot",
            f"ROOST_HARDWARE 'acme_hands:Foot' cannot be used: AttributeError.*; {OURS}",
            id="no such name",
        ),
        pytest.param(
            "",
            "acme_hands:Hand,acme_hands:SecondHand",
            "ROOST_HARDWARE 'acme_hands:SecondHand' .*already registered",
            id="name taken",
        ),
        pytest.param(
            "",
            "acme_hands:NOT_HARDWARE",
            "ROOST_HARDWARE 'acme_hands:NOT_HARDWARE' .* is not a kind of hardware",
            id="not hardware",
        ),
        pytest.param(
            "hand = acme_fails:Hand",
            "",
            f"entry point 'hand' of acme-hands 'acme_fails:Hand' cannot be used: OSError: no driver; {THEIRS}",
            id="broken package",
        ),
    ],
)
def test_broken_references_are_named(package: Path, line: str, variable: str, message: str) -> None:
    offer(package, line)
    with pytest.raises(ValueError, match=message):
        installed_registry({"ROOST_HARDWARE": variable})


def test_the_example_in_the_documentation_works(package: Path) -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    example = re.search(r"```python\n# my_lab/arms\.py\n(.*?)```", page, re.DOTALL)
    entry = re.search(r'\[project\.entry-points\."roost\.hardware"\]\n(\w+) = "([\w.]+):(\w+)"', page)
    assert example is not None and entry is not None
    directory = package.parent / "my_lab"
    directory.mkdir()
    (directory / "__init__.py").touch()
    (directory / "arms.py").write_text(example[1])
    assert entry[2] == "my_lab.arms"
    offer(package, f"{entry[1]} = {entry[2]}:{entry[3]}")
    by_entry_point = installed_registry({})
    assert by_entry_point.kind_names[-1] == entry[3]
    assert f"ROOST_HARDWARE={entry[2]}:{entry[3]}" in page
    assert installed_registry({"ROOST_HARDWARE": f"{entry[2]}:{entry[3]}"}) == by_entry_point
    for name in ("my_lab.arms", "my_lab"):
        sys.modules.pop(name)


def test_the_documentation_lists_what_there_is() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text()
    for known in BUILT_IN.accelerators:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{known.type}`"))
        names = (known.visible_devices_variable, known.communication_backend, known.socket_interface_variable)
        assert all(f"`{name}`" in row for name in (*names, known.ray_resource))
    for name in BUILT_IN.kind_names:
        kind = BUILT_IN.kind(name)
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert kind is not None and all(f"`{field}`" in row for field in kind.model_fields if field != "node_rank")
