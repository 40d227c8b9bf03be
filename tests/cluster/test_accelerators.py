"""Accelerators: what each vendor's tool says, what an outer mask leaves, and what a worker is given."""

from __future__ import annotations

import json
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from roost.cluster.hardware import BUILT_IN, AcceleratorType, DetectedAccelerators
from roost.cluster.hardware.accelerator import Device, allowed_ids, numbered_files, run_tool
from roost.cluster.hardware.accelerators import amd, ascend, intel, kunlun, moore_threads, nvidia, simulated

TWO_H100 = """\
0, GPU-aaaa1111-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559
1, GPU-aabb2222-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559
"""
UNEQUAL = "0, GPU-1, NVIDIA A100-SXM4-80GB, 81920\n1, GPU-2, NVIDIA RTX A6000, 49140\n"
NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2C              | OK            | 86.8        35                0    / 0             |
| 0                         | 0000:66:00.0  | 0           0    / 0          59356/ 65536         |
+===========================+===============+====================================================+
| 1     910B2C              | Warning       | 90.0        33                0    / 0             |
| 0                         | 0000:19:00.0  | 0           0    / 0          3378 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 1712733       | python                   | 55978                   |
"""
MTHREADS_GMI = """\
Mon Jan  6 10:00:00 2025
---------------------------------------------------------------
    mthreads-gmi:2.0.0           Driver Version:3.0.0
---------------------------------------------------------------
ID   Name           |PCIe                |%GPU  Mem
     Device Type    |Pcie Lane Width     |Temp  MPC Capable
                                         |      ECC Mode
+-------------------------------------------------------------+
0    MTT S4000      |00000000:1a:00.0    |0%    4MiB(49152MiB)
     Physical       |16x(16x)            |36C   YES
                                         |      N/A
+-------------------------------------------------------------+
1    MTT S4000      |00000000:1b:00.0    |0%    4MiB(49152MiB)
     Physical       |16x(16x)            |36C   YES
                                         |      N/A
