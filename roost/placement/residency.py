"""What is resident when: for every device, who holds it in which phase, in which state, with how much memory.

Components that share devices are kept together, put to sleep in turn, or restarted: by the memory figures of a config,
by figures computed from the models, or, where neither is there, by what the config says about offloading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from roost.cluster.inventory import Inventory
from roost.placement.component_plan import ComponentPlan
from roost.placement.device_classes import DeviceClass, device_classes
from roost.placement.footprints import Footprint, footprint
from roost.placement.loop_memory import MemoryRefused, Sharing, share_device
from roost.placement.memory import CONTEXT_GIB, RESERVED_FRACTION, SLEEPING_ENGINE_GIB, SYNC_BUCKET_GIB
from roost.placement.phases import Phase, State, works_in
from roost.spec.errors import Findings, Where
from roost.spec.job import Notation, Role

MEMORY_KEYS = ("inference_requires_memory_gb", "learning_requires_memory_gb")


class Decision(StrEnum):
    """What components that share a device do about it."""

    KEEP = "keep"
    SLEEP = "sleep"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Share:
    """A component's part of a device in a phase: its state, and its memory on device and host (None: unknown)."""

    component: str
    state: State
    device_gib: float | None
    host_gib: float | None


@dataclass(frozen=True, eq=False)
class ClassResidency:
    """One class of devices through the phases."""

    device_class: DeviceClass
    decision: Decision
    reason: str
    phases: Mapping[Phase, tuple[Share, ...]]
    sharing: Sharing | None = None  # the fractions, where ml-loop's figures decide

    def used_gib(self, phase: Phase) -> float | None:
        """The sum on each device of the class, or None where a part of it is not known."""
        parts = [share.device_gib for share in self.phases[phase]]
        runs = [share for share in self.phases[phase] if share.state is State.RUNS]
        extra = SYNC_BUCKET_GIB if phase is Phase.SYNC and len(runs) > 1 else 0.0
        known = [part for part in parts if part is not None]
        return sum(known) + extra if len(known) == len(parts) else None


@dataclass(frozen=True, eq=False)
class Residency:
    """The residency of a whole plan: one entry for each class of devices."""

    classes: tuple[ClassResidency, ...]
    is_async: bool

    def of(self, component: str) -> tuple[ClassResidency, ...]:
        """The classes that a component holds."""
        return tuple(part for part in self.classes if component in part.device_class.components)


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """What of the job's settings the residency depends on."""

    notation: Notation
    is_async: bool
    inference_gb: float | None
    learning_gb: float | None
    cap: float | None

    @classmethod
    def of(cls, notation: Notation, settings: Mapping[str, object]) -> ResidencySettings:
        ratio = settings.get("async_generation_ratio")
        numbers = {key: value for key, value in settings.items() if isinstance(value, int | float)}
        return cls(
            notation,
            is_async=settings.get("async_rollouts") is True or (isinstance(ratio, int | float) and ratio > 0),
            inference_gb=numbers.get("inference_requires_memory_gb"),
            learning_gb=numbers.get("learning_requires_memory_gb"),
            cap=numbers.get("max_gpu_mem_utilization"),
        )


