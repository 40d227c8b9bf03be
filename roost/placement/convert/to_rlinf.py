"""A plan as a config of RLinf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from roost.cluster.inventory import Group, Inventory
from roost.config.findings import Findings, Where
from roost.config.job import EXPERT_TENSOR, Notation, ParallelSizes, Role, Sharding
from roost.config.node_groups import CLUSTER_GROUP
from roost.config.notations.algorithm import KL_COEF, KL_IN, PROMPT, RESPONSE
from roost.config.ranks import spell_nodes, spell_ranks
from roost.placement.component_plan import ComponentPlan, PlacementMode
from roost.placement.convert.parts import KEEP, estimator_word, given, precision, says_recomputing
from roost.placement.plan import Plan, backend, has_devices, learner_backend, uses_model, whitens

# Recompute all layers, by Megatron's names.
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "huggingface"}
PACKED = "PackedPlacementStrategy"
MODEL_ROLES = (Role.LEARNER, Role.ENGINE, Role.SCORER)


def to_rlinf(plan: Plan, findings: Findings, with_sizes: bool = True) -> dict[str, Any]:
    """The config. RLinf splits ranks by parallel sizes that are written; without them every process keeps its ranks."""
    inventory = plan.inventory
    sizes = sorted(set(inventory.accelerator_counts.tolist()))
    if len(sizes) > 1:
        findings.error(
            "RST-N052",
            Where(path=("nodes",)),
            "a config describes nodes of one size only; the others are for an inventory",
            f"nodes have {', '.join(map(str, sizes))} accelerators",
            KEEP,
        )
    own_groups = _groups_of_variables(plan)
    cluster: dict[str, Any] = {
        "num_nodes": inventory.num_nodes,
        "num_gpus_per_node": sizes[-1] if sizes else 0,
        "component_placement": {
            part.name: _placement(part, findings, own_groups.get(part.name)) for part in plan.components
        },
    }
    groups = [_group(group, inventory) for group in inventory.groups]
    groups += {group["label"]: group for group in own_groups.values()}.values()
    if groups:
        cluster["node_groups"] = groups
    if plan.mode is PlacementMode.AUTO:
        cluster["auto_scheduler"] = True
    return {"cluster": cluster, **_sections(plan, with_sizes)}


def _groups_of_variables(plan: Plan) -> dict[str, dict[str, Any]]:
    """A node group of all nodes for each component with its own variables, which the group sets."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    by_component = {}
    taken = {group.label for group in plan.inventory.groups}
    labels = (label for n in range(1, len(plan.components) + len(taken) + 2) if (label := f"env_{n}") not in taken)
    used: set[str] = set()
    for part in sorted(plan.components, key=has_devices, reverse=True):
        key = (has_devices(part), tuple(sorted(part.env)))
        names = {name for name, _ in part.env}
        # On one node only one group may set a variable; workers without devices then go without it.
        if not names or (not has_devices(part) and key not in found and names & used):
            continue
        if key not in found:
            nodes = spell_ranks(range(plan.inventory.num_nodes), limit=10**9)
            variables = [{name: value} for name, value in part.env]
            found[key] = {
                "label": next(labels),
                "node_ranks": nodes,
                "env_configs": [{"node_ranks": nodes, "env_vars": variables}],
                **({} if has_devices(part) else {"ignore_hardware": True}),
            }
            used |= names
        by_component[part.name] = found[key]
    return by_component


