"""Memory and states of each device and component, by phase."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from roost.cluster.inventory import Ints, Inventory, Node
from roost.config.findings import counted
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.model import known_shape
from roost.placement.memory.phases import Phase, State, works_in
from roost.placement.memory.residency import IN_FLIGHT, ClassResidency, Decision
from roost.placement.plan import Plan, uses_model

MOST_PLACES = 4  # places named for a class of devices; a scattered one is cut there


@dataclass(frozen=True, slots=True)
class PhaseCell:
    """State of a component in a phase, and its memory on each device and on the host (None: unknown)."""

    state: State
    device_gib: float | None = 0.0
    host_gib: float | None = 0.0


@dataclass(frozen=True, slots=True)
class ComponentPhases:
    """States of one component by phase, in the order of `Phase`, also as text."""

    component: str
    cells: tuple[PhaseCell, ...]
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory on each device of a class in a phase: the known part, and whether it is complete."""

    known_gib: float
    in_flight_gib: float  # weights being sent to the engines, included in known_gib
    is_whole: bool
    total_gib: float | None

    @property
    def text(self) -> str:
        """The memory use as text.

        >>> print(MemoryUse(58.25, 0.0, True, 80.0).text)
        58.2 of 80 GiB
        >>> print(MemoryUse(40.0, 0.0, False, 80.0).text, "/", MemoryUse(0.0, 0.0, False, None).text)
        at least 40.0 of 80 GiB / unknown
        """
        if not self.is_whole and not self.known_gib:
            return "unknown" if self.total_gib is None else f"unknown of {self.total_gib:g} GiB"
        used = f"{self.known_gib:.1f}" if self.is_whole else f"at least {self.known_gib:.1f}"
        return f"{used} of {self.total_gib:g} GiB" if self.total_gib is not None else f"{used} GiB"


@dataclass(frozen=True, slots=True)
class DevicePhases:
    """One class of devices (or, without a decision, the components that hold none) through the phases."""

    title: str
    machine: str
    rows: tuple[ComponentPhases, ...]
    decision: Decision | None = None
    reason: str = ""
    memory: tuple[MemoryUse, ...] = ()


def device_phases(plan: Plan) -> tuple[DevicePhases, ...]:
    """A table for each class of devices, and one for the components that hold no accelerator.

    >>> import roost
    >>> config = {"num_gpus_per_node": 2, "actor_train": {"device_mapping": "0-1"}, "rewards": {"a": {"world_size": 2}}}
    >>> for table in device_phases(roost.plan(config)):
    ...     print(table.title, [(row.component, row.text) for row in table.rows])
    node 0, accelerators 0-1 [('actor', ('stays', 'runs', 'runs', 'runs'))]
    no accelerator [('reward.a', ('runs', 'waits', 'waits', 'waits'))]
    """
    tables = [_class_table(part, plan.inventory) for part in plan.residency.classes]
    shown = {row.component for table in tables for row in table.rows}
    names = [part.name for part in plan.components]
    others = [_row_without_devices(part, names) for part in plan.components if part.name not in shown]
    return (*tables, DevicePhases("no accelerator", "", tuple(others))) if others else tuple(tables)


def _class_table(part: ClassResidency, inventory: Inventory) -> DevicePhases:
    devices, total = part.device_class.devices, part.device_class.memory_gb
    node = inventory.nodes[int(_nodes_of(devices[:1], inventory)[0])]
    shares = {
        (share.component, phase): PhaseCell(share.state, share.device_gib, share.host_gib)
        for phase, held in part.phases.items()
        for share in held
    }
    return DevicePhases(
        spell_devices(devices, inventory),
        machine_text(node, len(devices)),
        tuple(_row(name, tuple(shares[name, phase] for phase in Phase)) for name in part.device_class.components),
        part.decision,
        part.reason,
        tuple(_memory_use(part, phase, total) for phase in Phase),
    )


def _row(component: str, cells: tuple[PhaseCell, ...]) -> ComponentPhases:
    return ComponentPhases(component, cells, phase_text([cell.state for cell in cells]))


