"""Huawei Ascend NPUs, found by their device files; npu-smi adds name and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from roost.cluster.hardware.accelerator import (
    Accelerator,
    AcceleratorType,
    DetectedAccelerators,
    Device,
    allowed_ids,
    detected,
    gib,
    numbered_files,
    run_tool,
)

# Each chip has two rows: "| 0  910B3 | OK | ..." and "| 0 | 0000:C1:00.0 | ...  3318 / 65536 |".
NAME_ROW = r"(?m)^\|\s*\d+\s+(\S+)\s*\|\s*[A-Za-z]+\s*\|"
MEMORY_ROW = r"(?m)^\|[^|]*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+\s*\|.*/\s*(\d+)\s*\|\s*$"


def parse(text: str, chips: int, mask: str | None) -> DetectedAccelerators | None:
    """Read `npu-smi info` for a machine with `chips` chips.

    >>> parse("| 0  910B3 | OK | 91 43 0 / 0 |\\n| 0 | 0000:C1:00.0 | 0 0 / 0 3357 / 65536 |", chips=2, mask=None)
    DetectedAccelerators(count=2, model='Ascend 910B3', memory_gb=64.0, physical_ids=('0', '1'))
    """
    name = re.search(NAME_ROW, text)
    memories = [gib(int(mebibytes), 1024) for mebibytes in re.findall(MEMORY_ROW, text)]
    model = f"Ascend {name[1].removeprefix('Ascend')}" if name else "Ascend NPU"
    # The runtime counts chips from 0 whatever their slots: a container given chip 6 alone calls it 0.
    devices = [Device(str(i), model, min(memories, default=None)) for i in range(chips)]
    return detected(devices, allowed_ids(mask, devices))


def detect(environ: Mapping[str, str], device_files: str = "/dev") -> DetectedAccelerators | None:
    """Return the Ascend NPUs of this machine, or None."""
    chips = len(numbered_files(device_files, "davinci"))
    if not chips:
        return None
    return parse(run_tool(("npu-smi", "info"), environ) or "", chips, environ.get(ASCEND.visible_devices_variable))


ASCEND = Accelerator(
    type=AcceleratorType.NPU,
    vendor="Huawei Ascend",
    visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
    communication_backend="hccl",
    socket_interface_variable="HCCL_SOCKET_IFNAME",
    ray_resource="NPU",
    detect=detect,
    extra_environment=(("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "1"),),
    # An empty value hides every chip: it is what Ray writes for a worker without any, and torch then finds none.
    hidden_value="",
)
