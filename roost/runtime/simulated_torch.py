"""Simulated accelerators as torch sees them: code that counts its devices or asks what they are works without any.

Only what looks at devices is answered. `torch.cuda.is_available()` stays false, so that libraries compute on the CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from roost.runtime.process import SimulatedDevices

GIB = 2**30


def show_to_torch(devices: SimulatedDevices) -> None:
    """Let torch count simulated accelerators, whenever it is imported in this process."""
    if "torch" in sys.modules:
        _teach(sys.modules["torch"], devices)
    else:
        sys.meta_path.insert(0, _TeachOnImport(lambda torch: _teach(torch, devices)))


def _teach(torch: Any, devices: SimulatedDevices) -> None:
    count, memory = devices.count, int((devices.memory_gb or 0) * GIB)

    def properties(device: Any = 0) -> SimpleNamespace:
        index = getattr(device, "index", device)
        index = int(str(index).removeprefix("cuda").removeprefix(":") or 0) if index is not None else 0
        if not 0 <= index < count:
            raise AssertionError(f"device {index} is not visible; this process sees {count}")
        return SimpleNamespace(name="simulated", total_memory=memory, major=0, minor=0, multi_processor_count=1)

    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_properties = properties
    torch.cuda.get_device_name = lambda device=0: properties(device).name


class _TeachOnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as everybody else would, and changes it once it is loaded."""

    def __init__(self, teach: Callable[[Any], None]) -> None:
        self._teach = teach
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._teach(module)