def _memory_use(part: ClassResidency, phase: Phase, total: float | None) -> MemoryUse:
    is_whole = part.used_gib(phase) is not None
    # Without the rest of the device's memory, weights in flight alone would mislead.
    parts = [(name, size) for name, size in part.parts(phase) if size is not None and (is_whole or name != IN_FLIGHT)]
    moving = sum((size for name, size in parts if name == IN_FLIGHT), 0.0)
    return MemoryUse(sum((size for _, size in parts), 0.0), moving, is_whole, total)


def _row_without_devices(part: ComponentPlan, names: list[str]) -> ComponentPhases:
    states = states_on_cpu(part, names)
    return ComponentPhases(part.name, tuple(map(PhaseCell, states)), _cpu_text(states))


def machine_text(node: Node, accelerators: int) -> str:
    """Describe accelerators of a machine.

    >>> machine_text(Node(8, accelerator_model="A800", memory_gb=80.0), 64)
    '64 × A800 80 GiB'
    >>> machine_text(Node(8), 1), machine_text(Node(8, memory_gb=24.0), 4)
    ('1 accelerator', '4 accelerators of 24 GiB')
    """
    memory = "" if node.memory_gb is None else f"{node.memory_gb:g} GiB"
    if node.accelerator_model:
        return f"{accelerators:,} × {node.accelerator_model} {memory}".strip()
    text = counted(accelerators, "accelerator")
    return f"{text} of {memory}" if memory else text


def spell_devices(devices: Ints, inventory: Inventory) -> str:
    """Format cluster-wide accelerator numbers as nodes and accelerators of each.

    >>> inventory = Inventory.uniform(3, 8)
    >>> spell_devices(np.arange(16), inventory), spell_devices(np.arange(4, 10), inventory)
    ('nodes 0-1, accelerators 0-7', 'node 0, accelerators 4-7; node 1, accelerators 0-1')
    """
    places = []
    for indices, same in groupby(_indices_by_node(devices, inventory), key=lambda place: place[1]):
        nodes = [node for node, _ in same]
        on = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {spell_ranks(nodes, limit=4)}"
        noun = "accelerator" if len(indices) == 1 else "accelerators"
        places.append(f"{on}, {noun} {spell_ranks(indices, limit=8)}")
    more = len(places) - MOST_PLACES
    return "; ".join(places[:MOST_PLACES]) + (f"; {more} more places" if more > 0 else "")


def _indices_by_node(devices: Ints, inventory: Inventory) -> Iterator[tuple[int, tuple[int, ...]]]:
    nodes = _nodes_of(devices, inventory)
    indices = devices - inventory.first_accelerators[nodes]
    starts = np.flatnonzero(np.diff(nodes, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(nodes)], strict=True):
        yield int(nodes[start]), tuple(indices[start:stop].tolist())


def _nodes_of(devices: Ints, inventory: Inventory) -> Ints:
    # A node without accelerators has the same first number as the next; side="right" finds the node that has some.
    return np.searchsorted(inventory.first_accelerators, devices, side="right") - 1