---------------------------------------------------------------
"""
XPU_SMI_M = "\n".join(
    f'0000:{bus}:00.0 {i} 0 0 41 40 0 0 88 400 0 0 0 0 0 0 0 512 98304 0 0 "P800 OAM" 1'
    for i, bus in enumerate(("03", "05"))
)
DISCOVERY = json.dumps(
    {
        "device_id": 0,
        "device_name": "Intel(R) Data Center GPU Max 1550",
        "memory_physical_size_byte": "137438953472",
        "number_of_tiles": "2",
    }
)


@pytest.mark.parametrize(
    ("text", "mask", "expected"),
    [
        pytest.param(TWO_H100, None, (2, "NVIDIA H100 80GB HBM3", 79.6, ("0", "1")), id="no mask"),
        pytest.param(TWO_H100, "1,0", (2, "NVIDIA H100 80GB HBM3", 79.6, ("1", "0")), id="mask order is kept"),
        pytest.param(TWO_H100, "1", (1, "NVIDIA H100 80GB HBM3", 79.6, ("1",)), id="one of two"),
        pytest.param(TWO_H100, " 1 , 0 ", (2, "NVIDIA H100 80GB HBM3", 79.6, ("1", "0")), id="blanks"),
        pytest.param(TWO_H100, "", (0, "NVIDIA H100 80GB HBM3", None, ()), id="empty hides all"),
        pytest.param(TWO_H100, "-1", (0, "NVIDIA H100 80GB HBM3", None, ()), id="-1 hides all"),
        pytest.param(TWO_H100, "NoDevFiles", (0, "NVIDIA H100 80GB HBM3", None, ()), id="batch system's word for none"),
        pytest.param(TWO_H100, "1,7,0", (1, "NVIDIA H100 80GB HBM3", 79.6, ("1",)), id="unknown index ends the list"),
        pytest.param(TWO_H100, "0,-1,1", (1, "NVIDIA H100 80GB HBM3", 79.6, ("0",)), id="-1 ends the list"),
        pytest.param(TWO_H100, "0,0", (0, "NVIDIA H100 80GB HBM3", None, ()), id="a repeated index hides all"),
        pytest.param(TWO_H100, "GPU-aabb", (1, "NVIDIA H100 80GB HBM3", 79.6, ("1",)), id="start of a UUID"),
        pytest.param(
            TWO_H100,
            "GPU-aabb2222-0000-0000-0000-000000000000",
            (1, "NVIDIA H100 80GB HBM3", 79.6, ("1",)),
            id="whole UUID",
        ),
        pytest.param(TWO_H100, "GPU-aa", (0, "NVIDIA H100 80GB HBM3", None, ()), id="ambiguous UUID"),
        pytest.param(
            TWO_H100, "MIG-12,MIG-34", (2, "NVIDIA H100 80GB HBM3", None, ("MIG-12", "MIG-34")), id="MIG slices"
        ),
        pytest.param(
            UNEQUAL, None, (2, "NVIDIA A100-SXM4-80GB + NVIDIA RTX A6000", 48.0, ("0", "1")), id="unequal cards"
        ),
        pytest.param(UNEQUAL, "0", (1, "NVIDIA A100-SXM4-80GB", 80.0, ("0",)), id="unequal cards, one masked"),
        pytest.param("0, GPU-1, NVIDIA GB10, [N/A]\n", None, (1, "NVIDIA GB10", None, ("0",)), id="shared memory"),
        pytest.param("No devices were found\n", None, None, id="driver without devices"),
        pytest.param("", "0", None, id="nothing"),
    ],
)
def test_nvidia_table(
    text: str, mask: str | None, expected: tuple[int, str, float | None, tuple[str, ...]] | None
) -> None:
    assert nvidia.parse(text, mask) == (expected and DetectedAccelerators(*expected))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(ascend.parse(NPU_SMI, 2, None), (2, "Ascend 910B2C", 64.0, ("0", "1")), id="Ascend"),
        pytest.param(ascend.parse(NPU_SMI, 2, "1"), (1, "Ascend 910B2C", 64.0, ("1",)), id="Ascend masked"),
        pytest.param(ascend.parse("", 2, None), (2, "Ascend NPU", None, ("0", "1")), id="Ascend without npu-smi"),
        pytest.param(moore_threads.parse(MTHREADS_GMI, None), (2, "MTT S4000", 48.0, ("0", "1")), id="Moore Threads"),
        pytest.param(moore_threads.parse("no device", None), None, id="Moore Threads without devices"),
        pytest.param(kunlun.parse(XPU_SMI_M, [0, 1], "1,0"), (2, "P800 OAM", 96.0, ("1", "0")), id="Kunlun"),
        pytest.param(kunlun.parse("", [0], None), (1, "Kunlun XPU", None, ("0",)), id="Kunlun without xpu-smi"),
        pytest.param(
            intel.parse(DISCOVERY, 1, {}),
            (2, "Intel(R) Data Center GPU Max 1550", 64.0, ("0", "1")),
            id="Intel, each tile a device",
        ),
        pytest.param(
            intel.parse(DISCOVERY, 1, {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}),
            (1, "Intel(R) Data Center GPU Max 1550", 128.0, ("0",)),
            id="Intel, each card a device",
        ),
        pytest.param(
            intel.parse("| not json |", 2, {}), (2, "Intel GPU", None, ("0", "1")), id="another vendor's xpu-smi"
        ),
    ],
)
def test_other_vendors(
    found: DetectedAccelerators | None, expected: tuple[int, str, float, tuple[str, ...]] | None
) -> None:
    assert found == (expected and DetectedAccelerators(*expected))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param(
            '{"gpu_data": [{"gpu": 1, "asic": {"market_name": "B"}}, {"gpu": 0, "asic": {"market_name": "A"}}]}',
            ["A", "B"],
            id="amd-smi",
        ),
        pytest.param('[{"gpu": 0, "asic": {"market_name": "A"}}]', ["A"], id="amd-smi, older"),
        pytest.param(
            '{"card10": {"Card series": "B"}, "card2": {"Card Series": "A"}, "system": {}}',
            ["A", "B"],
            id="rocm-smi, cards by number",
        ),
        pytest.param("ERROR: no driver", [], id="not JSON"),
        pytest.param('{"card0": {}}', [], id="without names"),
        pytest.param("[1, 2]", [], id="something else"),
    ],
)
def test_amd_names(text: str, names: list[str]) -> None:
    assert amd.parse_names(text) == names


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tool(directory: Path, name: str, script: str) -> dict[str, str]:
    """Put a vendor's tool on a path of its own, and return the environment to find it with."""
    path = directory / name
    write(path, f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(directory)}


