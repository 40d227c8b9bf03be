"""Roost places, launches and runs reinforcement-learning post-training jobs on any mix of machines.

Names are imported when they are first used, so that `import roost` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "roost.placement.planner": ("PlanOptions", "plan"),
    "roost.placement.plan": ("Plan",),
    "roost.placement.placement": ("Placement",),
    "roost.placement.component_plan": ("PlacementMode",),
    "roost.placement.strategies": (
        "FlexiblePlacementStrategy",
        "NodePlacementStrategy",
        "PackedPlacementStrategy",
        "PlacementStrategy",
    ),
    "roost.placement.components": (
        "ComponentPlacement",
        "HybridComponentPlacement",
        "ListedPlacementStrategy",
        "ModelParallelComponentPlacement",
        "SpreadPlacementStrategy",
    ),
    "roost.cluster.inventory": ("Inventory", "Node"),
    "roost.cluster.hardware.accelerator": ("Accelerator", "AcceleratorType"),
    "roost.cluster.hardware.robot": ("HardwareConfig",),
    "roost.cluster.hardware.registry": ("HardwareRegistry",),
    "roost.runtime.cluster": ("Cluster",),
    "roost.runtime.worker": ("LaunchOptions", "Worker", "WorkerGroup"),
    "roost.transport.channel": ("Channel",),
    "roost.transport.context": ("PeerLost", "WaitedTooLong", "WorkerFailed"),
    "roost.transport.mailboxes": ("ChannelClosed",),
    "roost.config.findings": ("ConfigError", "Finding"),
    "roost.config.job": ("Job", "Layout", "Notation"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
