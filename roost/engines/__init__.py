"""Inference servers behind one protocol: started, watched, put to sleep, given new weights and stopped as planned.

Names are imported when they are first used, so that a planner does not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "fleet": ("Fleet", "FleetSettings"),
    "server_process": ("LocalOwner",),
    "command": ("EngineKind", "ServerSpec"),
    "protocol": (
        "Completion",
        "ContextFull",
        "EngineError",
        "EngineLost",
        "EngineRefused",
        "Finish",
        "InFlight",
        "NotOffered",
        "Part",
        "Sampling",
        "UpdateFailed",
        "VersionSpan",
    ),
    "members": ("RestartLimit", "EngineState"),
    "supervision": ("Watchfulness",),
    "planned": ("EnginePlan", "plan_engines"),
    "worker": ("EngineGroup",),
    "residency": ("EngineSwitch",),
    "tiny_model": ("write_tiny_model",),
    "weights.update": ("BroadcastSender", "LocalSender", "WeightUpdate", "WeightRoute"),
    "weights.source": ("ModuleSource",),
    "weights.carriers": (
        "LiveDeviceCarrier",
        "PackedDeviceCarrier",
        "SharedMemoryCarrier",
        "VllmWeightGroup",
        "device_carrier",
        "write_checkpoint",
    ),
    "weights.probe": ("Probe", "make_probe"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'roost.engines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"roost.engines.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