def find_residency(
    components: Sequence[ComponentPlan],
    inventory: Inventory,
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> Residency:
    """Decide for every class of devices; what does not fit, or can never run, goes to `findings`.

    `places` says where each component (and each memory key) stands in the config.
    """
    by_name = {part.name: part for part in components}
    if settings.notation is Notation.LOOP and (settings.inference_gb is None) != (settings.learning_gb is None):
        _loop_sharing(DeviceClass(np.zeros(0, np.int64), (), None), settings, places, findings)
    classes = tuple(
        _class_residency(device_class, by_name, settings, places, findings)
        for device_class in device_classes(components, inventory)
    )
    return Residency(classes, settings.is_async)


def _class_residency(
    device_class: DeviceClass,
    components: Mapping[str, ComponentPlan],
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> ClassResidency:
    held = [components[name] for name in device_class.components]
    prints = {part.name: footprint(part, device_class.memory_gb) for part in held}
    decision, reason, sharing = _decide(device_class, held, prints, settings, places, findings)
    if settings.notation is Notation.LOOP:
        prints = {part.name: _by_figures(part, prints[part.name], settings) for part in held}
    names = frozenset(components)
    phases = {
        phase: tuple(_share(part, phase, decision, prints[part.name], names, held, settings.is_async) for part in held)
        for phase in Phase
    }
    made = ClassResidency(device_class, decision, reason, phases, sharing)
    _check_fit(made, places, findings)
    return made


def _decide(
    device_class: DeviceClass,
    held: Sequence[ComponentPlan],
    prints: Mapping[str, Footprint],
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> tuple[Decision, str, Sharing | None]:
    used = [part for part in held if not part.model.unused_because]
    roles = {part.role for part in used}
    if len(used) < 2 or not roles & {Role.LEARNER, Role.SCORER} or len(roles) == 1:
        return Decision.KEEP, "nothing else needs the device in another phase", None
    engines = [part for part in used if part.role is Role.ENGINE]
    turns = Decision.SLEEP if all(part.model.can_sleep for part in engines) else Decision.RESTART
    if settings.notation is Notation.LOOP:
        sharing = _loop_sharing(device_class, settings, places, findings)
        if sharing is not None:
            return (Decision.KEEP, "both fit into 95 % of the device", sharing) if sharing.keeps_both else (
                turns, "both do not fit into 95 % of the device", sharing)  # fmt: skip
    total = _known_sum([prints[part.name].active for part in used])
    limit = RESERVED_FRACTION * (device_class.memory_gb or 0.0)
    fits = None if total is None or device_class.memory_gb is None else total <= limit
    sums = "" if fits is None else f"together {total:.1f} GiB of {limit:.1f} GiB usable"
    if settings.notation is Notation.RLINF and any(part.model.offloads for part in used):
        note = f", though both would fit: {sums}" if fits else ""
        return turns, f"the config offloads between phases{note}", None
    if fits is not None:
        return (Decision.KEEP if fits else turns), sums, None
    if settings.notation is Notation.ROLL:
        return turns, "ROLL offloads between phases", None
    return Decision.KEEP, "the config does not offload, and no memory figures are known", None


def _loop_sharing(
    device_class: DeviceClass, settings: ResidencySettings, places: Mapping[str, Where], findings: Findings
) -> Sharing | None:
    if device_class.memory_gb is None and settings.inference_gb is not None and settings.learning_gb is not None:
        findings.warn(
            places.get(MEMORY_KEYS[0], Where(path=("rl", MEMORY_KEYS[0]))),
            "cannot be held against the device, whose memory is not known",
            fix="give an inventory with memory_gb",
        )
        return None
    try:
        return share_device(
            True,
            settings.inference_gb,
            settings.learning_gb,
            device_class.memory_gb or 1.0,
            settings.is_async,
            settings.cap,
        )
    except MemoryRefused as refused:
        findings.error(places.get(refused.key, Where(path=(refused.key,))), refused.what, refused.why, refused.fix)
        return None


def _by_figures(part: ComponentPlan, computed: Footprint, settings: ResidencySettings) -> Footprint:
    """The footprint with ml-loop's figure in place of a computed one."""
    is_learner = part.role is Role.LEARNER
    figure = settings.learning_gb if is_learner else settings.inference_gb
    left = CONTEXT_GIB if is_learner else SLEEPING_ENGINE_GIB
    return computed if figure is None else Footprint(figure, figure, left, computed.host, computed.weights)


def _share(
    part: ComponentPlan,
    phase: Phase,
    decision: Decision,
    size: Footprint,
    names: Collection[str],
    held: Sequence[ComponentPlan],
    is_async: bool,
) -> Share:
    state = _state(part, phase, decision, names, held, is_async)
    if state is State.RUNS:
        weights_only = phase is Phase.SYNC and part.role is Role.LEARNER
        return Share(part.name, state, size.weights if weights_only else size.active, 0.0)
    if state is State.STAYS:
        return Share(part.name, state, size.resident, 0.0)
    if state in (State.STOPPED, State.UNUSED):
        return Share(part.name, state, 0.0, 0.0)
    return Share(part.name, state, size.idle, size.host)


def _state(
    part: ComponentPlan,
    phase: Phase,
    decision: Decision,
    names: Collection[str],
    held: Sequence[ComponentPlan],
    is_async: bool,
) -> State:
    if part.model.unused_because:
        return State.UNUSED
    if works_in(part.name, part.role, phase, names):
        return State.RUNS
    rivals = [other for other in held if other is not part and works_in(other.name, other.role, phase, names)]
    if decision is Decision.KEEP or not rivals:
        # An engine that generates while others learn never stops where nobody else needs its device.
        return State.RUNS if is_async and part.role is Role.ENGINE and not rivals else State.STAYS
    if part.role is Role.ENGINE:
        return State.STOPPED if decision is Decision.RESTART else State.SLEEPS
    return State.OFFLOADED if part.model.offloads or part.role is Role.SCORER else State.STAYS


def _check_fit(made: ClassResidency, places: Mapping[str, Where], findings: Findings) -> None:
    """An over-full device is an error that shows the sum."""
    memory = made.device_class.memory_gb
    if memory is None:
        return
    for phase in Phase:
        used = made.used_gib(phase)
        if used is None or used <= memory:
            continue
        parts = [f"{share.component} {share.device_gib:.1f}" for share in made.phases[phase] if share.device_gib]
        if phase is Phase.SYNC and len(parts) > 1:
            parts.append(f"weights in flight {SYNC_BUCKET_GIB:.1f}")
        largest = max(made.phases[phase], key=lambda share: share.device_gib or 0.0).component
        findings.error(
            places.get(largest, Where()),
            f"does not fit: {used:.1f} GiB on a device of {memory:g} GiB in the phase {phase.value}",
            " + ".join(parts) + f" = {used:.1f} GiB",
            _mend(made),
        )
        return


def _mend(made: ClassResidency) -> str:
    """What would help on devices that are over-full, which depends on who is there."""
    names = made.device_class.components
    more = "use more devices or larger parallel sizes"
    return (
        f"{more}, offload more, or give engines a smaller memory fraction"
        if len(names) > 1
        else f"{more}, or smaller batches"
    )


def _known_sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
