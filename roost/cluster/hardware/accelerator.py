"""Accelerator vendors, and helpers to detect devices: run a vendor's tool, list device files, apply an outer mask."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class AcceleratorType(StrEnum):
    """Vendors that Roost knows. The value is the name, so a type written to JSON reads back as itself.

    >>> AcceleratorType("NV_GPU") is AcceleratorType.NV_GPU
    True
    """

    NV_GPU = "NV_GPU"
    AMD_GPU = "AMD_GPU"
    NPU = "NPU"
    INTEL_GPU = "INTEL_GPU"
    MUSA_GPU = "MUSA_GPU"
    KUNLUN_XPU = "KUNLUN_XPU"
    SIMULATED = "SIMULATED"
    NO_ACCEL = "NO_ACCEL"


@dataclass(frozen=True, slots=True)
class DetectedAccelerators:
    """The devices of one vendor on one machine that this process may use.

    `physical_ids` are what the vendor calls the devices, in the order of an outer mask (such as a
    `CUDA_VISIBLE_DEVICES` set by a batch system), or all of them where there is none. `memory_gb` is of the smallest
    device, in units of 1024 MiB as the vendors' tools count; None if unknown. A machine whose devices are all masked
    has a count of 0.

    >>> DetectedAccelerators(count=2, model="NVIDIA H100", memory_gb=79.6, physical_ids=("6", "7")).count
    2
    """

    count: int
    model: str
    memory_gb: float | None
    physical_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.count != len(self.physical_ids):
            raise ValueError(f"count is {self.count}, but there are {len(self.physical_ids)} physical ids")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One vendor: its names in Ray, PyTorch and the environment, and how its devices are detected.

    `type` may be any string, so that a vendor unknown to Roost can be registered. `mirrored_variables` get the same
    value as `visible_devices_variable`. `id_prefix` stands before the list of ids, and `hidden_value` hides every
    device. `detect` takes an environment and returns None if the machine has no devices of the vendor; it does not
    raise if the vendor's software is missing.

    >>> from roost.cluster.hardware.accelerators.nvidia import NVIDIA
    >>> NVIDIA.visibility([2, 3])["CUDA_VISIBLE_DEVICES"]
    '2,3'
    """

    type: AcceleratorType | str
    vendor: str
    visible_devices_variable: str
    communication_backend: str
    socket_interface_variable: str
    ray_resource: str
    detect: Callable[[Mapping[str, str]], DetectedAccelerators | None]
    extra_environment: tuple[tuple[str, str], ...] = ()
    mirrored_variables: tuple[str, ...] = ()
    id_prefix: str = ""
    hidden_value: str = ""

    def visibility(self, ids: Sequence[str | int]) -> dict[str, str]:
        """Return every variable to set for a worker that may see these devices and no others.

        >>> from roost.cluster.hardware.accelerators.intel import INTEL
        >>> INTEL.visibility([0, 1])["ONEAPI_DEVICE_SELECTOR"]
        'level_zero:0,1'
        """
        return {**dict(self.extra_environment), **self.masks(ids)}

    def masks(self, ids: Sequence[str | int]) -> dict[str, str]:
        """Return the variables that list these devices, or hide every device if there are none."""
        names = [str(device) for device in ids]
        if len(set(names)) < len(names):
            # CUDA would hide every device, and the error would come up much later.
            raise ValueError(f"device ids {','.join(names)} name a device twice; give each id once")
        value = self.id_prefix + ",".join(names) if names else self.hidden_value
        return dict.fromkeys((self.visible_devices_variable, *self.mirrored_variables), value)


# A driver without persistence mode wakes every device before it answers: about a second for each.
TOOL_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device as its vendor's tool describes it."""

    id: str
    name: str
    memory_gb: float | None = None
    uuid: str = ""


def run_tool(command: Sequence[str], environ: Mapping[str, str], timeout: float = TOOL_TIMEOUT_SECONDS) -> str | None:
    """Return the output of a vendor's tool, or None if it is not installed or fails."""
    # Imported here because planning imports this file on every start and never runs a tool.
    import shutil
    import subprocess
    import warnings

    program = shutil.which(command[0], path=environ.get("PATH", os.defpath))
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, *command[1:]],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        # A hung driver must not look like a machine without devices.
        warnings.warn(
            f"{command[0]} gave no answer in {timeout:g} s, so its devices are not seen; run it by hand to see why",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    except OSError:
        return None
    # Tools are also installed where there is no driver (in container images); they say so by their exit status.
    return answer.stdout if answer.returncode == 0 else None


def read_file(path: str) -> str | None:
    """Return the text of a file, or None if it cannot be read: a container sees more of /sys than it may read."""
    from pathlib import Path  # imported here, as in run_tool

    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def numbered_files(directory: str, prefix: str) -> list[int]:
    """Return the numbers N for which `directory/prefixN` exists, ascending."""
    from pathlib import Path  # imported here, as in run_tool

    try:
        names = [path.name for path in Path(directory).iterdir()]
    except OSError:
        return []
    tails = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(int(tail) for tail in tails if tail.isascii() and tail.isdigit())


def allowed_ids(mask: str | None, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the ids that an outer mask leaves visible, in its order, by the rules of CUDA that the others follow.

    An entry is an id, or a UUID or the start of one. The first entry that names no device ends the list, and a device
    named twice empties it.

    >>> four = [Device(str(i), "H100", uuid=f"GPU-{i}f") for i in range(4)]
    >>> allowed_ids("3,GPU-1,9,0", four)
    ('3', '1')
    """
    if mask is None:
        return tuple(device.id for device in devices)
    ids: list[str] = []
    for entry in mask.split(","):
        found = _device_named(entry.strip(), devices)
        if found is None:
            break
        if found in ids:
            return ()
        ids.append(found)
    return tuple(ids)


def _device_named(entry: str, devices: Sequence[Device]) -> str | None:
    if entry.startswith("MIG-"):
        # A slice of a device has no index of its own, and the tools' device query does not list it.
        return entry
    if entry.startswith("GPU-"):
        matches = [device.id for device in devices if device.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return next((device.id for device in devices if device.id == entry), None)


def detected(devices: Sequence[Device], ids: Sequence[str]) -> DetectedAccelerators | None:
    """Summarise the devices with these ids; None if the machine has no devices at all.

    >>> detected([Device("0", "A100", 40.0), Device("1", "A100", 80.0)], ["1", "0"])
    DetectedAccelerators(count=2, model='A100', memory_gb=40.0, physical_ids=('1', '0'))
    """
    if not devices:
        return None
    chosen = [device for device in devices if device.id in ids]
    memories = [device.memory_gb for device in chosen if device.memory_gb is not None]
    # A placement has to fit the smallest device; one of unknown size (such as a slice) makes that unknown.
    known = bool(ids) and len(memories) == len(ids)
    model = " + ".join(dict.fromkeys(device.name for device in chosen or devices))
    return DetectedAccelerators(len(ids), model, min(memories) if known else None, tuple(ids))


def gib(size: float, units_per_gib: int) -> float:
    """Return a size in GiB, rounded to one decimal."""
    return round(size / units_per_gib, 1)
