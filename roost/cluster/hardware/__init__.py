"""Hardware: accelerators, which are detected, and devices such as robots, which are declared.

Robots are imported on first use: they need pydantic, and planning for accelerators alone does not.
"""

from typing import TYPE_CHECKING, Any

from roost.cluster.hardware.accelerator import Accelerator, AcceleratorType, DetectedAccelerators
from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry, installed_registry

if TYPE_CHECKING:
    from roost.cluster.hardware.robot import HardwareConfig, Problem, fill_from_environment, parse_config

__all__ = [
    "BUILT_IN",
    "Accelerator",
    "AcceleratorType",
    "DetectedAccelerators",
    "HardwareConfig",
    "HardwareRegistry",
    "Problem",
    "fill_from_environment",
    "installed_registry",
    "parse_config",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from roost.cluster.hardware import robot

        return getattr(robot, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