def kfd_node(root: Path, number: int, properties: str, gib: int) -> None:
    write(root / str(number) / "properties", properties)
    write(
        root / str(number) / "mem_banks" / "0" / "properties", f"heap_type 1\nsize_in_bytes {gib * 1024**3}\nflags 0\n"
    )


@pytest.mark.parametrize(
    ("variables", "ids"),
    [
        pytest.param({}, ("0", "1"), id="no mask"),
        pytest.param({"HIP_VISIBLE_DEVICES": "1"}, ("1",), id="HIP"),
        pytest.param({"HIP_VISIBLE_DEVICES": "GPU-00000000000000cd"}, ("1",), id="HIP by UUID"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "1,0"}, ("1", "0"), id="CUDA's name"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, ("1",), id="HIP before CUDA's name"),
        pytest.param({"ROCR_VISIBLE_DEVICES": "1"}, ("0",), id="ROCR renumbers"),
        pytest.param(
            {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, ("1",), id="HIP counts what ROCR left"
        ),
        pytest.param({"ROCR_VISIBLE_DEVICES": ""}, (), id="ROCR hides all"),
        pytest.param({"HIP_VISIBLE_DEVICES": "-1"}, (), id="HIP hides all"),
    ],
)
def test_amd_topology(tmp_path: Path, variables: dict[str, str], ids: tuple[str, ...]) -> None:
    kfd_node(tmp_path / "nodes", 0, "cpu_cores_count 64\nsimd_count 0\n", 512)
    kfd_node(tmp_path / "nodes", 1, "simd_count 1216\ngfx_target_version 90402\nunique_id 171\n", 192)
    kfd_node(tmp_path / "nodes", 2, "simd_count 1216\ngfx_target_version 90402\nunique_id 205\n", 192)
    kfd_node(tmp_path / "nodes", 3, "simd_count 4\ngfx_target_version 90402\nunique_id 0\n", 2)  # inside a processor
    found = amd.detect({"PATH": str(tmp_path / "no tools"), **variables}, str(tmp_path / "nodes"))
    assert found is not None
    assert (found.count, found.model, found.physical_ids) == (len(ids), "AMD GPU gfx942", ids)


def test_amd_graphics_inside_a_processor_keep_their_id_but_are_not_offered(tmp_path: Path) -> None:
    kfd_node(tmp_path / "small", 0, "simd_count 4\ngfx_target_version 100306\nunique_id 0\n", 2)
    kfd_node(tmp_path / "both", 0, "simd_count 4\ngfx_target_version 100306\nunique_id 0\n", 2)
    kfd_node(tmp_path / "both", 1, "simd_count 192\ngfx_target_version 110000\nunique_id 1\n", 24)
    environ = {"PATH": str(tmp_path)}
    assert amd.detect(environ, str(tmp_path / "small")) is None
    assert amd.detect(environ, str(tmp_path / "both")) == DetectedAccelerators(1, "AMD GPU gfx1100", 24.0, ("1",))