_COMES_BACK = {State.SLEEPS: "wakes", State.OFFLOADED: "loads", State.STOPPED: "starts"}
_GOES_AWAY = {State.SLEEPS: "sleeps", State.OFFLOADED: "offloads", State.STOPPED: "stops"}
_BETWEEN = {State.SLEEPS: "asleep", State.OFFLOADED: "offloaded", State.STOPPED: "stopped"}


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """States of some processes of a component by phase, as text."""

    component: str
    processes: str
    cells: tuple[str, ...]  # one for each phase
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Memory of one class of devices by phase, in GiB; None if unknown."""

    devices: int
    components: tuple[str, ...]
    used: tuple[float | None, ...]
    total: float | None
    decision: str
    reason: str


def phase_text(states: Sequence[State]) -> tuple[str, ...]:
    """Describe a component's states by phase, with transitions; the last phase is followed by the first.

    >>> phase_text([State.RUNS, State.SLEEPS, State.SLEEPS, State.RUNS])
    ('runs, sleeps', 'asleep', 'asleep', 'wakes, runs')
    >>> phase_text([State.OFFLOADED, State.RUNS, State.RUNS, State.RUNS])
    ('offloaded', 'loads, runs', 'runs', 'runs, offloads')
    """
    text = []
    for index, state in enumerate(states):
        before, after = states[index - 1], states[(index + 1) % len(states)]
        if state is State.RUNS:
            parts = [_COMES_BACK.get(before, ""), "runs", _GOES_AWAY.get(after, "")]
            text.append(", ".join(part for part in parts if part))
        else:
            text.append(_BETWEEN.get(state, state.value))
    return tuple(text)


def phase_rows(plan: Plan) -> tuple[PhaseRow, ...]:
    """A row for each component on each class of devices; components without accelerators have one row."""
    rows = []
    names = [part.name for part in plan.components]
    for part in plan.components:
        note = f"{part.managed_by} 0 starts and stops it" if part.managed_by else ""
        classes = plan.residency.of(part.name)
        for held in classes:
            states = [share.state for phase in Phase for share in held.phases[phase] if share.component == part.name]
            rows.append(PhaseRow(part.name, _processes_on(part, held), phase_text(states), note))
        if not classes:
            rows.append(
                PhaseRow(part.name, spell_ranks(range(part.world_size)), _cpu_text(states_on_cpu(part, names)), note)
            )
    return tuple(rows)


def states_on_cpu(part: ComponentPlan, names: Collection[str]) -> tuple[State, ...]:
    """States of a component without accelerators by phase."""
    if part.model.unused_because:
        return (State.UNUSED,) * len(Phase)
    return tuple(State.RUNS if works_in(part.name, part.role, phase, names) else State.STAYS for phase in Phase)


def _cpu_text(states: Sequence[State]) -> tuple[str, ...]:
    return tuple("waits" if state is State.STAYS else state.value for state in states)


def memory_rows(plan: Plan) -> tuple[MemoryRow, ...]:
    """A row for each class of devices that several components hold, or whose memory is known."""
    return tuple(
        MemoryRow(
            len(held.device_class.devices),
            held.device_class.components,
            tuple(held.used_gib(phase) for phase in Phase),
            held.device_class.memory_gb,
            held.decision.value,
            held.reason,
        )
        for held in plan.residency.classes
        if len(held.device_class.components) > 1 or held.device_class.memory_gb is not None
    )


def unknown_memory(plan: Plan, rows: Sequence[MemoryRow]) -> str:
    """Why figures in the rows are unknown; empty if all are known."""
    missing = dict.fromkeys(name for row in rows if None in row.used for name in row.components)
    reasons: dict[str, list[str]] = {}
    for part in (plan[name] for name in missing):
        if uses_model(part) and known_shape(part) is None:
            reasons.setdefault(_why_unknown(part), []).append(part.name)
    spelled = [f"{why} ({', '.join(names)})" for why, names in reasons.items()]
    if any(row.total is None for row in rows):
        spelled.append("the memory of the devices is not given (memory_gb of nodes in --inventory)")
    elif missing and not spelled:
        spelled.append(f"the memory of {', '.join(missing)} cannot be computed")
    return f"?: {'; '.join(spelled)}" if spelled else ""


def _why_unknown(part: ComponentPlan) -> str:
    if part.model.config is not None:
        return "models of this type are not counted"
    return f"config.json of {part.model.path} is not on this machine" if part.model.path else "the job names no model"


def _processes_on(part: ComponentPlan, held: ClassResidency) -> str:
    """Processes with a device of the class."""
    table = part.table
    is_of_class = np.zeros(table.inventory.num_accelerators + 1, np.bool_)
    is_of_class[held.device_class.devices] = True
    return spell_ranks(np.unique(table.owners[is_of_class[table.device_numbers]]).tolist(), limit=6)
