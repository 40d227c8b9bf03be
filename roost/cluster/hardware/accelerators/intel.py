"""Intel GPUs, found in sysfs; xpu-smi adds name, memory and tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roost.cluster.hardware.accelerator import (
    Accelerator,
    AcceleratorType,
    DetectedAccelerators,
    Device,
    detected,
    gib,
    numbered_files,
    read_file,
    run_tool,
)

DRM = "/sys/class/drm"
# PCI address of graphics integrated in an Intel processor; cards never have it.
INTEGRATED_ADDRESS = "0000:00:02.0"
VENDOR_ID = "0x8086"


def count_cards(drm: str) -> int:
    """Number of Intel cards, without graphics integrated in the processor."""
    from pathlib import Path

    count = 0
    for number in numbered_files(drm, "card"):
        device = f"{drm}/card{number}/device"
        vendor = (read_file(f"{device}/vendor") or "").strip()
        count += vendor == VENDOR_ID and Path(device).resolve().name != INTEGRATED_ADDRESS
    return count


def parse(detail: str, cards: int, environ: Mapping[str, str]) -> DetectedAccelerators | None:
    """Read `xpu-smi discovery -d 0 -j` for a machine with `cards` equal cards.

    >>> parse('{"device_name": "Intel Max 1550", "memory_physical_size_byte": "137438953472", "number_of_tiles": "2"}',
    ...       cards=1, environ={})
    DetectedAccelerators(count=2, model='Intel Max 1550', memory_gb=64.0, physical_ids=('0', '1'))
    """
    card = _json_object(detail)
    size, tiles = _whole(card.get("memory_physical_size_byte")), _whole(card.get("number_of_tiles")) or 1
    if environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE":
        tiles = 1  # otherwise, and by default, each tile is a device of its own, with its share of the memory
    memory = gib(size / tiles, 1024**3) if size else None
    name = str(card.get("device_name") or "Intel GPU")
    devices = [Device(str(i), name, memory) for i in range(cards * tiles)]
    return detected(devices, selected_ids(environ.get(INTEL.visible_devices_variable), devices))


def selected_ids(selector: str | None, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the ids that an outer ONEAPI_DEVICE_SELECTOR leaves: filters separated by `;`, those with `!` exclude.

    >>> pair = [Device("0", "Max"), Device("1", "Max")]
    >>> selected_ids("level_zero:1,0", pair), selected_ids("!level_zero:0", pair), selected_ids("opencl:cpu", pair)
    (('1', '0'), ('1',), ())
    """
    everything = [device.id for device in devices]
    if selector is None:
        return tuple(everything)
    filters = [part.strip().lower() for part in selector.split(";") if part.strip()]
    accepting = [part for part in filters if not part.startswith("!")]
    if not accepting and filters:
        accepting = ["*:*"]
    accepted = [id for part in accepting for id in _matching(part, everything)]
    discarded = {id for part in filters if part.startswith("!") for id in _matching(part[1:], everything)}
    return tuple(dict.fromkeys(id for id in accepted if id not in discarded))


def _matching(part: str, everything: list[str]) -> list[str]:
    backend, _, wanted = part.partition(":")
    if backend not in ("level_zero", "*"):
        return []
    items = [item.strip() for item in wanted.split(",")]
    return [id for item in items for id in (everything if item in ("*", "gpu") else [item]) if id in everything]


def _json_object(text: str) -> dict[str, object]:
    import json

    try:
        answer = json.loads(text)
    except ValueError:  # Kunlun's tool has the same name and prints a table
        return {}
    return answer if isinstance(answer, dict) else {}


def _whole(value: object) -> int:
    return int(str(value)) if str(value).isdigit() else 0


def detect(environ: Mapping[str, str], drm: str = DRM) -> DetectedAccelerators | None:
    """Return the Intel GPUs of this machine, or None."""
    cards = count_cards(drm)
    if not cards:
        return None
    return parse(run_tool(("xpu-smi", "discovery", "-d", "0", "-j"), environ) or "", cards, environ)


INTEL = Accelerator(
    type=AcceleratorType.INTEL_GPU,
    vendor="Intel",
    visible_devices_variable="ONEAPI_DEVICE_SELECTOR",
    communication_backend="ccl",
    socket_interface_variable="CCL_MNIC_NAME",
    ray_resource="GPU",
    detect=detect,
    extra_environment=(("RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR", "1"),),
    id_prefix="level_zero:",
    # An empty selector is an error in the SYCL runtime, and so is a backend without a device. This accepts only the
    # CPU; the second filter has no further effect, but Ray reads what follows "level_zero:" and fails without it.
    hidden_value="opencl:cpu;!level_zero:*",
)