def _sections(plan: Plan, with_sizes: bool) -> dict[str, Any]:
    """Sections of the components: models, backends, sizes, memory, lengths."""
    sections: dict[str, Any] = {}
    parts = [part for part in plan.components if uses_model(part)]
    is_precise = any(part.model.names_type for part in parts)
    sequence = next((part.model.sequence for part in parts if part.model.sequence), None)
    for part in parts:
        model: dict[str, Any] = {"model_path": part.model.path} if part.model.path else {}
        if is_precise:
            model["precision"] = precision(part.model)
        section: dict[str, Any] = {}
        if part.role in (Role.LEARNER, Role.SCORER):
            section |= _learner(part, plan, sequence)
            if says_recomputing(part) and learner_backend(part) == "megatron":
                model |= _RECOMPUTED if part.model.recomputes else {"recompute_granularity": None}
            if part.model.lora_rank:
                model |= {"is_lora": True, "lora_rank": part.model.lora_rank}
        elif part.role is Role.ENGINE:
            section |= _engine(part, plan)
        if part.role in MODEL_ROLES and (with_sizes or part.strategy == PACKED):
            sizes = _sizes(part, is_written=part.strategy == PACKED)
            if part.role is Role.ENGINE:
                section |= sizes
            else:
                model |= sizes
        section |= {"model": model} if model else {}
        if section:
            sections[part.name] = section
    if sequence is not None:
        sections["runner"] = {"seq_length": sequence}
    if any(part.name == "inference" and part.strategy == PACKED for part in parts):
        sections["algorithm"] = {"recompute_logprobs": True}  # which the component does
    algorithm = _algorithm(plan)
    if algorithm:
        sections["algorithm"] = sections.get("algorithm", {}) | algorithm
    prompt = plan.settings.get(PROMPT)
    return sections | given(data=given(max_prompt_length=prompt))


def _algorithm(plan: Plan) -> dict[str, Any]:
    """Advantage estimator and KL; RLinf has a KL in the rewards for REINFORCE++ only."""
    named, coefficient = estimator_word(plan, Notation.RLINF), plan.settings.get(KL_COEF)
    word, _, also = named.partition(" with ") if named else (None, "", "")
    is_in_reward = plan.settings.get(KL_IN) == "reward" and word == "reinpp"
    sampling = given(max_new_tokens=plan.settings.get(RESPONSE))
    key = "reinpp_kl_beta" if is_in_reward else "kl_beta"
    is_switch = word == "gae" or (whitens(plan) and word != "reinpp")  # true by default for gae alone
    switch = whitens(plan) if is_switch else None
    own = {also: True} if also else {}
    return given(adv_type=word, **own, normalize_advantages=switch, sampling_params=sampling, **{key: coefficient})


def _learner(part: ComponentPlan, plan: Plan, sequence: int | None) -> dict[str, Any]:
    section: dict[str, Any] = {}
    learner = next((each for each in plan.components if each.role is Role.LEARNER), part)
    is_learners = part is not learner and part.model.sharding is learner.model.sharding  # a scorer has them by default
    if part.model.strategy is not None or (part.model.sharding is not Sharding.FULL and not is_learners):
        section["training_backend"] = learner_backend(part)
    if part.model.sharding is Sharding.NONE:
        section["fsdp_config"] = {"sharding_strategy": "no_shard"}
    elif part.parallel.shard is not None:
        section["fsdp_config"] = {"fsdp_size": part.parallel.shard}
    if says_recomputing(part) and learner_backend(part) != "megatron":
        flag = {"gradient_checkpointing": part.model.recomputes}
        section["fsdp_config"] = section.get("fsdp_config", {}) | flag
    if part.role is Role.LEARNER:
        section |= {f"offload_{name}": True for name in part.model.offloads}
        if part.model.tokens and sequence and part.model.tokens % sequence == 0:
            section["micro_batch_size"] = part.model.tokens // sequence
        if part.model.unused_because and part.name == "critic":
            section["use_critic_model"] = False
    return section


def _engine(part: ComponentPlan, plan: Plan) -> dict[str, Any]:
    word = backend(part, plan.notation)
    section: dict[str, Any] = {}
    if word is not None:
        section["rollout_backend"] = _ENGINES.get(word, "vllm")
    if part.model.memory_fraction is not None:
        section["gpu_memory_utilization"] = part.model.memory_fraction
    if not part.model.can_sleep:
        section["enable_sleep_mode"] = False
    return section


