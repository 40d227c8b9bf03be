"""Differences between two plans: components, processes and devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import SequenceMatcher
from itertools import groupby

import numpy as np

from roost.cluster.inventory import ACCELERATOR, NODE, Ints, Node
from roost.config.findings import counted
from roost.config.job import ModelUse, Notation, ParallelSizes, Role
from roost.config.notations.algorithm import (
    ESTIMATOR,
    KL_COEF,
    KL_IN,
    PROMPT,
    RESPONSE,
    WHITEN,
    with_shared_estimator,
)
from roost.config.ranks import spell_nodes, spell_ranks
from roost.placement.component_plan import ComponentPlan, PlacementTable, Process
from roost.placement.memory.model import known_shape
from roost.placement.placement import Placement
from roost.placement.plan import Plan, backend, uses_model, whitens_gae, with_reference

MAX_ALIGNED = 2048  # processes of a component; aligning more takes too long
NOTHING = "nothing"
AHEAD = "iterations that rollouts are ahead"
_ASYNC = ("async_rollouts", "async_generation_ratio")  # compared as the iterations ahead
# Settings that the residency and the models show.
_SHOWN_ELSEWHERE = ("engines_sleep", "offload_weight", "offload_grad", "offload_optimizer")
# The learner of these programs computes the reference's log-probs in its own processes.
REFERENCE_INSIDE = (Notation.RLINF, Notation.VERL, Notation.SLIME, Notation.MILES, Notation.NEMO, Notation.TRL)
# Fields of `ModelUse` that only engines or only learners use; a new field is compared for every role.
_OF_ENGINE = {"memory_fraction", "kv_sequences", "can_sleep"}
_OF_LEARNER = {
    *("tokens", "recomputes", "recomputes_by_default", "recomputed_layers", "compute_bytes", "compiles"),
    *("lora_rank", "optimizer", "optimizer_on_host", "trained_bytes", "offloads"),
}
_NOT_USED = {
    Role.LEARNER: {*_OF_ENGINE, "recomputes_by_default"},
    Role.SCORER: {*_OF_ENGINE, *_OF_LEARNER, "sequence"},
    Role.ENGINE: {*_OF_LEARNER, "sharding"},
    Role.HELPER: {*_OF_ENGINE, *_OF_LEARNER, "sequence", "sharding"},
}
# Fields that only Roost's learner sets; they are compared within one notation alone.
_OF_ROOST = ("longest", "recomputed_layers", "compute_bytes", "trained_bytes", "compiles", "is_saved")

# Fields of `ModelUse` and roles as messages name them.
FIELD_WORDS = {
    "weight_bytes": "bytes per weight",
    "compute_bytes": "bytes per activation",
    "trained_bytes": "bytes per trained number",
    "kv_sequences": "sequences in the KV cache",
    "tokens": "tokens per micro-batch",
    "sequence": "tokens per sequence",
    "longest": "tokens of the longest sample",
    "memory_fraction": "memory fraction",
    "lora_rank": "rank of the adapter",
    "can_sleep": "sleeps between phases",
    "recomputes": "recomputes activations",
    "recomputed_layers": "layers that are recomputed",
    "optimizer_on_host": "optimizer in host memory",
    "offloads": "offloaded parts",
    "compiles": "compiled",
    "is_saved": "saved in checkpoints",
}
ROLE_WORDS = {"learner": "trained", "engine": "inference engine", "scorer": "model that scores", "helper": "code"}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: its subject, the processes concerned, and both sides as text."""

    subject: str  # mode, machines, settings, component, sizes, process, environment, ...
    component: str | None
    processes: str
    before: str
    after: str

    def __str__(self) -> str:
        is_shift = self.subject == "process" and self.before.startswith("rank")  # which says the processes itself
        named = (self.component, "" if is_shift else self.processes)
        owner = " ".join(part for part in named if part) or self.subject
        if not self.before:
            return f"{owner}: added, {self.after}"
        if not self.after:
            return f"{owner}: removed, was {self.before}"
        return f"{owner}: {self._spelled(self.before)} -> {self._spelled(self.after)}"

    def _spelled(self, side: str) -> str:
        """One side as messages name it."""
        if self.subject == "role":
            return ROLE_WORDS[side]
        name, _, value = side.partition("=")
        return f"{FIELD_WORDS[name]} {value}" if self.subject == "model" and name in FIELD_WORDS else side


