"""Write a plan in another notation; the result is planned again and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any

import numpy as np

from roost.cluster.inventory import ACCELERATOR, NODE, Group, Inventory
from roost.config.findings import Findings, Where
from roost.config.job import ModelUse, Notation, Role, Sharding
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.notations.loop import MEMORY_KEYS
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan
from roost.placement.diff import diff_plans
from roost.placement.plan import Plan
from roost.placement.planner import try_plan

_KEEP = "keep the notation it is written in"


def to_loop(plan: Plan, findings: Findings) -> dict[str, Any]:
    if plan.inventory.num_nodes > 1:
        findings.error(
            "RST-N047",
            Where(path=("nodes",)),
            "ml-loop runs on one machine",
            f"the plan has {plan.inventory.num_nodes} nodes",
            _KEEP,
        )
    for part in plan.components:
        if part.name not in ("actor", "rollout"):
            findings.error("RST-N048", Where(path=(part.name,)), "ml-loop has learners and servers only", fix=_KEEP)
    names = {part.name: part for part in plan.components}
    allocation = {}
    for name, key in (("actor", "learning_gpus"), ("rollout", "inference_gpus")):
        if name in names:
            allocation[key] = names[name].table.device_ranks.tolist()
        else:
            findings.error(
                "RST-N048", Where(path=(name,)), f"ml-loop needs {key}, and the plan has no {name}", fix=_KEEP
            )
    rl: dict[str, Any] = {"gpu_allocation": allocation, "async_rollouts": _is_async(plan, findings)}
    rl |= {key: plan.settings[key] for key in MEMORY_KEYS if plan.settings.get(key) is not None}
    config: dict[str, Any] = {"rl": rl}
    if "actor" in names and np.diff(names["actor"].table.offsets).max() > 1:
        findings.error("RST-N049", Where(path=("actor",)), "ml-loop gives every learner one GPU", fix=_KEEP)
    if "rollout" in names:
        server: dict[str, Any] = {"gpus_per_vllm_server": _server_size(names["rollout"], findings)}
        if not names["rollout"].model.can_sleep:
            server["enable_sleep_mode"] = False
        config["llm"] = {"vllm_server": server}
        if plan.settings.get("max_gpu_mem_utilization") is not None:
            config["llm"]["max_gpu_mem_utilization"] = plan.settings["max_gpu_mem_utilization"]
    for part in names.values():
        _refuse_software(part, findings)
    return config


def _is_async(plan: Plan, findings: Findings) -> bool:
    ratio = plan.settings.get("async_generation_ratio")
    if ratio not in (None, 0, 1):
        findings.error(
            "RST-N050",
            Where(path=("async_generation_ratio",)),
            f"ml-loop lags by one iteration, not by {ratio}",
            fix="write 0 or 1",
        )
    return bool(ratio) or plan.settings.get("async_rollouts") is True


def _server_size(part: ComponentPlan, findings: Findings) -> int:
    sizes = np.diff(part.table.offsets).tolist()
    if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
        findings.error(
            "RST-N049",
            Where(path=(part.name,)),
            "ml-loop cuts servers of one size, the last one smaller at most",
            fix=_KEEP,
        )
    return int(sizes[0])


def _refuse_software(part: ComponentPlan, findings: Findings) -> None:
    if part.env or any(part.table.inventory.group(label).software for label in part.table.labels):
        findings.error(
            "RST-N051",
            Where(path=(part.name,)),
            "ml-loop has no word for variables or interpreters of a component",
            fix=_KEEP,
        )


PACKED = "PackedPlacementStrategy"


def to_rlinf(plan: Plan, findings: Findings) -> dict[str, Any]:
    inventory = plan.inventory
    sizes = sorted(set(inventory.accelerator_counts.tolist()))
    if len(sizes) > 1:
        findings.error(
            "RST-N052",
            Where(path=("nodes",)),
            "a config describes nodes of one size only; the others are for an inventory",
            f"nodes have {', '.join(map(str, sizes))} accelerators",
            _KEEP,
        )
    cluster: dict[str, Any] = {
        "num_nodes": inventory.num_nodes,
        "num_gpus_per_node": sizes[-1] if sizes else 0,
        "component_placement": {part.name: _placement(part, findings) for part in plan.components},
    }
    if inventory.groups:
        cluster["node_groups"] = [_group(group, inventory) for group in inventory.groups]
    for part in plan.components:
        if part.env:
            findings.error(
                "RST-N051",
                Where(path=(part.name,)),
                "RLinf sets variables for node groups, not for a component",
                fix=_KEEP,
            )
    sections = _parallel_sizes(plan)
    actor = next((part for part in plan.components if part.name == "actor"), None)
    if actor is not None and plan.notation is Notation.RLINF:
        flags = {f"offload_{part}": True for part in actor.model.offloads}
        sections["actor"] = {**flags, **sections.get("actor", {})} if flags or "actor" in sections else {}
    return {"cluster": cluster, **{name: section for name, section in sections.items() if section}}


def _parallel_sizes(plan: Plan) -> dict[str, Any]:
    """The sizes that the model-parallel layout cuts by, for plans that it made."""
    sections: dict[str, Any] = {}
    for part in plan.components:
        if part.strategy != PACKED or part.role not in (Role.LEARNER, Role.ENGINE, Role.SCORER):
            continue
        sizes = part.parallel
        if part.role is Role.ENGINE:
            sections[part.name] = {"tensor_parallel_size": sizes.tensor, "pipeline_parallel_size": sizes.pipeline}
        else:
            model = {"tensor_model_parallel_size": sizes.tensor, "pipeline_model_parallel_size": sizes.pipeline}
            sections[part.name] = {
                "model": model | ({"context_parallel_size": sizes.context} if sizes.context > 1 else {})
            }
    if "inference" in sections:
        sections["algorithm"] = {"recompute_logprobs": True}  # what the component is for
    return sections


def _placement(part: ComponentPlan, findings: Findings) -> str | dict[str, str]:
    if part.strategy == PACKED:
        text = spell_ranks(part.hardware_ranks.tolist(), limit=10**9)
    elif len(part.table.device_nodes):
        text = _devices_text(part, findings)
    else:
        text = _nodes_text(part, findings)
    groups = part.node_groups
    if groups == (CLUSTER_GROUP,):
        return text
    return {"node_group": ",".join(groups), "placement": text}


def _devices_text(part: ComponentPlan, findings: Findings) -> str:
    """The resource ranks of each process as segments; what no segment can say is a finding."""
    table = part.table
    resources = table.inventory.resources(part.node_groups)
    entries = zip(resources.nodes.tolist(), resources.groups.tolist(), resources.starts.tolist(), strict=False)
    first = {(node, group): start for node, group, start in entries}
    held: list[tuple[int, int]] = []
    for placement, group in zip(table, table.groups.tolist(), strict=True):
        ranks = [first.get((node, group), 0) + index for node, index in placement.devices]
        is_run = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        if not is_run or len({node for node, _ in placement.devices}) > 1:
            what = f"RLinf gives a process a run of ranks on one node, and process {placement.rank} holds others"
            held_words = ", ".join(f"device {index} of node {node}" for node, index in placement.devices[:8])
            findings.error("RST-N053", Where(path=(part.name,)), what, f"it holds {held_words}", _KEEP)
            return ""
        held.append((ranks[0], len(ranks)))
    return _segments(part, held, findings)


def _segments(part: ComponentPlan, held: list[tuple[int, int]], findings: Findings) -> str:
    """Segments from the first rank and the number of ranks of each process.

    A segment is a run of processes with equally many ranks each that follow one another, or a run of ranks with equally
    many processes on each.
    """
    blocks = [(rank, size, sum(1 for _ in same)) for (rank, size), same in groupby(held)]
    runs: list[list[int]] = []  # first rank, ranks per process, processes per rank, blocks
    for rank, size, sharers in blocks:
        place = Where(path=(part.name,))
        if size > 1 and sharers > 1:
            findings.error(
                "RST-N053", place, f"RLinf shares single ranks, and {sharers} processes share {size}", fix=_KEEP
            )
            return ""
        last = runs[-1][0] + runs[-1][1] * runs[-1][3] - 1 if runs else -1
        if rank <= last:
            findings.error(
                "RST-N053",
                place,
                f"RLinf's ranks ascend, and a process goes back to rank {rank} after {last}",
                fix=_KEEP,
            )
            return ""
        if runs and runs[-1][1:3] == [size, sharers] and rank == last + 1:
            runs[-1][3] += 1
        else:
            runs.append([rank, size, sharers, 1])
    return ",".join(_spelled(runs))


def _spelled(runs: list[list[int]]) -> Iterator[str]:
    process = 0
    for rank, size, sharers, count in runs:
        ranks = spell_ranks(list(range(rank, rank + size * count)))
        is_implied = size == sharers == 1
        yield ranks if is_implied else f"{ranks}:{spell_ranks(list(range(process, process + sharers * count)))}"
        process += sharers * count


def _nodes_text(part: ComponentPlan, findings: Findings) -> str:
    """Blocks of processes on nodes, one segment for each node unless each has one process."""
    table = part.table
    resources = table.inventory.resources(part.node_groups).node_table()
    index_of = {int(node): index for index, node in enumerate(resources.nodes)}
    ranks = [index_of.get(node, 0) for node in table.nodes.tolist()]
    if ranks != sorted(ranks):
        findings.error(
            "RST-N053",
            Where(path=(part.name,)),
            "RLinf fills nodes in order, and these processes go round them in turn",
            fix=_KEEP,
        )
        return ""
    values, counts = np.unique(ranks, return_counts=True)
    if len(set(counts.tolist())) == 1 and values.tolist() == list(range(int(values[0]), int(values[-1]) + 1)):
        processes = "" if counts[0] == 1 else f":0-{len(ranks) - 1}"
        return spell_ranks(values.tolist()) + processes
    ends = np.cumsum(counts).tolist()
    blocks = zip(values.tolist(), counts.tolist(), ends, strict=True)
    return ",".join(f"{value}:{spell_ranks(list(range(end - count, end)))}" for value, count, end in blocks)


def _group(group: Group, inventory: Inventory) -> dict[str, Any]:
    nodes = group.node_ranks.tolist()
    described: dict[str, Any] = {"label": group.label, "node_ranks": spell_ranks(nodes, limit=10**9)}
    if group.software:
        described["env_configs"] = [
            {
                "node_ranks": spell_ranks(sorted(part.node_ranks), limit=10**9),
                **({"env_vars": [{key: value} for key, value in part.env_vars]} if part.env_vars else {}),
                **({"python_interpreter_path": part.python_interpreter_path} if part.python_interpreter_path else {}),
            }
            for part in group.software
        ]
    if group.ignore_hardware:
        described["ignore_hardware"] = True
    if group.hardware_type is not None:
        items = [
            {"node_rank": node, **item}
            for node in nodes
            for item in inventory.nodes[node].hardware.get(group.hardware_type, ())
        ]
        described["hardware"] = {"type": group.hardware_type, "configs": items}
    return described


ROLES = {"actor": "actor_train", "rollout": "actor_infer"}


def to_roll(plan: Plan, findings: Findings) -> dict[str, Any]:
    inventory = plan.inventory
    sizes = sorted(set(inventory.accelerator_counts.tolist()))
    if len(sizes) > 1:
        why = f"nodes have {', '.join(map(str, sizes))} accelerators"
        findings.error("RST-N052", Where(path=("nodes",)), "ROLL describes nodes of one size only", why, _KEEP)
    config: dict[str, Any] = {"num_gpus_per_node": sizes[-1] if sizes else 0, "num_nodes": inventory.num_nodes}
    ratio = plan.settings.get("async_generation_ratio", 1 if plan.settings.get("async_rollouts") else None)
    if ratio is not None:
        config["async_generation_ratio"] = ratio
    for part in plan.components:
        role = _role(part, findings)
        if part.name.startswith("reward."):
            config.setdefault("rewards", {})[part.name.removeprefix("reward.")] = role
        else:
            config[ROLES.get(part.name, part.name)] = role
    return config


def _role(part: ComponentPlan, findings: Findings) -> dict[str, Any]:
    place = Where(path=(part.name,))
    kinds = set(part.table.kinds)
    if kinds - {ACCELERATOR, NODE}:
        findings.error(
            "RST-N054",
            place,
            f"ROLL has no word for {', '.join(sorted(kinds - {ACCELERATOR, NODE}))}",
            fix=_KEEP,
        )
    role: dict[str, Any] = _devices(part, findings, place) if ACCELERATOR in kinds else {"world_size": part.world_size}
    variables = _variables(part, findings, place)
    return role | ({"system_envs": variables} if variables else {})


def _devices(part: ComponentPlan, findings: Findings, place: Where) -> dict[str, Any]:
    lengths = np.unique(np.diff(part.table.offsets)).tolist()
    if len(lengths) > 1:
        why = f"its processes hold {', '.join(map(str, lengths))}"
        findings.error("RST-N054", place, "ROLL gives every worker the same number of devices", why, _KEEP)
    devices = part.table.device_numbers.tolist()
    per_worker = lengths[-1] if lengths else 1
    role: dict[str, Any] = {"device_mapping": _expression(devices)}
    strategy = _strategy(part, per_worker)
    if strategy is not None:
        role["strategy_args"] = {"strategy_name": strategy, "strategy_config": _sizes(part, strategy)}
    if per_worker != 1 and strategy != "vllm":
        role["num_gpus_per_worker"] = per_worker
    return role


def _strategy(part: ComponentPlan, per_worker: int) -> str | None:
    """The strategy that the plan came from, or the one that cuts workers as the plan does."""
    if part.model.strategy is not None:
        return part.model.strategy
    if part.role is Role.ENGINE and per_worker == part.parallel.tensor * part.parallel.pipeline:
        return "vllm"
    if part.role is Role.LEARNER and per_worker == 1:
        return "megatron_train" if part.model.sharding is Sharding.OPTIMIZER else "fsdp2_train"
    return "megatron_infer" if part.role is Role.SCORER and per_worker == 1 and part.parallel.model > 1 else None


def _sizes(part: ComponentPlan, strategy: str) -> dict[str, Any]:
    sizes = part.parallel
    if strategy.startswith("megatron"):
        named = {
            "tensor_model_parallel_size": sizes.tensor,
            "pipeline_model_parallel_size": sizes.pipeline,
            "context_parallel_size": sizes.context,
            "expert_model_parallel_size": sizes.expert,
        }
    else:
        named = {"tensor_parallel_size": sizes.tensor, "pipeline_parallel_size": sizes.pipeline}
    written: dict[str, Any] = {key: size for key, size in named.items() if size > 1}
    if part.model.memory_fraction is not None:
        written["gpu_memory_utilization"] = part.model.memory_fraction
    return written


def _expression(devices: list[int]) -> str:
    """`list(range(...))` where the devices are a run, sums of those where they are a few, else the list itself."""
    spelled = spell_ranks(devices, limit=10**9).split(",")
    if len(spelled) > 8 or any("-" not in run for run in spelled):
        return str(devices)  # ROLL evaluates a string, never a list
    bounds = [run.split("-") for run in spelled]
    return " + ".join(f"list(range({first},{int(last) + 1}))" for first, last in bounds)


def _variables(part: ComponentPlan, findings: Findings, place: Where) -> dict[str, str]:
    """Variables of the whole component; ROLL cannot give nodes different ones, nor an interpreter."""
    groups = [part.table.inventory.group(label) for label in part.table.labels]
    found = {
        group.software_of(node)
        for group in groups
        for node in np.unique(part.table.nodes).tolist()
        if node in group.node_ranks
    }
    if any(software.python_interpreter_path for software in found):
        findings.error("RST-N051", place, "ROLL has no word for an interpreter", fix=_KEEP)
    variables = {software.env_vars for software in found}
    if len(variables) > 1:
        findings.error("RST-N051", place, "ROLL gives all nodes of a role the same variables", fix=_KEEP)
    return {**dict(next(iter(variables), ())), **dict(part.env)}


_WRITERS = {Notation.RLINF: to_rlinf, Notation.ROLL: to_roll, Notation.LOOP: to_loop}
_ABOUT_PLACES = ("machines", "component", "process", "environment")
_LOSSES = ("settings", "sizes", "role", "residency")
# The same switch under two names.
_ASYNC = ("async_rollouts", "async_generation_ratio")


def convert_plan(plan: Plan, notation: Notation, findings: Findings) -> dict[str, Any] | None:
    """A config in the notation that places every process alike.

    A placement that cannot be said there is an error; a setting that is lost on the way is a warning that names it.
    """
    if notation not in _WRITERS:
        what = f"Roost reads jobs of {notation.program}, and does not write them"
        findings.error("RST-N064", Where(), what, fix=f"use one of {', '.join(_WRITERS)}")
        return None
    errors = findings.num_errors
    config = _WRITERS[notation](plan, findings)
    if findings.num_errors > errors:
        return None
    again = Findings()
    # ml-loop does not describe its machine; the other notations do, and must do it right.
    result = try_plan(config, again, plan.inventory if notation is Notation.LOOP else None, notation=notation)
    if result is None:
        for finding in again.errors:
            what = f"{notation.value} cannot say this plan: {finding.where.key_path} {finding.what}"
            findings.error("RST-N044", Where(), what, finding.why, finding.fix)
        return None
    for change in diff_plans(plan, result):
        if change.subject in _ABOUT_PLACES:
            what = f"{notation.value} cannot say this placement: {change}"
            findings.error("RST-N045", Where(), what, fix="keep the notation it is written in")
        elif change.subject in _LOSSES and not _is_said_otherwise(change.component, plan, result):
            what = f"{notation.value} does not say this: {change}"
            findings.warn("RST-N046", Where(), what, fix="set it again where the job is trained")
    for part in plan.components:
        lost = _lost_settings(part.model, result[part.name].model)
        if lost:
            what = f"{notation.value} does not say {', '.join(lost)} of {part.name}"
            findings.warn("RST-N046", Where(path=(part.name,)), what, fix="set it again where the job is trained")
    return config if findings.num_errors == errors else None


def _lost_settings(written: ModelUse, result: ModelUse) -> list[str]:
    """Settings of a component's model that the plan has and the converted config does not."""
    unset = ModelUse()
    names = [part.name for part in fields(ModelUse) if part.name not in ("config", "tokens", "sequence")]
    return [
        name for name in names
        if getattr(written, name) not in (getattr(unset, name), getattr(result, name))
    ]  # fmt: skip


def _is_said_otherwise(key: str | None, plan: Plan, result: Plan) -> bool:
    """Return True if a setting is another notation's name for something that the plan has."""
    if key not in _ASYNC:
        return result.settings.get(key or "") is None and not plan.settings.get(key or "") and key in plan.settings
    values = [bool(one.settings.get(_ASYNC[0]) or one.settings.get(_ASYNC[1])) for one in (plan, result)]
    return values[0] == values[1]