def _sizes(part: ComponentPlan, is_written: bool) -> dict[str, int]:
    """Parallel sizes; those of 1 only if `is_written` or another is above 1."""
    sizes = part.parallel
    named: Mapping[str, int]
    if part.role is Role.ENGINE:
        named = {"tensor_parallel_size": sizes.tensor, "pipeline_parallel_size": sizes.pipeline}
    else:
        named = {
            "tensor_model_parallel_size": sizes.tensor,
            "pipeline_model_parallel_size": sizes.pipeline,
            "context_parallel_size": sizes.context,
            "expert_model_parallel_size": sizes.expert,
        }
    always = tuple(named)[:2] if is_written or sizes != ParallelSizes() else ()
    found = {key: size for key, size in named.items() if size > 1 or key in always}
    return found if sizes.expert_tensor is None else found | {EXPERT_TENSOR: sizes.expert_tensor}


def _placement(part: ComponentPlan, findings: Findings, own_group: Mapping[str, Any] | None) -> str | dict[str, str]:
    if part.strategy == PACKED:
        text = spell_ranks(part.hardware_ranks.tolist(), limit=10**9)
    elif len(part.table.device_nodes):
        text = _devices_text(part, findings)
    else:
        text = _nodes_text(part)
    groups = part.node_groups if own_group is None else (own_group["label"],)
    if groups == (CLUSTER_GROUP,):
        return text
    return {"node_group": ",".join(groups), "placement": text}


def _devices_text(part: ComponentPlan, findings: Findings) -> str:
    """The resource ranks of each process as segments; a process that no segment can express is a finding."""
    table = part.table
    resources = table.inventory.resources(part.node_groups)
    entries = zip(resources.nodes.tolist(), resources.groups.tolist(), resources.starts.tolist(), strict=False)
    first = {(node, group): start for node, group, start in entries}
    held: list[tuple[int, int]] = []
    for placement, group in zip(table, table.groups.tolist(), strict=True):
        ranks = [first.get((node, group), 0) + index for node, index in placement.devices]
        is_run = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
        if not is_run or len({node for node, _ in placement.devices}) > 1:
            nodes = sorted({node for node, _ in placement.devices})
            what = f"RLinf gives a process neighbouring GPUs of one node, and process {placement.rank} has others"
            why = f"it has {len(placement.devices)} GPUs of {spell_nodes(nodes)}"
            findings.error("RST-N053", Where(path=(part.name,)), what, why, KEEP)
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
                "RST-N053", place, f"RLinf shares single ranks, and {sharers} processes share {size}", fix=KEEP
            )
            return ""
        last = runs[-1][0] + runs[-1][1] * runs[-1][3] - 1 if runs else -1
        if rank <= last:
            findings.error(
                "RST-N053",
                place,
                f"RLinf's ranks ascend, and a process goes back to rank {rank} after {last}",
                fix=KEEP,
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
        ranks = spell_ranks(range(rank, rank + size * count))
        is_implied = size == sharers == 1
        yield ranks if is_implied else f"{ranks}:{spell_ranks(range(process, process + sharers * count))}"
        process += sharers * count


def _nodes_text(part: ComponentPlan) -> str:
    """Blocks of processes on nodes, one segment for each node unless each has one process."""
    table = part.table
    resources = table.inventory.resources(part.node_groups).node_table()
    index_of = {int(node): index for index, node in enumerate(resources.nodes)}
    ranks = [index_of.get(node, 0) for node in table.nodes.tolist()]
    values, counts = np.unique(ranks, return_counts=True)
    if len(set(counts.tolist())) == 1 and values.tolist() == list(range(int(values[0]), int(values[-1]) + 1)):
        processes = "" if counts[0] == 1 else f":0-{len(ranks) - 1}"
        return spell_ranks(values.tolist()) + processes
    ends = np.cumsum(counts).tolist()
    blocks = zip(values.tolist(), counts.tolist(), ends, strict=True)
    return ",".join(f"{value}:{spell_ranks(range(end - count, end))}" for value, count, end in blocks)


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
