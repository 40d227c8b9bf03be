"""Residency: what is in the memory of each device in each phase, and which components sleep or offload."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from roost.cluster.inventory import Ints, Inventory
from roost.config.findings import Findings, Where
from roost.config.job import Notation, Role, Sharding
from roost.config.notations.loop import MEMORY_KEYS
from roost.placement.component_plan import IN_16_BITS, ComponentPlan
from roost.placement.memory.fixes import fix_of
from roost.placement.memory.model import (
    CONTEXT_GIB,
    RESERVED_FRACTION,
    SLEEPING_ENGINE_GIB,
    SYNC_BUCKET_GIB,
    Footprint,
    footprint,
    in_flight_gib,
    known_shape,
    needed_fraction,
    with_recomputed,
)
from roost.placement.memory.phases import Phase, State, works_in
from roost.placement.memory.sharing import MemoryRefused, Sharing, share_device

FEW_CLASSES = 16


@dataclass(frozen=True, eq=False)
class DeviceClass:
    """Accelerators with equal memory that hold the same components with the same number of processes."""

    devices: Ints  # cluster-wide numbers, ascending
    components: tuple[str, ...]
    memory_gb: float | None
    processes: tuple[int, ...]  # of each component on one device


def device_classes(components: Sequence[ComponentPlan], inventory: Inventory) -> tuple[DeviceClass, ...]:
    """Group accelerators into classes, ordered by first device; unused accelerators are left out."""
    counts = [part.table.processes_on_accelerators for part in components]
    # Detected memory differs by some bytes between equal cards.
    sizes = {memory: round(memory or 0.0, 1) for memory in {node.memory_gb for node in inventory.nodes}}
    numbers = {size: number for number, size in enumerate(sorted(set(sizes.values())))}
    if len(numbers) > 1:
        per_node = np.array([numbers[sizes[node.memory_gb]] for node in inventory.nodes], np.int64)
        memory = np.repeat(per_node, inventory.accelerator_counts)
    else:
        memory = np.zeros(inventory.num_accelerators, np.int64)
    key = memory
    for column in counts:
        # Renumbering after each component keeps the keys small, however many components there are.
        key = _renumbered(key * (int(column.max(initial=0)) + 1) + column)
    classes = []
    for devices in _split(key):
        first = int(devices[0])
        held = [
            (part.name, int(column[first])) for part, column in zip(components, counts, strict=True) if column[first]
        ]
        if held:
            names, processes = zip(*held, strict=True)
            node = inventory.nodes[int(np.searchsorted(inventory.first_accelerators, first, side="right")) - 1]
            classes.append(DeviceClass(devices, names, node.memory_gb or None, processes))
    return tuple(sorted(classes, key=lambda part: int(part.devices[0])))


def _split(key: Ints) -> list[Ints]:
    """Devices of each class; for few classes this is cheaper than sorting all devices."""
    count = int(key.max(initial=-1)) + 1
    if count <= FEW_CLASSES:
        return [np.flatnonzero(key == number) for number in range(count)]
    order = np.argsort(key, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def _renumbered(keys: Ints) -> Ints:
    """Renumber the keys as 0, 1, 2, ... in the same order, without gaps."""
    is_used = np.bincount(keys) > 0
    return (np.cumsum(is_used) - 1)[keys]


IN_FLIGHT = "weights in flight"


class Decision(StrEnum):
    """Handling of components that share a device: keep both, sleep, or restart."""

    KEEP = "keep"
    SLEEP = "sleep"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Share:
    """A component's share of a device in a phase: state, and memory on device and host (None: unknown)."""

    component: str
    state: State
    device_gib: float | None
    host_gib: float | None
    # Memory left on the device while another works in the same phase; None if both work at the same time.
    between_gib: float | None = None


