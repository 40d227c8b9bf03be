"""Simulated accelerators, to plan and run a job on a machine without any."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roost.cluster.hardware.accelerator import (
    Accelerator,
    AcceleratorType,
    DetectedAccelerators,
    Device,
    allowed_ids,
    detected,
)

COUNT_VARIABLE = "ROOST_FAKE_ACCELERATORS"
MEMORY_VARIABLE = "ROOST_FAKE_MEMORY_GB"


def detect(environ: Mapping[str, str]) -> DetectedAccelerators | None:
    """Return as many devices as ROOST_FAKE_ACCELERATORS says, or None if it is unset, empty or 0.

    >>> detect({"ROOST_FAKE_ACCELERATORS": "2", "ROOST_FAKE_MEMORY_GB": "80"})
    DetectedAccelerators(count=2, model='simulated', memory_gb=80.0, physical_ids=('0', '1'))
    """
    count = environ.get(COUNT_VARIABLE, "").strip() or "0"
    if not (count.isascii() and count.isdigit()):
        raise ValueError(f"{COUNT_VARIABLE} is {count!r}, not a count of devices; write one such as 8, or unset it")
    devices = [Device(str(i), "simulated", _memory(environ)) for i in range(int(count))]
    return detected(devices, allowed_ids(environ.get(SIMULATED.visible_devices_variable), devices))


def _memory(environ: Mapping[str, str]) -> float | None:
    text = environ.get(MEMORY_VARIABLE, "").strip()
    if not text:
        return None
    try:
        memory = float(text)
    except ValueError:
        memory = math.nan
    if not 0 < memory < math.inf:
        raise ValueError(f"{MEMORY_VARIABLE} is {text!r}, not a size in GB; write a number such as 80, or unset it")
    return memory


SIMULATED = Accelerator(
    type=AcceleratorType.SIMULATED,
    vendor="simulated",
    visible_devices_variable="ROOST_VISIBLE_DEVICES",
    communication_backend="gloo",
    socket_interface_variable="GLOO_SOCKET_IFNAME",
    # Ray is told to count simulated devices as GPUs, so that a simulated job is reserved like a real one.
    ray_resource="GPU",
    detect=detect,
    hidden_value="",
)
