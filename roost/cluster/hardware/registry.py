"""Every kind of hardware that Roost knows, and how to add one.

Registries are immutable: adding to one returns another, so one process can plan clusters with different hardware.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roost.cluster.hardware.accelerator import Accelerator, AcceleratorType, DetectedAccelerators
from roost.cluster.hardware.accelerators.amd import AMD
from roost.cluster.hardware.accelerators.ascend import ASCEND
from roost.cluster.hardware.accelerators.intel import INTEL
from roost.cluster.hardware.accelerators.kunlun import KUNLUN
from roost.cluster.hardware.accelerators.moore_threads import MOORE_THREADS
from roost.cluster.hardware.accelerators.nvidia import NVIDIA
from roost.cluster.hardware.accelerators.simulated import SIMULATED

if TYPE_CHECKING:
    from roost.cluster.hardware.robot import HardwareConfig

ENTRY_POINT_GROUP = "roost.hardware"
VARIABLE = "ROOST_HARDWARE"

# Name of detected accelerators; a declared kind with this name would be ambiguous.
RESERVED_KIND = "Accelerator"


@dataclass(frozen=True, slots=True)
class HardwareRegistry:
    """Accelerators in the order of detection, and kinds of declared hardware by name.

    A kind is stored as its class, or as `module:Class` until first use: only jobs that declare robots import pydantic.

    >>> BUILT_IN.kind_names
    ('Franka', 'DualFranka', 'GimArm', 'DOSW1', 'Turtle2')
    >>> BUILT_IN.kind("Franka").__name__
    'FrankaConfig'
    """

    accelerators: tuple[Accelerator, ...] = ()
    kinds: tuple[tuple[str, str | type[HardwareConfig]], ...] = ()

    @property
    def kind_names(self) -> tuple[str, ...]:
        """Names of the declared kinds, those built in first."""
        return tuple(name for name, _ in self.kinds)

    def kind(self, name: str) -> type[HardwareConfig] | None:
        """Return the config class of a kind, or None. Names are case-sensitive."""
        held = dict(self.kinds).get(name)
        return _import(held) if isinstance(held, str) else held

    def accelerator(self, type: AcceleratorType | str) -> Accelerator | None:
        """Return the vendor of a type, or None.

        >>> BUILT_IN.accelerator("NPU").communication_backend
        'hccl'
        """
        return next((known for known in self.accelerators if known.type == type), None)

    def with_kind(self, kind_class: type[HardwareConfig]) -> HardwareRegistry:
        """Return this registry with one more kind of declared hardware."""
        name = _checked_kind(kind_class)
        if name in self.kind_names:
            raise ValueError(f"hardware kind {name!r} is already registered; give {kind_class.__name__} another `kind`")
        return replace(self, kinds=(*self.kinds, (name, kind_class)))

    def with_accelerator(self, accelerator: Accelerator) -> HardwareRegistry:
        """Return this registry with one more vendor, tried before the others.

        Before them, because another vendor's tools may list the same cards, and users who add a vendor have its cards.
        """
        if self.accelerator(accelerator.type) is not None:
            raise ValueError(f"accelerator {str(accelerator.type)!r} is already registered; give it another `type`")
        return replace(self, accelerators=(accelerator, *self.accelerators))

    def detect(self, environ: Mapping[str, str]) -> tuple[Accelerator, DetectedAccelerators] | None:
        """Return the first vendor with usable devices on this machine, with its devices.

        >>> vendor, found = BUILT_IN.detect({"ROOST_FAKE_ACCELERATORS": "8"})
        >>> str(vendor.type), found.count
        ('SIMULATED', 8)
        """
        # Simulation is requested by a variable, so it takes precedence over real devices.
        for vendor in sorted(self.accelerators, key=lambda known: known.type != AcceleratorType.SIMULATED):
            found = vendor.detect(environ)
            if found is not None and found.count:
                return vendor, found
        return None


def _checked_kind(kind_class: type[HardwareConfig]) -> str:
    from roost.cluster.hardware.robot import HardwareConfig

    if not (isinstance(kind_class, type) and issubclass(kind_class, HardwareConfig)):
        raise ValueError(f"{kind_class!r} is not a kind of hardware; derive it from HardwareConfig")
    name = kind_class.kind
    if not name or name == RESERVED_KIND:
        raise ValueError(f"{kind_class.__name__}.kind is {name!r}; set it to the `type` that users are to write")
    unknown = [field for field in kind_class.identifying_fields if field not in kind_class.model_fields]
    if unknown:
        raise ValueError(f"{kind_class.__name__}.identifying_fields names {unknown}, not among its fields; remove them")
    return name


BUILT_IN = HardwareRegistry(
    accelerators=(SIMULATED, AMD, ASCEND, INTEL, KUNLUN, MOORE_THREADS, NVIDIA),
    kinds=(
        ("Franka", "roost.cluster.hardware.robots.kinds:FrankaConfig"),
        ("DualFranka", "roost.cluster.hardware.robots.kinds:DualFrankaConfig"),
        ("GimArm", "roost.cluster.hardware.robots.kinds:GimArmConfig"),
        ("DOSW1", "roost.cluster.hardware.robots.kinds:DOSW1Config"),
        ("Turtle2", "roost.cluster.hardware.robots.kinds:Turtle2Config"),
    ),
)


def installed_registry(environ: Mapping[str, str]) -> HardwareRegistry:
    """Return what is built in, what installed packages offer, and what ROOST_HARDWARE names.

    >>> installed_registry({"ROOST_HARDWARE": "roost.cluster.hardware.robots.kinds:FrankaConfig"}) == BUILT_IN
    True
    """
    registry = BUILT_IN
    for source, reference, remedy in _references(environ):
        try:
            registry = _with(registry, _import(reference))
        # Importing a third-party module can fail in any way; the error must name its package.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{source} {reference!r} cannot be used: {why}; {remedy}") from error
    return registry


def registry_for(kinds: Iterable[str], types: Iterable[str], environ: Mapping[str, str]) -> HardwareRegistry:
    """Return the built-in registry if it knows these kinds and types, else all that is installed.

    Searching installed packages takes longer than most plans, and hardly any job needs it.

    >>> registry_for(["Franka"], ["NV_GPU"], {}) is BUILT_IN
    True
    """
    is_known = all(kind in BUILT_IN.kind_names for kind in kinds) and all(map(BUILT_IN.accelerator, types))
    return BUILT_IN if is_known and not environ.get(VARIABLE) else installed_registry(environ)


def _references(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    from importlib.metadata import entry_points

    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)):
        owner = point.dist.name if point.dist else "its package"
        yield f"entry point {point.name!r} of {owner}", point.value, f"repair or uninstall {owner}"
    for reference in environ.get(VARIABLE, "").split(","):
        if reference.strip():
            yield VARIABLE, reference.strip(), f"write {VARIABLE}=package.module:Name with a name that can be imported"


def _import(reference: str) -> Any:
    module, colon, path = reference.partition(":")
    if not (colon and module.strip() and path.strip()):
        raise ValueError(f"{reference!r} is not of the form package.module:Name")
    found: Any = importlib.import_module(module.strip())
    for name in path.strip().split("."):
        found = getattr(found, name)
    return found


def _with(registry: HardwareRegistry, thing: Any) -> HardwareRegistry:
    if isinstance(thing, Accelerator):
        return registry if thing in registry.accelerators else registry.with_accelerator(thing)
    # The same class may be offered by its package and named in the variable as well.
    if registry.kind(str(getattr(thing, "kind", ""))) is thing:
        return registry
    return registry.with_kind(thing)