@dataclass(frozen=True, eq=False)
class ClassResidency:
    """Residency of one class of devices in all phases."""

    device_class: DeviceClass
    decision: Decision
    reason: str
    phases: Mapping[Phase, tuple[Share, ...]]
    sharing: Sharing | None = None  # fractions of the device, where the plan chose them
    in_flight_gib: float = SYNC_BUCKET_GIB  # of a sync between components of the class

    def parts(self, phase: Phase) -> tuple[tuple[str, float | None], ...]:
        """Peak memory on each device of the class in a phase, by component.

        Learners and scorers that offload work one after the other, so the largest counts in full, and the others with
        what they leave on the device.
        """
        shares = self.phases[phase]
        offloading = [share for share in shares if share.between_gib is not None and share.device_gib is not None]
        largest = max(offloading, key=lambda share: (share.device_gib or 0) - (share.between_gib or 0), default=None)
        found = [
            (share.component, share.between_gib if share in offloading and share is not largest else share.device_gib)
            for share in shares
        ]
        working = [share for share in shares if share.state is State.RUNS]
        if phase is Phase.SYNC and len(working) > 1:
            found.append((IN_FLIGHT, self.in_flight_gib))
        return tuple(found)

    def used_gib(self, phase: Phase) -> float | None:
        """Sum on each device of the class; None if a part is unknown."""
        return _known_sum([size for _, size in self.parts(phase)])

    @property
    def overlapped_sync_gib(self) -> float | None:
        """Memory of the sync phase if engines take weights while learners still offload the rest."""
        pairs = zip(self.phases[Phase.GENERATE], self.phases[Phase.SYNC], strict=True)
        leaving = [(away, left) for away, left in pairs if away.state is not State.RUNS and left.state is State.RUNS]
        whole = _known_sum([size for away, _ in leaving for size in (away.device_gib, away.host_gib)])
        stays = _known_sum([left.host_gib for _, left in leaving])  # state that the host keeps does not leave
        weights = _known_sum([left.device_gib for _, left in leaving])
        used = self.used_gib(Phase.SYNC)
        if whole is None or stays is None or weights is None or used is None:
            return None
        return used + whole - stays - weights

    @property
    def overlaps_sync(self) -> bool:
        """Return True if the device has room for `overlapped_sync_gib`."""
        needed, memory = self.overlapped_sync_gib, self.device_class.memory_gb
        return memory is not None and needed is not None and needed <= RESERVED_FRACTION * memory


@dataclass(frozen=True, eq=False)
class Residency:
    """Residency of a whole plan, by class of devices."""

    classes: tuple[ClassResidency, ...]
    is_async: bool

    def of(self, component: str) -> tuple[ClassResidency, ...]:
        """Classes of devices that a component uses."""
        return tuple(part for part in self.classes if component in part.device_class.components)


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """Job settings that the residency depends on."""

    notation: Notation
    is_async: bool
    inference_gb: float | None
    learning_gb: float | None
    cap: float | None
    engines_sleep: bool | None = None  # beside a learner; None where the notation does not say

    @classmethod
    def of(cls, notation: Notation, settings: Mapping[str, object]) -> ResidencySettings:
        numbers = {key: value for key, value in settings.items() if isinstance(value, int | float)}
        ahead = max(numbers.get("async_generation_ratio", 0), numbers.get("max_staleness", 0))
        return cls(
            notation,
            is_async=settings.get("async_rollouts") is True or ahead > 0,
            inference_gb=numbers.get("inference_requires_memory_gb"),
            learning_gb=numbers.get("learning_requires_memory_gb"),
            cap=numbers.get("max_gpu_mem_utilization"),
            engines_sleep=sleep if isinstance(sleep := settings.get("engines_sleep"), bool) else None,
        )