def test_amd_names_come_from_the_first_tool_that_answers(tmp_path: Path) -> None:
    kfd_node(tmp_path / "nodes", 1, "simd_count 1216\ngfx_target_version 90402\nunique_id 171\n", 192)
    tool(tmp_path, "amd-smi", "exit 1")
    environ = tool(tmp_path, "rocm-smi", """echo '{"card0": {"Card Series": "AMD Instinct MI300X"}}'""")
    found = amd.detect(environ, str(tmp_path / "nodes"))
    assert found == DetectedAccelerators(1, "AMD Instinct MI300X", 192.0, ("0",))


def test_ascend_counts_device_files(tmp_path: Path) -> None:
    for name in ("davinci4", "davinci5", "davinci_manager", "null"):
        write(tmp_path / "dev" / name, "")
    found = ascend.detect(tool(tmp_path, "npu-smi", f"/bin/cat <<'END'\n{NPU_SMI}END"), str(tmp_path / "dev"))
    assert found == DetectedAccelerators(2, "Ascend 910B2C", 64.0, ("0", "1"))


def test_kunlun_counts_device_files(tmp_path: Path) -> None:
    for name in ("xpu0", "xpu1", "xpuctrl"):
        write(tmp_path / "dev" / name, "")
    found = kunlun.detect(tool(tmp_path, "xpu-smi", f"/bin/cat <<'END'\n{XPU_SMI_M}\nEND"), str(tmp_path / "dev"))
    assert found == DetectedAccelerators(2, "P800 OAM", 96.0, ("0", "1"))


def test_intel_counts_cards_but_not_the_processor(tmp_path: Path) -> None:
    for card, (address, vendor) in enumerate(
        [("0000:00:02.0", "0x8086"), ("0000:4d:00.0", "0x8086"), ("0000:81:00.0", "0x10de")]
    ):
        write(tmp_path / "pci" / address / "vendor", f"{vendor}\n")
        (tmp_path / "drm" / f"card{card}").mkdir(parents=True)
        (tmp_path / "drm" / f"card{card}" / "device").symlink_to(tmp_path / "pci" / address)
    (tmp_path / "drm" / "card1-DP-1").mkdir()  # a connector
    environ = tool(tmp_path, "xpu-smi", f"echo '{DISCOVERY}'") | {"ONEAPI_DEVICE_SELECTOR": "level_zero:1"}
    found = intel.detect(environ, str(tmp_path / "drm"))
    assert found == DetectedAccelerators(1, "Intel(R) Data Center GPU Max 1550", 64.0, ("1",))


