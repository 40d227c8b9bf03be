"""Change a plan while its job runs: add or remove engines, or go on without nodes that were lost.

Nothing is started or stopped here. A process that stays keeps its devices; one that must move is removed and added.
Nodes keep their ranks: a lost node stays in the inventory, marked as lost, so that no process moves because nodes were
renumbered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from roost.cluster.inventory import Inventory
from roost.config.findings import ConfigError, Findings, Where, counted, did_you_mean
from roost.config.job import Role
from roost.config.ranks import spell_nodes, spell_ranks
from roost.placement.component_plan import ComponentPlan, PlacementMode, mode_of
from roost.placement.draft import GROUPED, Draft, ProcessId, Unit, assignments_of
from roost.placement.memory.residency import ResidencySettings, find_residency, with_checkpoints
from roost.placement.plan import Plan
from roost.placement.rules.components import check_rules
from roost.placement.rules.mesh import check_mesh, has_mesh

# Roles that make room for a component without a process, and how many processes of each component stay.
EVICTIONS = (((), 1), ((Role.ENGINE,), 1), ((Role.ENGINE, *GROUPED), 1), ((Role.ENGINE, *GROUPED), 0))


@dataclass(frozen=True)
class Rescale:
    """A changed plan, and which processes stay, move, start or end.

    `kept` has the new rank of every process that stays where it is. A process that moves is both in `removed`, with its
    rank in `before`, and in `added`, with its rank in `plan`; `moved` pairs the two.
    """

    before: Plan
    plan: Plan
    kept: Mapping[ProcessId, int]
    moved: Mapping[ProcessId, int]
    removed: tuple[ProcessId, ...]
    added: tuple[ProcessId, ...]

    @property
    def needs_relaunch(self) -> bool:
        """Return True if a learner or scorer changes: its processes are one group, which starts as a whole."""
        return any(self.before[name].role in GROUPED for name, _ in (*self.removed, *self.added))

    def lines(self) -> list[str]:
        """The change as text, one fact per line."""
        lost = [rank for rank in self.plan.inventory.lost if rank not in self.before.inventory.lost]
        lines = [f"{spell_nodes(lost)} lost"] if lost else []
        for part in self.plan.components:
            lines += _component_lines(self, part.name)
        return lines


def _component_lines(change: Rescale, name: str) -> Iterator[str]:
    old, new = change.before[name], change.plan[name]
    if old.world_size != new.world_size:
        yield f"{name}: {old.world_size} -> {counted(new.world_size, 'process')}"
    for rank in (rank for part, rank in change.removed if part == name):
        was, now = describe_placement(old, rank), change.moved.get((name, rank))
        yield (
            f"{name} {rank}: removed from {was}"
            if now is None
            else f"{name} {rank}: {was} -> {describe_placement(new, now)}"
        )
    arrived = {rank for (part, _), rank in change.moved.items() if part == name}
    for rank in (rank for part, rank in change.added if part == name and rank not in arrived):
        yield f"{name} {rank}: added on {describe_placement(new, rank)}"
    pairs = {**change.kept, **change.moved}
    ranks = [(rank, now) for (part, rank), now in pairs.items() if part == name and rank != now]
    if ranks:
        olds, news = (sorted(column) for column in zip(*ranks, strict=True))
        yield f"{name} {spell_ranks(olds)}: now {spell_ranks(news)}"


def describe_placement(part: ComponentPlan, rank: int) -> str:
    """Node and devices of a process in words: `node 1 devices 2-3`."""
    placement = part.table[rank]
    node, devices = placement.cluster_node_rank, placement.devices
    if not devices:
        return f"node {node}"
    if any(on != node for on, _ in devices):
        return f"node {node} devices " + ",".join(f"{on}:{index}" for on, index in devices)
    return f"node {node} {'device' if len(devices) == 1 else 'devices'} {spell_ranks([index for _, index in devices])}"


def scaled(plan: Plan, changes: Mapping[str, int], leaving: Mapping[str, Collection[int]] | None = None) -> Rescale:
    """Add engines on free accelerators of the inventory, or remove some. Raise ConfigError if that is not possible.

    `changes` has the number of engines to add (or to remove, if negative) of each component. Engines of low rank stay:
    the highest ranks leave, unless `leaving` names those that do. New engines are on the first nodes with room, with as
    many accelerators on one node as the others have; engines without accelerators go to the node with the fewest.

    >>> import roost
    >>> placement = {"actor": "0-1", "rollout": "2-3"}
    >>> plan = roost.plan({"cluster": {"num_nodes": 1, "num_gpus_per_node": 8, "component_placement": placement}})
    >>> scaled(plan, {"rollout": 2}).lines()
    ['rollout: 2 -> 4 processes', 'rollout 2: added on node 0 device 4', 'rollout 3: added on node 0 device 5']
    >>> scaled(plan, {"rollout": -1}, {"rollout": [0]}).lines()
    ['rollout: 2 -> 1 process', 'rollout 0: removed from node 0 device 2', 'rollout 1: now 0']
    """
    findings, leaving = Findings(), leaving or {}
    for name, change in changes.items():
        if _check_engine(plan, name, findings) and change < 0:
            _check_leaving(plan[name], -change, leaving.get(name), findings)
    findings.raise_errors()
    draft = Draft(plan, plan.inventory)
    for name, change in changes.items():
        count = plan[name].world_size
        for rank in (leaving.get(name) or range(count + change, count)) if change < 0 else ():
            draft.assignments[name][rank] = None
    wanted = {name: change for name, change in changes.items() if change > 0}
    for name, change in wanted.items():
        draft.assignments[name] += [None] * change
    draft.place([draft.unit([(name, plan[name].world_size + i)]) for name, n in wanted.items() for i in range(n)])
    for name, change in wanted.items():
        _check_joined(draft, name, change, findings)
    findings.raise_errors()
    return _finished(draft)


def _check_engine(plan: Plan, name: str, findings: Findings) -> bool:
    """Return True if a component has engines; report it if not."""
    roles = {part.name: part.role for part in plan.components}
    engines = ", ".join(part for part, role in roles.items() if role is Role.ENGINE) or "none"
    if name not in roles:
        hint = did_you_mean(name, roles)
        findings.error("RST-P001", Where(), f"there is no component {name}", hint, f"components: {', '.join(roles)}")
    elif roles[name] is not Role.ENGINE:
        why = (
            "its processes are one group that starts together" if roles[name] in GROUPED else "it has no queue to share"
        )
        findings.error(
            "RST-P042", Where(path=(name,)), f"is a {roles[name]}; only engines join or leave a run", why,
            f"engines of this plan: {engines}",
        )  # fmt: skip
    return roles.get(name) is Role.ENGINE


def _check_leaving(part: ComponentPlan, count: int, named: Collection[int] | None, findings: Findings) -> None:
    where, size = Where(path=(part.name,)), part.world_size
    if count >= size:
        findings.error(
            "RST-P043", where, f"cannot lose {count} of {counted(size, 'engine')}", "one must be left",
            f"remove at most {size - 1}" if size > 1 else "stop the run instead",
        )  # fmt: skip
    if named is not None and (len(set(named)) != count or not set(named) <= set(range(size))):
        findings.error(
            "RST-P043", where, f"{counted(count, 'engine')} to remove, but named are {sorted(named)}",
            f"its ranks are 0 to {size - 1}", "name each engine once",
        )  # fmt: skip


def _check_joined(draft: Draft, name: str, count: int, findings: Findings) -> None:
    found = sum(assignment is not None for assignment in draft.assignments[name][-count:])
    if found == count:
        return
    size, allowed = draft.size(name), draft.nodes_for(name)
    if not size:
        why = f"no node of {', '.join(draft.plan[name].node_groups)} is left"
    else:
        free = {node: len(devices) for node, devices in Draft(draft.plan, draft.inventory).free().items()}
        there = [f"{number} on node {node}" for node, number in free.items() if node in allowed and number]
        why = f"each needs {counted(size, 'free accelerator')} on one node; free are {', '.join(there) or 'none'}"
    fix = f"add at most {found}, or remove other engines first" if found else "remove other engines first, or add nodes"
    findings.error("RST-P044", Where(path=(name,)), f"there is no room for {count} more", why, fix)


def without_nodes(plan: Plan, lost: Iterable[int]) -> Rescale:
    """Go on without nodes: their processes are placed again on the others. Raise ConfigError if the plan does not fit.

    Processes on other nodes keep their devices if possible. Learners and scorers come first and keep their number of
    processes: on free accelerators, else on those of engines, of which as few as possible leave. If that is not enough,
    they get fewer processes, as many as their parallel sizes divide. Engines and other workers get what is then free;
    those without room are removed, as long as each component has a process. A process on a declared device, such as a
    robot, cannot move.

    >>> import roost
    >>> placement = {"actor": "0-1", "rollout": "2-4"}
    >>> plan = roost.plan({"cluster": {"num_nodes": 3, "num_gpus_per_node": 2, "component_placement": placement}})
    >>> print(*without_nodes(plan, [1]).lines(), sep="\\n")
    node 1 lost
    rollout: 3 -> 2 processes
    rollout 0: node 1 device 0 -> node 2 device 1
    rollout 1: removed from node 1 device 1
    rollout 2: now 1
    """
    lost = sorted(set(lost))
    remaining = plan.inventory.without(lost)
    draft = _fitting(plan, remaining)
    if draft is not None:
        return _finished(draft)
    left, findings = Draft(plan, remaining), Findings()
    left.take_lost(apart=True)
    left.drop_uneven()
    free = sum(map(len, left.free().values()))
    gone = [f"{name} ({counted(plan[name].world_size, 'process')})" for name in left.missing()]
    findings.error(
        "RST-P045",
        Where(plan.file),
        f"the plan does not fit without {spell_nodes(lost)}",
        f"nothing is left of {', '.join(gone)}, and the other nodes have {counted(free, 'free accelerator')}",
        "start as many nodes as before, or plan the job for fewer",
    )
    raise ConfigError(findings.errors)


def _fitting(plan: Plan, inventory: Inventory) -> Draft | None:
    """The best draft on the nodes that are left; None if none has a process of each component.

    Tries with fewer and fewer units of learners; with engines beside the learners that they shared devices with, or
    apart from them; and with each of `EVICTIONS`.
    """
    best: Draft | None = None
    units, _ = Draft(plan, inventory).take_lost(apart=True)
    for fewer in range(len(units) + 1):
        if best is not None and fewer > best.cost()[0]:
            break
        orders = (False, True) if fewer else (False,)
        for apart, by_members, (roles, spared) in product((False, True), orders, EVICTIONS):
            draft = Draft(plan, inventory)
            grouped, others = draft.take_lost(apart)
            if by_members:  # units of few processes are left out first
                grouped.sort(key=lambda unit: -len(unit.members))
            count = max(len(grouped) - fewer, 0)
            evicted = draft.place_grouped(grouped[:count])
            if evicted is None:
                continue
            waiting = [*others, *evicted, *grouped[count:]]
            left = _make_room(draft, waiting, roles, spared) if roles else []
            draft.place([unit for unit in (*evicted, *left) if draft.is_grouped(unit) and not draft.is_assigned(unit)])
            draft.drop_uneven()
            draft.place(
                [unit for unit in (*waiting, *left) if not draft.is_grouped(unit) and not draft.is_assigned(unit)]
            )
            if not draft.missing() and (best is None or draft.cost() < best.cost()):
                best = draft
    return best


def _make_room(draft: Draft, units: Sequence[Unit], roles: Collection[Role], spared: int) -> list[Unit]:
    """Place one unit of each component without a process where others leave; return units of those that leave."""
    gone: list[ProcessId] = []
    for name in sorted(draft.missing(), key=draft.size, reverse=True):
        if name not in draft.missing():
            continue  # placed with the unit of another
        able = [unit for unit in units if any(member.name == name for member in unit.members)]
        unit = min(able, key=lambda unit: (unit.size, -len(unit.members)), default=None)
        leaving = draft.make_room(unit, roles, spared) if unit is not None else None
        gone += leaving or ()
    return [draft.unit([process]) for process in gone]


def _finished(draft: Draft) -> Rescale:
    """The change that a draft makes; raise ConfigError if the new plan breaks a rule, such as one about memory."""
    before, findings = draft.plan, Findings()
    components = tuple(draft.component(part) for part in before.components)
    settings = ResidencySettings.of(before.notation, before.settings)
    if any(part.model.recomputed_layers is not None for part in components):  # they fitted on more devices
        components = with_checkpoints(components, draft.inventory, settings)
    residency = find_residency(components, draft.inventory, settings, {}, findings)
    check_rules(components, residency, draft.inventory, before.notation, {}, findings)
    for part in components:
        if has_mesh(part, before[part.name].world_size):
            check_mesh(part, Where(path=(part.name,)), findings)
    findings.raise_errors()
    known = {(warning.code, warning.what) for warning in before.warnings}
    new = tuple(found for found in findings.warnings if (found.code, found.what) not in known)
    held = {part.name: part.table.processes_on_accelerators > 0 for part in components}
    mode = (
        before.mode
        if before.mode is PlacementMode.AUTO
        else mode_of(held, {part.name: part.role for part in components})
    )
    warnings = (*before.warnings, *new)
    plan = replace(before, mode=mode, inventory=draft.inventory, components=components, warnings=warnings)
    return _compared(draft, plan)


def _compared(draft: Draft, plan: Plan) -> Rescale:
    kept: dict[ProcessId, int] = {}
    moved: dict[ProcessId, int] = {}
    removed: list[ProcessId] = []
    added: list[ProcessId] = []
    for part in draft.plan.components:
        old, rank = assignments_of(part.table), 0
        for slot, assignment in enumerate(draft.assignments[part.name]):
            was = old[slot] if slot < len(old) else None
            if was is not None and was == assignment:
                kept[part.name, slot] = rank
            else:
                removed += [(part.name, slot)] if was is not None else []
                added += [(part.name, rank)] if assignment is not None else []
                moved |= {(part.name, slot): rank} if was is not None and assignment is not None else {}
            rank += assignment is not None
    return Rescale(draft.plan, plan, kept, moved, tuple(removed), tuple(added))