def diff_plans(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Differences between two plans, in the order of the second; empty if they are equal.

    Different words of two notations are not differences: names of backends, kinds of staleness, and a reference that is
    inside the learner of one and beside it in the other.
    """
    changes = list(_job_changes(before, after))
    old = {part.name: part for part in _components(before, after)}
    new = {part.name: part for part in _components(after, before)}
    for name, part in new.items():
        if name in old:
            changes += _component_changes(old[name], part)
            changes += _model_changes(before, old[name], after, part)
            # Programs start engines in their own ways, which a job does not choose.
            if before.notation is after.notation and old[name].managed_by != part.managed_by:
                managers = (f"started by {_word(each.managed_by)}" for each in (old[name], part))
                changes.append(Change("managed_by", name, "", *managers))
        else:
            changes.append(Change("component", name, "", "", part.extent))
    changes += [Change("component", name, "", part.extent, "") for name, part in old.items() if name not in new]
    changes += _residency_changes(before, after)
    return tuple(changes)


def _components(plan: Plan, other: Plan) -> Sequence[ComponentPlan]:
    """The components, including the reference inside the learner if the other plan has one beside it."""
    if plan.notation is other.notation or not {plan.notation, other.notation} <= {*REFERENCE_INSIDE}:
        return plan.components
    tables = {part.name: part.table for part in other.components if part.name in ("actor", "reference")}
    is_beside = len(tables) == 2 and tables["reference"] == tables["actor"]
    return with_reference(plan) if is_beside else plan.components


def _job_changes(before: Plan, after: Plan) -> Iterator[Change]:
    if before.mode is not after.mode:
        yield Change("mode", None, "", before.mode.value, after.mode.value)
    one, two = (_machines(plan) for plan in (before, after))
    if one != two:
        yield Change("machines", None, "", one, two)
    elif before.inventory.nodes != after.inventory.nodes:
        pairs = enumerate(zip(before.inventory.nodes, after.inventory.nodes, strict=True))
        rank, old_node, new_node = next((rank, old, new) for rank, (old, new) in pairs if old != new)
        yield Change("machines", None, f"node {rank}", _node(old_node), _node(new_node))
    settings, others = _settings(before, after), _settings(after, before)
    for key in sorted({*settings, *others}):
        old, new = settings.get(key), others.get(key)
        if old != new:
            yield Change("settings", key, "", _word(old), _word(new))
    one_run, other_run = ({setting.name: setting.value for setting in plan.training} for plan in (before, after))
    for name in sorted(one_run.keys() & other_run.keys()):
        if one_run[name] != other_run[name]:
            yield Change("training", f"train.{name}", "", _word(one_run[name]), _word(other_run[name]))


def _settings(plan: Plan, other: Plan) -> dict[str, object]:
    """Settings by the names that all notations share."""
    shared = {key: value for key, value in plan.settings.items() if key not in (*_ASYNC, *_SHOWN_ELSEWHERE)}
    if ESTIMATOR in shared:
        shared = with_shared_estimator(shared)
        if whitens_gae(plan) and other.settings.get(ESTIMATOR) == "gae" and plan.notation is not other.notation:
            shared[WHITEN] = True
    if not shared.get(KL_COEF) and not other.settings.get(KL_COEF):
        shared = {key: value for key, value in shared.items() if key not in (KL_COEF, KL_IN)}  # 0 is like none
    is_async, ratio = (plan.settings.get(key) for key in _ASYNC)
    shared[AHEAD] = f"{ratio if isinstance(ratio, int | float) else float(is_async is True):g}"
    sequence, prompt = _longest_sequence(plan), plan.settings.get(PROMPT)
    if RESPONSE in other.settings and RESPONSE not in shared and sequence and prompt:
        shared[RESPONSE] = sequence - int(prompt)
    return shared


def _longest_sequence(plan: Plan) -> int | None:
    """Most tokens of a learner's sequence."""
    learners = (part.model.sequence for part in plan.components if part.role is Role.LEARNER)
    return next((sequence for sequence in learners if sequence), None)


def _machines(plan: Plan) -> str:
    nodes = [node for node in plan.inventory.nodes if not node.lost]
    lost = plan.inventory.lost
    words = f"{counted(len(nodes), 'node')}, {counted(sum(node.accelerators for node in nodes), 'accelerator')}"
    return f"{words} ({spell_nodes(lost)} lost)" if lost else words


def _node(node: Node) -> str:
    """A node as text, with all properties in which nodes can differ."""
    words = [f"{node.accelerators} x {node.accelerator_type} {node.accelerator_model}".strip()]
    words += [f"{node.memory_gb:g} GiB each"] if node.memory_gb else []
    words += [f"{node.host_memory_gb:g} GiB of host memory"] if node.host_memory_gb else []
    words += [f"{len(items)} {kind} {[dict(item) for item in items]}" for kind, items in node.hardware.items()]
    return ", ".join([*words, *([node.host] if node.host else [])])


def _residency_changes(before: Plan, after: Plan) -> list[Change]:
    """Changes in how components time-share devices."""
    changes = []
    for part in after.components:
        one, two = (
            ", ".join(dict.fromkeys(held.decision.value for held in plan.residency.of(part.name)))
            for plan in (before, after)
        )
        if one != two and one and two:
            changes.append(Change("residency", part.name, "", one, two))
    return changes


def _word(value: object) -> str:
    """Format a setting as it would be written."""
    if isinstance(value, tuple):
        return "+".join(str(part) for part in value) or NOTHING
    return NOTHING if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def _model_changes(one: Plan, before: ComponentPlan, other: Plan, after: ComponentPlan) -> Iterator[Change]:
    """A change for each field of a component's model that its role uses and that differs."""
    if not uses_model(before) and not uses_model(after):
        return
    is_same = one.notation is other.notation
    role = (before if uses_model(before) else after).role
    for name in (field.name for field in fields(ModelUse) if field.name not in _NOT_USED[role]):
        if name in _OF_ROOST and not is_same:
            continue
        if is_same and not (name == "weight_bytes" and None in (before.model.trained_bytes, after.model.trained_bytes)):
            old, new = getattr(before.model, name), getattr(after.model, name)
        else:
            old, new = _field(one, before, name), _field(other, after, name)
        if old == new or (name == "config" and None in (old, new)):
            continue
        words = ("one config.json", "another config.json") if name == "config" else (_word(old), _word(new))
        yield Change("model", after.name, "", *(f"{name}={word}" for word in words))


def _field(plan: Plan, part: ComponentPlan, name: str) -> object:
    """A field of a component's model by the names that all notations share.

    Some notations have one path, one backend and one length for all components that use the policy's model.
    """
    learner = next((each for each in plan.components if each.role is Role.LEARNER), part)
    if name == "path":
        policy = (each.model.path for each in (learner, *plan.components) if each.role in (Role.LEARNER, Role.ENGINE))
        path = part.model.path or (next((path for path in policy if path), None) if uses_model(part) else None)
        return path.rstrip("/") if path else None
    if name == "strategy":
        is_scorer = part.role is Role.SCORER and part.model.strategy is None
        return backend(learner if is_scorer else part, plan.notation)
    if name == "sequence" and part.role is Role.ENGINE:
        return part.model.sequence or learner.model.sequence
    if name == "weight_bytes":
        return part.model.named_bytes
    return getattr(part.model, name)


def _sizes(part: ComponentPlan) -> ParallelSizes:
    """The parallel sizes; without an expert tensor size if the model has no experts, as far as is known."""
    sizes, shape = part.parallel, known_shape(part)
    is_mixture = max(sizes.expert, sizes.expert_tensor or 1) > 1 if shape is None else shape.expert_layers > 0
    return sizes if is_mixture else replace(sizes, expert_tensor=None)


def _spell_sizes(sizes: ParallelSizes) -> str:
    named = f"tensor {sizes.tensor}, pipeline {sizes.pipeline}, context {sizes.context}, expert {sizes.expert}"
    more = {"shard": sizes.shard, "expert_tensor": sizes.expert_tensor}
    return named + "".join(f", {name} {size}" for name, size in more.items() if size is not None)


def _component_changes(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    changes = []
    if before.world_size != after.world_size:
        changes.append(
            Change("component", after.name, "", f"{before.world_size} processes", f"{after.world_size} processes")
        )
    one, two = _sizes(before), _sizes(after)
    if one != two:
        changes.append(Change("sizes", after.name, "", _spell_sizes(one), _spell_sizes(two)))
    is_scorer = {before.role, after.role} == {Role.SCORER, Role.HELPER} and uses_model(before) and uses_model(after)
    if before.role is not after.role and not is_scorer:
        changes.append(Change("role", after.name, "", before.role.value, after.role.value))
    if before.table.isolate != after.table.isolate:
        seen = {True: "sees its own accelerators", False: "sees all accelerators of its node"}
        changes.append(Change("visibility", after.name, "", seen[before.table.isolate], seen[after.table.isolate]))
    changes += _moves(before, after)
    changes += _environment_changes(before, after)
    return changes


def _moves(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes of both plans that have moved; neighbours that moved alike are one change."""
    if before.world_size != after.world_size and max(before.world_size, after.world_size) <= MAX_ALIGNED:
        return _aligned(before, after)
    moved = [(rank, before.table[rank], after.table[rank]) for rank in _moved_ranks(before.table, after.table)]
    return _moves_of(moved, after.name)


def _moves_of(moved: list[tuple[int, Placement, Placement]], name: str) -> list[Change]:
    changes = []
    # Consecutive ranks between the same two nodes have the same difference between rank and position.
    runs = groupby(
        enumerate(moved),
        key=lambda item: (item[1][0] - item[0], item[1][1].cluster_node_rank, item[1][2].cluster_node_rank),
    )
    for _, run in runs:
        rows = [row for _, row in run]
        ranks = spell_ranks([rank for rank, _, _ in rows])
        old, new = _spell_placements([row[1] for row in rows]), _spell_placements([row[2] for row in rows])
        changes.append(Change("process", name, ranks, old, new))
    return changes


def _aligned(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes that moved, left or joined, if the numbers of processes differ; those that stay may change rank."""
    olds, news = list(before.table), list(after.table)
    one, two = ([(row.cluster_node_rank, tuple(row.devices)) for row in rows] for rows in (olds, news))
    moved, changes, shifted = [], [], []
    for tag, low, high, first, last in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        if tag == "equal":
            shifted += [(low, high, first)] if low != first else []
            continue
        both = min(high - low, last - first)
        moved += list(zip(range(low, low + both), olds[low:high], news[first:last], strict=False))
        changes += [_in_one_plan(after.name, rows, is_old=True) for rows in _by_node(olds[low + both : high])]
        changes += [_in_one_plan(after.name, rows, is_old=False) for rows in _by_node(news[first + both : last])]
    for low, high, first in shifted:
        old, new = spell_ranks(range(low, high)), spell_ranks(range(first, first + high - low))
        noun = "rank" if high - low == 1 else "ranks"
        changes.append(Change("process", after.name, old, f"{noun} {old}", f"{noun} {new}"))
    return [*_moves_of(moved, after.name), *changes]


def _by_node(rows: list[Placement]) -> list[list[Placement]]:
    return [list(run) for _, run in groupby(rows, key=lambda row: row.cluster_node_rank)]


def _in_one_plan(name: str, rows: list[Placement], is_old: bool) -> Change:
    """Processes of one node that only one of the plans has."""
    ranks, where = spell_ranks([row.rank for row in rows]), _spell_placements(rows)
    return Change("process", name, ranks, where if is_old else "", "" if is_old else where)


def _moved_ranks(before: PlacementTable, after: PlacementTable) -> list[int]:
    """The ranks that both tables have and place differently, compared column by column."""
    count = min(len(before), len(after))
    is_moved = before.nodes[:count] != after.nodes[:count]
    lengths = np.diff(before.offsets[: count + 1])
    is_moved |= lengths != np.diff(after.offsets[: count + 1])
    if not np.array_equal(before.offsets[: count + 1], after.offsets[: count + 1]):
        is_moved[int(np.argmax(before.offsets[1 : count + 1] != after.offsets[1 : count + 1])) :] = True
        candidates = [(rank, before[rank], after[rank]) for rank in np.flatnonzero(is_moved).tolist()]
        is_same = {rank: old[1] == new[1] and old.devices == new.devices for rank, old, new in candidates}
        return [rank for rank, same in is_same.items() if not same]
    end = int(before.offsets[count])
    differs = (before.device_nodes[:end] != after.device_nodes[:end]) | (
        before.device_ranks[:end] != after.device_ranks[:end]
    )
    is_moved[np.repeat(np.arange(count), lengths)[differs]] = True
    return np.flatnonzero(is_moved).tolist()


def _spell_placements(placements: list[Placement]) -> str:
    """Node and devices of processes that run on one node."""
    node = placements[0].cluster_node_rank
    held = [device for placement in placements for device in placement.devices]
    if not held:
        return f"node {node}"
    if all(on == node for on, _ in held):
        return f"node {node} devices {_spell_devices(placements)}"
    return "; ".join(_spell_across(placement.devices) for placement in placements)


def _spell_across(devices: Sequence[tuple[int, int]]) -> str:
    """Devices of a process on several nodes.

    >>> _spell_across([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
    'nodes 0-1 devices 0-1 of each, node 2 devices 0'
    """
    by_node = [(node, [index for _, index in own]) for node, own in groupby(devices, key=lambda device: device[0])]
    alike = [(indices, [node for node, _ in run]) for indices, run in groupby(by_node, key=lambda each: each[1])]
    return ", ".join(
        f"{spell_nodes(nodes)} devices {spell_ranks(indices)}{' of each' if len(nodes) > 1 else ''}"
        for indices, nodes in alike
    )


def _spell_devices(placements: list[Placement]) -> str:
    """Devices of processes on one node: as one list if they ascend, else process by process."""
    flat = [index for placement in placements for index in placement.local_hardware_ranks]
    if flat == sorted(flat) or len(placements) == 1:
        return spell_ranks(flat)
    return " ".join(f"[{spell_ranks(placement.local_hardware_ranks)}]" for placement in placements)


def _environment_changes(before: ComponentPlan, after: ComponentPlan) -> list[Change]:
    """Processes whose interpreter, variables or declared devices change, apart from visible devices."""
    if not any(_has_software(part) for part in (before, after)):
        return []
    count = min(before.world_size, after.world_size)
    # Processes of one group on one node are alike, so each pair of keys is compared once.
    keys = zip(
        *(column[:count].tolist() for part in (before, after) for column in _software_columns(part)), strict=True
    )
    known: dict[object, tuple[str, str]] = {}
    changed = []
    for rank, key in enumerate(keys):
        if key not in known:
            known[key] = _environment(before.process(rank), after.process(rank))
        if known[key][0] != known[key][1]:
            changed.append((rank, known[key][0] or NOTHING, known[key][1] or NOTHING))
    return [
        Change("environment", after.name, spell_ranks([rank for rank, _, _ in run]), one, two)
        for (one, two), run in groupby(changed, key=lambda item: item[1:])
    ]


def _has_software(part: ComponentPlan) -> bool:
    """Return True if the software of a process depends on more than its node."""
    groups = [part.table.inventory.group(label) for label in part.table.labels]
    return bool(part.env or set(part.table.kinds) - {ACCELERATOR, NODE} or any(group.software for group in groups))


def _software_columns(part: ComponentPlan) -> list[Ints]:
    """Columns whose equal values imply equal software and declared devices."""
    holds_declared = set(part.table.kinds) - {ACCELERATOR, NODE}
    rank = np.arange(part.world_size) if holds_declared else np.zeros(part.world_size, np.int64)
    return [part.table.nodes, part.table.groups, rank]


def _environment(old: Process, new: Process) -> tuple[str, str]:
    """Both sides as text, without common parts and visible devices."""
    sides = []
    for own, other in ((old, new), (new, old)):
        words = [f"interpreter {own.interpreter}"] if own.interpreter and own.interpreter != other.interpreter else []
        words += [f"{key}={value}" for key, value in own.start_env.items() if other.start_env.get(key) != value]
        if own.hardware != other.hardware:
            words += [" ".join(f"{key}={value}" for key, value in item.items()) for item in own.hardware]
        sides.append(" ".join(words))
    return sides[0], sides[1]
