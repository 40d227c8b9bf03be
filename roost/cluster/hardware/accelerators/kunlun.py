"""Kunlunxin XPUs, found by their device files; xpu-smi adds name and memory."""

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

# `xpu-smi -m` prints a line of bare fields for each device, with the name in quotes among the last.
DEVICE_FIELD = 1
MEMORY_FIELD = 18
QUOTED = r'"([^"]+)"'


def parse(text: str, numbers: list[int], mask: str | None) -> DetectedAccelerators | None:
    """Read `xpu-smi -m` for a machine with these device files.

    >>> line = "0000:03:00.0 0 " + "0 " * 16 + '98304 0 0 "P800 OAM"'
    >>> parse(line, [0], mask=None)
    DetectedAccelerators(count=1, model='P800 OAM', memory_gb=96.0, physical_ids=('0',))
    """
    known: dict[str, tuple[str, float]] = {}
    for line in text.splitlines():
        fields, name = line.split(), re.search(QUOTED, line)
        if name and len(fields) > MEMORY_FIELD and fields[MEMORY_FIELD].isdigit():
            known[fields[DEVICE_FIELD]] = (name[1], gib(int(fields[MEMORY_FIELD]), 1024))
    devices = [Device(str(number), *known.get(str(number), ("Kunlun XPU", None))) for number in numbers]
    return detected(devices, allowed_ids(mask, devices))


def detect(environ: Mapping[str, str], device_files: str = "/dev") -> DetectedAccelerators | None:
    """Return the Kunlun XPUs of this machine, or None."""
    numbers = numbered_files(device_files, "xpu")
    if not numbers:
        return None
    return parse(run_tool(("xpu-smi", "-m"), environ) or "", numbers, environ.get(KUNLUN.visible_devices_variable))


KUNLUN = Accelerator(
    type=AcceleratorType.KUNLUN_XPU,
    vendor="Kunlunxin",
    # Its PyTorch presents the devices through the CUDA interface, variable included.
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    communication_backend="bkcl",
    socket_interface_variable="BKCL_SOCKET_IFNAME",
    ray_resource="GPU",
    detect=detect,
    extra_environment=(("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1"),),
    # The vendor does not say what an empty value does; an index that does not exist cannot be taken for "unset".
    hidden_value="-1",
)
