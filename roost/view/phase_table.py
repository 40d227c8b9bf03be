"""The phases as a table of who starts, runs, sleeps or stops when, for every class of devices and for CPU workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.phases import Phase, State, works_in
from roost.placement.plan import Plan
from roost.placement.residency import ClassResidency

_COMES_BACK = {State.SLEEPS: "wakes", State.OFFLOADED: "loads", State.STOPPED: "starts"}
_GOES_AWAY = {State.SLEEPS: "sleeps", State.OFFLOADED: "offloads", State.STOPPED: "stops"}
_BETWEEN = {State.SLEEPS: "asleep", State.OFFLOADED: "offloaded", State.STOPPED: "stopped"}


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Some processes of a component through the phases, in words."""

    component: str
    processes: str
    cells: tuple[str, ...]  # one for each phase
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of one class of devices through the phases, in GiB; None where it is not known."""

    devices: int
    components: tuple[str, ...]
    used: tuple[float | None, ...]
    total: float | None
    decision: str
    reason: str


def phase_words(states: Sequence[State]) -> tuple[str, ...]:
    """What a component does in each phase, with the changes where they happen: a step follows upon a step.

    >>> phase_words([State.RUNS, State.SLEEPS, State.SLEEPS, State.RUNS])
    ('runs, sleeps', 'asleep', 'asleep', 'wakes, runs')
    >>> phase_words([State.OFFLOADED, State.RUNS, State.RUNS, State.RUNS])
    ('offloaded', 'loads, runs', 'runs', 'runs, offloads')
    """
    words = []
    for index, state in enumerate(states):
        before, after = states[index - 1], states[(index + 1) % len(states)]
        if state is State.RUNS:
            parts = [_COMES_BACK.get(before, ""), "runs", _GOES_AWAY.get(after, "")]
            words.append(", ".join(part for part in parts if part))
        else:
            words.append(_BETWEEN.get(state, state.value))
    return tuple(words)


def phase_rows(plan: Plan) -> tuple[PhaseRow, ...]:
    """A row for each component on each class of devices; components without accelerators have one row."""
    rows = []
    names = [part.name for part in plan.components]
    for part in plan.components:
        note = f"{part.managed_by} 0 starts and stops it" if part.managed_by else ""
        classes = plan.residency.of(part.name)
        for held in classes:
            states = [share.state for phase in Phase for share in held.phases[phase] if share.component == part.name]
            rows.append(PhaseRow(part.name, _processes_on(part, held), phase_words(states), note))
        if not classes:
            rows.append(PhaseRow(part.name, spell_ranks(range(part.world_size)), words_on_cpu(part, names), note))
    return tuple(rows)


def words_on_cpu(part: ComponentPlan, names: Collection[str]) -> tuple[str, ...]:
    """What a component without accelerators does in each phase."""
    if part.model.unused_because:
        return (State.UNUSED.value,) * len(Phase)
    return tuple("runs" if works_in(part.name, part.role, phase, names) else "waits" for phase in Phase)


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


def _processes_on(part: ComponentPlan, held: ClassResidency) -> str:
    """The processes that hold a device of the class."""
    table = part.table
    is_of_class = np.zeros(table.inventory.num_accelerators + 1, np.bool_)
    is_of_class[held.device_class.devices] = True
    return spell_ranks(np.unique(table.owners[is_of_class[table.device_numbers]]).tolist(), limit=6)