def find_residency(
    components: Sequence[ComponentPlan],
    inventory: Inventory,
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> Residency:
    """Decide the residency of every class of devices; classes that do not fit are reported in `findings`.

    `places` has the config positions of components and memory keys.
    """
    by_name = {part.name: part for part in components}
    if settings.notation is Notation.LOOP and (settings.inference_gb is None) != (settings.learning_gb is None):
        _loop_sharing(None, settings, places, findings)
    classes = device_classes(components, inventory)
    result = _residencies(classes, by_name, settings, places, findings)
    if not findings.has_errors:
        for residency in result:
            _check_fit(residency, by_name, settings, classes, places, findings)
    return Residency(result, settings.is_async)


def _residencies(
    classes: Sequence[DeviceClass],
    by_name: Mapping[str, ComponentPlan],
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> tuple[ClassResidency, ...]:
    """The residency of each class."""
    decided = [_decide(one, [by_name[name] for name in one.components], settings, places, findings) for one in classes]
    decided = _with_spanning_engines(classes, decided, [*by_name.values()])
    decided = [_with_fraction(one, choice, by_name) for one, choice in zip(classes, decided, strict=True)]
    return tuple(_class_residency(one, choice, by_name, settings) for one, choice in zip(classes, decided, strict=True))


def with_checkpoints(
    components: Sequence[ComponentPlan], inventory: Inventory, settings: ResidencySettings
) -> tuple[ComponentPlan, ...]:
    """Components whose learners recompute as few layers as memory allows; all layers if memory is not known.

    Which components stay on a device is decided with all layers recomputed.
    """
    chosen = [with_recomputed(part, None) if part.role is Role.LEARNER else part for part in components]
    for index, part in enumerate(chosen):
        if part.role is Role.LEARNER:
            residency = find_residency(chosen, inventory, settings, {}, Findings())
            free = [_free_to_learn(part, one) for one in residency.of(part.name)]
            known = [each for each in free if each is not None]
            if known and len(known) == len(free):
                chosen[index] = with_recomputed(part, checkpointed_layers(part, min(known)))
    return tuple(chosen)


def checkpointed_layers(component: ComponentPlan, free_gib: float) -> int | None:
    """Fewest layers that a learner must recompute to use at most `free_gib` more than with all; None if not known."""
    shape = known_shape(component)
    if shape is None:
        return None

    def needed(layers: int | None) -> float:
        return footprint(with_recomputed(component, layers), None).active or 0.0

    whole = needed(None)
    return next((count for count in range(shape.layers) if needed(count) - whole <= free_gib), shape.layers)


def _free_to_learn(part: ComponentPlan, residency: ClassResidency) -> float | None:
    """GiB of a device that each of a learner's processes there could use while it learns; None if not known."""
    held, used = residency.device_class, residency.used_gib(Phase.LEARN)
    if held.memory_gb is None or used is None:
        return None
    return (RESERVED_FRACTION * held.memory_gb - used) / held.processes[held.components.index(part.name)]


Choice = tuple[Decision, str, Sharing | None]


def _with_spanning_engines(
    classes: Sequence[DeviceClass], decided: list[Choice], components: Sequence[ComponentPlan]
) -> list[Choice]:
    """Extend decisions to engines that span classes: an engine sleeps on all its devices, shared or not."""
    switching = [one for one, choice in zip(classes, decided, strict=True) if choice[0] is not Decision.KEEP]
    if not switching:
        return decided
    shared = np.concatenate([one.devices for one in switching])
    changed = list(decided)
    for part in components:
        if part.role is not Role.ENGINE:
            continue
        displaced = displaced_devices(part, shared)
        for index, one in enumerate(classes):
            if (
                changed[index][0] is Decision.KEEP
                and part.name in one.components
                and np.isin(displaced, one.devices).any()
            ):
                changed[index] = (
                    Decision.SLEEP,
                    f"engines of {part.name} there also hold devices that they share",
                    None,
                )
    return changed


def _with_fraction(device_class: DeviceClass, choice: Choice, components: Mapping[str, ComponentPlan]) -> Choice:
    """Give engines that sleep or stop the memory that their sequences need, unless the config sets a fraction."""
    decision, reason, sharing = choice
    engines = [each for name in device_class.components if (each := components[name]).role is Role.ENGINE]
    if decision is Decision.KEEP or sharing is not None or len(engines) != 1:
        return choice
    fraction = needed_fraction(engines[0], device_class.memory_gb)
    if fraction is None or engines[0].model.memory_fraction is not None:
        return choice
    return decision, reason, Sharing(keeps_both=False, inference_fraction=fraction)


def displaced_devices(part: ComponentPlan, shared: Ints) -> Ints:
    """All devices of those processes that hold a shared device."""
    devices, owners = part.table.device_numbers, part.table.owners
    return devices[np.isin(owners, owners[np.isin(devices, shared)])]


def _class_residency(
    device_class: DeviceClass, choice: Choice, components: Mapping[str, ComponentPlan], settings: ResidencySettings
) -> ClassResidency:
    decision, reason, sharing = choice
    held = [components[name] for name in device_class.components]
    sizes = {part.name: _size(part, device_class, decision, sharing, settings) for part in held}
    names = frozenset(components)
    phases = {
        phase: tuple(_share(part, phase, decision, sizes[part.name], names, settings.is_async) for part in held)
        for phase in Phase
    }
    in_flight = max(in_flight_gib(part) for part in held)
    return ClassResidency(device_class, decision, reason, phases, sharing, in_flight)


def _size(
    part: ComponentPlan,
    device_class: DeviceClass,
    decision: Decision,
    sharing: Sharing | None,
    settings: ResidencySettings,
) -> Footprint:
    """Memory of a component on one device of the class: as configured, or computed."""
    fraction = sharing.inference_fraction if sharing is not None else None
    size = footprint(part, device_class.memory_gb, fraction)
    figure = settings.learning_gb if part.role is Role.LEARNER else settings.inference_gb
    if settings.notation is Notation.LOOP and figure is not None:
        is_learner = part.role is Role.LEARNER
        # Servers use the fraction they are started with, which may exceed their requirement.
        active = figure if is_learner or size.active is None or fraction is None else size.active
        left = CONTEXT_GIB if is_learner else SLEEPING_ENGINE_GIB
        size = Footprint(
            active,
            active,
            size.syncing if decision is not Decision.KEEP else active,
            active,
            left,
            size.host,
            size.kept,
        )
    return size.times(device_class.processes[device_class.components.index(part.name)])


def _decide(
    device_class: DeviceClass,
    held: Sequence[ComponentPlan],
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> Choice:
    used = [part for part in held if not part.model.unused_because]
    roles = {part.role for part in used}
    if len(used) < 2 or not roles & {Role.LEARNER, Role.SCORER} or (len(roles) == 1 and Role.ENGINE in roles):
        return Decision.KEEP, "nothing else needs the device in another phase", None
    engines = [part for part in used if part.role is Role.ENGINE]
    switch = Decision.SLEEP if all(part.model.can_sleep for part in engines) else Decision.RESTART
    if settings.notation is Notation.LOOP:
        return _decide_by_figures(device_class, switch, settings, places, findings)
    if engines and settings.engines_sleep is not None:
        program = settings.notation.program
        if settings.engines_sleep:
            return switch, f"{program} puts engines to sleep while the learner learns", None
        return Decision.KEEP, f"the {program} job keeps engines and learner in memory together", None
    sizes = [footprint(part, device_class.memory_gb) for part in used]
    total = _known_sum([size.active for size in sizes])
    limit = RESERVED_FRACTION * (device_class.memory_gb or 0.0)
    fits = None if total is None or device_class.memory_gb is None else total <= limit
    sums = "" if fits is None else f"together they need {total:.1f} of the {limit:.1f} GiB that may be used"
    if settings.notation is not Notation.ROLL and any(part.model.offloads for part in used):
        note = f", though both would fit: {sums}" if fits else ""
        return switch, f"the config offloads between phases{note}", None
    if fits is not None:
        kept = "ROLL would offload, but Roost keeps what fits: " if fits and settings.notation is Notation.ROLL else ""
        return (Decision.KEEP if fits else switch), f"{kept}{sums}", None
    if settings.notation is Notation.ROLL:
        return switch, "ROLL offloads between phases", None
    return Decision.KEEP, "the config does not offload, and no memory figures are known", None


def _decide_by_figures(
    device_class: DeviceClass,
    switch: Decision,
    settings: ResidencySettings,
    places: Mapping[str, Where],
    findings: Findings,
) -> Choice:
    """Apply ml-loop's rule; without memory figures servers and learners time-share devices."""
    sharing = _loop_sharing(device_class, settings, places, findings)
    if settings.inference_gb is None:
        return switch, "no memory figures are given", sharing
    if sharing is None:
        return switch, "the memory of the device is not known", None
    fit = "fit" if sharing.keeps_both else "do not fit"
    return (Decision.KEEP if sharing.keeps_both else switch), f"both {fit} into 95 % of the device", sharing


def _loop_sharing(
    device_class: DeviceClass | None, settings: ResidencySettings, places: Mapping[str, Where], findings: Findings
) -> Sharing | None:
    memory = device_class.memory_gb if device_class is not None else None
    if (
        device_class is not None
        and memory is None
        and settings.inference_gb is not None
        and settings.learning_gb is not None
    ):
        findings.warn(
            "RST-M006",
            places.get(MEMORY_KEYS[0], Where(path=("rl", MEMORY_KEYS[0]))),
            "cannot be compared with the device's memory, which is not known",
            fix="give an inventory with memory_gb",
        )
        return None
    try:
        return share_device(
            True, settings.inference_gb, settings.learning_gb, memory or 1.0, settings.is_async, settings.cap
        )
    except MemoryRefused as refused:
        findings.error(
            refused.code, places.get(refused.key, Where(path=(refused.key,))), refused.what, refused.why, refused.fix
        )
        return None


def _share(
    part: ComponentPlan, phase: Phase, decision: Decision, size: Footprint, names: Collection[str], is_async: bool
) -> Share:
    state = _state(part, phase, decision, names, is_async)
    if state is State.STAYS:
        return Share(part.name, state, size.resident, size.kept)
    if state in (State.STOPPED, State.UNUSED):
        return Share(part.name, state, 0.0, 0.0)
    if state is not State.RUNS:
        return Share(part.name, state, size.idle, size.host)
    if decision is Decision.RESTART and part.role is Role.ENGINE and phase is Phase.SYNC:
        return Share(part.name, state, 0.0, 0.0)  # it starts from written weights, when learners have offloaded theirs
    switches = decision is not Decision.KEEP and part.role in (Role.LEARNER, Role.SCORER) and part.model.offloads
    between = size.idle if switches and phase is not Phase.SYNC else None
    return Share(part.name, state, _working_size(part, phase, decision, size), size.kept, between)


def _working_size(part: ComponentPlan, phase: Phase, decision: Decision, size: Footprint) -> float | None:
    if phase is Phase.SYNC and (part.role is Role.LEARNER or decision is not Decision.KEEP):
        return size.syncing
    return size.scoring if phase is Phase.INFER and part.role is Role.LEARNER else size.active


def _state(part: ComponentPlan, phase: Phase, decision: Decision, names: Collection[str], is_async: bool) -> State:
    """The state of a component in a phase: it runs, stays, or leaves the device to others."""
    if part.model.unused_because:
        return State.UNUSED
    if works_in(part.name, part.role, phase, names):
        return State.RUNS
    if decision is Decision.KEEP:
        # With asynchronous rollouts, generation continues while others learn.
        generates = works_in(part.name, part.role, Phase.GENERATE, names)
        return State.RUNS if is_async and generates else State.STAYS
    if part.role is Role.ENGINE:
        return State.STOPPED if decision is Decision.RESTART else State.SLEEPS
    if part.role is Role.HELPER:
        return State.STAYS
    return State.OFFLOADED if part.model.offloads or part.role is Role.SCORER else State.STAYS


def _check_fit(
    result: ClassResidency,
    by_name: Mapping[str, ComponentPlan],
    settings: ResidencySettings,
    classes: Sequence[DeviceClass],
    places: Mapping[str, Where],
    findings: Findings,
) -> None:
    """Report an over-full device in its fullest phase, with the sum of its parts."""
    memory = result.device_class.memory_gb
    used, phase = _fullest(result)
    if memory is None or used <= memory:
        return

    def fits(changed: Mapping[str, ComponentPlan]) -> bool:
        """Return True if the device has room once these components are as given."""
        found = _residencies(classes, {**by_name, **changed}, settings, {}, Findings())
        return any(one.device_class is result.device_class and _fullest(one)[0] <= memory for one in found)

    parts = [(name, size) for name, size in result.parts(phase) if size]
    components = [part for part in parts if part[0] in result.device_class.components]
    largest = max(components, key=lambda part: part[1])[0]
    wide = [name for name, _ in components if by_name[name].is_float32]
    narrower = f"{IN_16_BITS}, as {' and '.join(wide)} compute in float32, or " if wide else ""
    findings.error(
        "RST-M004",
        places.get(largest, Where(path=(largest,))),
        f"does not fit: {used:.1f} GiB on a device of {memory:g} GiB in the phase {phase.value}",
        "; ".join([spelled_sum(parts), *_megatron_note([by_name[name] for name, _ in components])]),
        narrower + fix_of(result, phase, by_name, settings.notation, used - memory, fits),
    )


def _fullest(result: ClassResidency) -> tuple[float, Phase]:
    """Memory of the fullest phase of a class, and the phase."""
    return max(((result.used_gib(phase) or 0.0, phase) for phase in Phase), key=lambda each: each[0])


def _megatron_note(components: Sequence[ComponentPlan]) -> list[str]:
    """A note that names components whose memory is counted for Megatron; empty if there are none."""
    named = [
        part.name
        for part in components
        if part.model.sharding is Sharding.OPTIMIZER and "megatron" in (part.model.strategy or "")
    ]
    return [f"the memory of {' and '.join(named)} is that of Megatron; roost train uses FSDP"] if named else []


def spelled_sum(sizes: Iterable[tuple[str, float]]) -> str:
    """Sizes in GiB that are not 0, and their sum if there are several.

    >>> spelled_sum([("actor", 30.0), ("rollout", 7.0)]), spelled_sum([("actor", 37.0)])
    ('actor 30.0 + rollout 7.0 = 37.0 GiB', 'actor 37.0 GiB')
    """
    terms = [(name, size) for name, size in sizes if size]
    total = f" = {sum(size for _, size in terms):.1f} GiB" if len(terms) > 1 else " GiB"
    return " + ".join(f"{name} {size:.1f}" for name, size in terms) + total


def _known_sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