@pytest.mark.parametrize(
    ("selector", "ids"),
    [
        pytest.param(None, "0123", id="unset"),
        pytest.param("level_zero:2,1", "21", id="ids in order"),
        pytest.param("LEVEL_ZERO:GPU", "0123", id="any case, all GPUs"),
        pytest.param("*:*", "0123", id="everything"),
        pytest.param("level_zero:0;level_zero:3", "03", id="two filters"),
        pytest.param("*:gpu;!level_zero:1", "023", id="one discarded"),
        pytest.param("!level_zero:0,1", "23", id="discards alone start from all"),
        pytest.param("opencl:gpu", "", id="another back end"),
        pytest.param("level_zero:9", "", id="unknown id"),
        pytest.param("", "", id="empty"),
    ],
)
def test_intel_selector(selector: str | None, ids: str) -> None:
    assert intel.selected_ids(selector, [Device(str(i), "Max") for i in range(4)]) == tuple(ids)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(f"/bin/cat <<'END'\n{TWO_H100}END", ("1",), id="answers"),
        pytest.param("echo 'NVIDIA-SMI has failed'; exit 9", None, id="installed without a driver"),
        pytest.param("echo 'No devices were found'", None, id="no devices"),
        pytest.param("printf '\\377\\376'", None, id="not text"),
        pytest.param('[ "$CUDA_VISIBLE_DEVICES" = 1 ] && echo "1, GPU-x, A, 1024"', ("1",), id="sees the environment"),
    ],
)
def test_nvidia_smi_is_run(tmp_path: Path, script: str, expected: tuple[str, ...] | None) -> None:
    environ = tool(tmp_path, "nvidia-smi", script)
    environ = {"PATH": f"{environ['PATH']}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "1"}
    found = nvidia.detect(environ)
    assert (found and found.physical_ids) == expected


def test_a_tool_that_hangs_is_left_with_a_warning(tmp_path: Path) -> None:
    environ = tool(tmp_path, "hangs", "exec /bin/sleep 600")
    with pytest.warns(RuntimeWarning, match="hangs gave no answer in 0.1 s"):
        assert run_tool(("hangs",), environ, timeout=0.1) is None


def test_a_tool_that_is_not_a_program_is_no_tool(tmp_path: Path) -> None:
    environ = tool(tmp_path, "broken", "")
    (tmp_path / "broken").write_bytes(b"\x7fELF nonsense")
    assert run_tool(("broken",), environ) is None
    assert run_tool(("absent",), environ) is None


def test_a_machine_without_a_vendor_is_not_an_error(tmp_path: Path) -> None:
    nowhere, environ = str(tmp_path / "nowhere"), {"PATH": str(tmp_path)}
    assert [nvidia.detect(environ), moore_threads.detect(environ), simulated.detect(environ)] == [None] * 3
    assert [vendor.detect(environ, nowhere) for vendor in (amd, ascend, intel, kunlun)] == [None] * 4
    assert numbered_files(nowhere, "davinci") == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, None, id="not asked for"),
        pytest.param({"ROOST_FAKE_ACCELERATORS": ""}, None, id="empty"),
        pytest.param({"ROOST_FAKE_ACCELERATORS": "0"}, None, id="none"),
        pytest.param({"ROOST_FAKE_ACCELERATORS": "2"}, (2, "simulated", None, ("0", "1")), id="two"),
        pytest.param(
            {"ROOST_FAKE_ACCELERATORS": "2", "ROOST_FAKE_MEMORY_GB": "79.6", "ROOST_VISIBLE_DEVICES": "1"},
            (1, "simulated", 79.6, ("1",)),
            id="masked, with memory",
        ),
    ],
)
def test_simulated(variables: dict[str, str], expected: tuple[int, str, float | None, tuple[str, ...]] | None) -> None:
    assert simulated.detect(variables) == (expected and DetectedAccelerators(*expected))


@pytest.mark.parametrize("variable", ["ROOST_FAKE_ACCELERATORS", "ROOST_FAKE_MEMORY_GB"])
@pytest.mark.parametrize("value", ["eight", "-1", "nan", "8 GPUs", "²"])
def test_simulated_says_what_to_write(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable} is {value!r}, .*; write .* such as 80?, or unset it$"):
        simulated.detect({"ROOST_FAKE_ACCELERATORS": "1", variable: value})


def test_simulated_in_a_fresh_process() -> None:
    code = "import os; from roost.cluster.hardware import BUILT_IN; print(BUILT_IN.detect(os.environ)[1].physical_ids)"
    root = str(Path(__file__).parents[2])
    environ = {"PYTHONPATH": root, "ROOST_FAKE_ACCELERATORS": "3", "ROOST_VISIBLE_DEVICES": "2,0"}
    answer = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "('2', '0')"


