"""NVIDIA GPUs, found with nvidia-smi."""

from __future__ import annotations

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

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")


def parse(text: str, mask: str | None) -> DetectedAccelerators | None:
    """Read the answer to QUERY.

    >>> parse("0, GPU-1a, NVIDIA H100, 81559\\n1, GPU-2b, NVIDIA H100, 81559\\n", mask="GPU-2")
    DetectedAccelerators(count=1, model='NVIDIA H100', memory_gb=79.6, physical_ids=('1',))
    """
    devices = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            index, uuid, name, mebibytes = fields
            # Devices that share the host's memory answer "[N/A]".
            memory = gib(int(mebibytes), 1024) if mebibytes.isdigit() else None
            devices.append(Device(index, name, memory, uuid))
    return detected(devices, allowed_ids(mask, devices))


def detect(environ: Mapping[str, str]) -> DetectedAccelerators | None:
    """Return the NVIDIA GPUs of this machine, or None."""
    text = run_tool(QUERY, environ)
    return None if text is None else parse(text, environ.get(NVIDIA.visible_devices_variable))


NVIDIA = Accelerator(
    type=AcceleratorType.NV_GPU,
    vendor="NVIDIA",
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    communication_backend="nccl",
    socket_interface_variable="NCCL_SOCKET_IFNAME",
    ray_resource="GPU",
    detect=detect,
    extra_environment=(
        ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1"),
        # CUDA by itself counts the fastest device first, nvidia-smi by bus; with unequal cards the ids would differ.
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    ),
    # Unlike an unset variable, an empty one hides every device.
    hidden_value="",
)
