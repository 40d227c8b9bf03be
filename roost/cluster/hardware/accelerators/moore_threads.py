"""Moore Threads (MUSA) GPUs, found with mthreads-gmi."""

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
    run_tool,
)

# "0    MTT S4000      |00000000:1a:00.0    |0%    0MiB(49152MiB)"
ROW = r"(?m)^\s*(\d+)\s+(\S.*?)\s*\|[^|]*\|[^|]*\(\s*(\d+)\s*MiB\s*\)\s*$"


def parse(text: str, mask: str | None) -> DetectedAccelerators | None:
    """Read the table that mthreads-gmi prints.

    >>> parse("0    MTT S4000      |00000000:1a:00.0    |0%    0MiB(49152MiB)", mask=None)
    DetectedAccelerators(count=1, model='MTT S4000', memory_gb=48.0, physical_ids=('0',))
    """
    devices = [Device(index, name, gib(int(mebibytes), 1024)) for index, name, mebibytes in re.findall(ROW, text)]
    return detected(devices, allowed_ids(mask, devices))


def detect(environ: Mapping[str, str]) -> DetectedAccelerators | None:
    """Return the Moore Threads GPUs of this machine, or None."""
    text = run_tool(("mthreads-gmi",), environ)
    return None if text is None else parse(text, environ.get(MOORE_THREADS.visible_devices_variable))


MOORE_THREADS = Accelerator(
    type=AcceleratorType.MUSA_GPU,
    vendor="Moore Threads",
    visible_devices_variable="MUSA_VISIBLE_DEVICES",
    communication_backend="mccl",
    socket_interface_variable="MCCL_SOCKET_IFNAME",
    ray_resource="GPU",
    detect=detect,
    extra_environment=(("RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES", "1"),),
    # The vendor does not say what an empty value does; an index that does not exist cannot be taken for "unset".
    hidden_value="-1",
)
