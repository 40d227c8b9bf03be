"""Accelerators as values: what a vendor is called, how its devices are found, and how a worker is limited to some."""

from __future__ import annotations

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
    """One vendor: its names in every system that has to agree on them, and its detection.

    `type` may be any string, so that a vendor unknown to Roost can be registered. `mirrored_variables` get the same
    value as `visible_devices_variable`. `id_prefix` stands before the list of ids, and `hidden_value` is what hides
    every device, which no two vendors agree on. `detect` takes an environment and returns None where the vendor has
    no devices; it never raises for lack of a vendor's software.

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
            # CUDA answers a repeated id by hiding every device, far from where the mistake was made.
            raise ValueError(f"device ids {','.join(names)} name a device twice; give each id once")
        value = self.id_prefix + ",".join(names) if names else self.hidden_value
        return dict.fromkeys((self.visible_devices_variable, *self.mirrored_variables), value)