@pytest.mark.parametrize(
    ("type", "some", "none"),
    [
        pytest.param("NV_GPU", {"CUDA_VISIBLE_DEVICES": "0,3"}, {"CUDA_VISIBLE_DEVICES": ""}, id="NVIDIA"),
        pytest.param(
            "AMD_GPU",
            {"HIP_VISIBLE_DEVICES": "0,3", "CUDA_VISIBLE_DEVICES": "0,3"},
            {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"},
            id="AMD",
        ),
        pytest.param("NPU", {"ASCEND_RT_VISIBLE_DEVICES": "0,3"}, {"ASCEND_RT_VISIBLE_DEVICES": ""}, id="Ascend"),
        pytest.param(
            "INTEL_GPU",
            {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,3"},
            {"ONEAPI_DEVICE_SELECTOR": "opencl:cpu;!level_zero:*"},
            id="Intel",
        ),
        pytest.param("MUSA_GPU", {"MUSA_VISIBLE_DEVICES": "0,3"}, {"MUSA_VISIBLE_DEVICES": "-1"}, id="Moore Threads"),
        pytest.param("KUNLUN_XPU", {"CUDA_VISIBLE_DEVICES": "0,3"}, {"CUDA_VISIBLE_DEVICES": "-1"}, id="Kunlun"),
        pytest.param("SIMULATED", {"ROOST_VISIBLE_DEVICES": "0,3"}, {"ROOST_VISIBLE_DEVICES": ""}, id="simulated"),
    ],
)
def test_visibility(type: str, some: dict[str, str], none: dict[str, str]) -> None:
    vendor = BUILT_IN.accelerator(type)
    assert vendor is not None
    extra = dict(vendor.extra_environment)
    assert vendor.visibility([0, "3"]) == extra | some
    assert vendor.visibility([]) == extra | none
    assert all(name.startswith(("RAY_EXPERIMENTAL_NOSET_", "CUDA_DEVICE_ORDER")) for name in extra)


def test_a_device_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="device ids 1,0,1 name a device twice"):
        nvidia.NVIDIA.visibility([1, 0, "1"])


def read_back(vendor: AcceleratorType | str, environ: dict[str, str], count: int) -> tuple[str, ...]:
    devices = [Device(str(i), "device", 80.0) for i in range(count)]
    if vendor == AcceleratorType.INTEL_GPU:
        return intel.selected_ids(environ["ONEAPI_DEVICE_SELECTOR"], devices)
    if vendor == AcceleratorType.AMD_GPU:
        found = amd.masked(devices, environ)
        return found.physical_ids if found else ()
    variable = next(known.visible_devices_variable for known in BUILT_IN.accelerators if known.type == vendor)
    return allowed_ids(environ[variable], devices)


@given(st.sampled_from(BUILT_IN.accelerators), st.permutations(range(8)), st.integers(0, 8))
def test_what_a_worker_is_given_is_what_it_sees(vendor, order, count) -> None:  # type: ignore[no-untyped-def]
    ids = order[:count]
    assert read_back(vendor.type, vendor.visibility(ids), 8) == tuple(map(str, ids))


@given(st.lists(st.sampled_from(["0", "1", "2", "3", "9", "-1", "", "GPU-1", "GPU-", "MIG-7", "x"]), max_size=6))
def test_a_mask_never_invents_or_repeats_a_device(entries: list[str]) -> None:
    devices = [Device(str(i), "H100", uuid=f"GPU-{i}{i}") for i in range(4)]
    ids = allowed_ids(",".join(entries), devices)
    assert len(set(ids)) == len(ids)
    assert set(ids) <= {"0", "1", "2", "3", "MIG-7"}
    # What the mask leaves, read again as a mask, leaves the same.
    assert not ids or allowed_ids(",".join(ids), devices) == ids


@pytest.mark.parametrize("vendor", BUILT_IN.accelerators, ids=lambda vendor: str(vendor.type))
def test_vendors_travel_between_processes(vendor) -> None:  # type: ignore[no-untyped-def]
    assert pickle.loads(pickle.dumps(vendor)) == vendor
    assert vendor.type.value == vendor.type.name


def test_a_count_that_contradicts_the_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 3, but there are 1 physical ids"):
        DetectedAccelerators(3, "H100", None, ("0",))
