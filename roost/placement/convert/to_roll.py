"""A plan as a config of ROLL."""

from __future__ import annotations

from typing import Any

import numpy as np

from roost.cluster.inventory import ACCELERATOR, NODE
from roost.config.data import TEACHER
from roost.config.findings import Findings, Where
from roost.config.job import Notation, Role
from roost.config.notations.algorithm import (
    BASELINE,
    BY_TURN,
    ESTIMATOR,
    KL_COEF,
    KL_IN,
    NORMALISED,
    NOT_WHITENED,
    PROMPT,
    RESPONSE,
    STD,
    STEPS,
)
from roost.config.ranks import spell_ranks
from roost.config.train_choices import RewardScope
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import (
    KEEP,
    above_one,
    estimator_word,
    given,
    megatron_sizes,
    precision,
    says_recomputing,
)
from roost.placement.plan import Plan, backend, uses_model, whitens, with_reference

ROLES = {"actor": "actor_train", "rollout": "actor_infer"}


def to_roll(plan: Plan, findings: Findings) -> dict[str, Any]:
    inventory = plan.inventory
    sizes = sorted(set(inventory.accelerator_counts.tolist()))
    if len(sizes) > 1:
        why = f"nodes have {', '.join(map(str, sizes))} accelerators"
        findings.error("RST-N052", Where(path=("nodes",)), "ROLL describes nodes of one size only", why, KEEP)
    config: dict[str, Any] = {"num_gpus_per_node": sizes[-1] if sizes else 0, "num_nodes": inventory.num_nodes}
    ratio = plan.settings.get("async_generation_ratio", 1 if plan.settings.get("async_rollouts") else None)
    if ratio is not None:
        config["async_generation_ratio"] = ratio
    sequence = next((part.model.sequence for part in plan.components if part.model.sequence), None)
    prompt, response = (plan.settings.get(name) for name in (PROMPT, RESPONSE))
    config |= given(sequence_length=sequence, prompt_length=prompt, response_length=response) | _algorithm(plan)
    for part in with_reference(plan):
        role = _role(part, plan, findings)
        if part.name.startswith("reward."):
            config.setdefault("rewards", {})[part.name.removeprefix("reward.")] = role
        else:
            config[ROLES.get(part.name, part.name)] = role
    return config


def _estimator(plan: Plan) -> dict[str, Any]:
    """The estimator, and keys for what it normalises: a block in the agentic pipeline."""
    said = plan.settings.get(ESTIMATOR)
    is_agentic = any(part.name == "train_env_manager" for part in plan.components)
    is_named = said in NOT_WHITENED and not is_agentic and plan.notation not in (Notation.ROLL, Notation.AREAL)
    said = NOT_WHITENED[str(said)] if is_named else said  # other programs whiten all tokens, which is written below
    whitened = {"whiten_advantages": True} if is_named or whitens(plan) else {}
    if said == TEACHER:
        return {"is_pure_opd": True, **whitened}
    mean, std = (RewardScope(plan.settings.get(name, RewardScope.NONE)) for name in (BASELINE, STD))
    name = estimator_word(plan, Notation.ROLL)
    for scopes, word in NORMALISED.items():
        if word == said:
            mean, std = scopes if word != "reinforce" else (mean, std)
            own = {STEPS: "step_reinforce", BY_TURN: "agentic_reinforce"}
            name = next((own[key] for key in own if plan.settings.get(key)), "reinforce")
    if said == "grpo" and not is_agentic:
        return {"adv_estimator": "grpo", **whitened}
    return given(adv_estimator=name) | _normalisation(mean, std, is_agentic) | whitened


def _normalisation(mean: RewardScope, std: RewardScope, is_agentic: bool) -> dict[str, Any]:
    """Keys for what the mean and the standard deviation of rewards are taken over."""
    if mean is std is RewardScope.NONE:
        return {}
    words = {RewardScope.NONE: None, RewardScope.GROUP: "group"}  # without environments a tag is a domain's batch
    if not is_agentic:
        return given(norm_mean_type=words.get(mean, "batch"), norm_std_type=words.get(std, "batch"))
    scopes = [scope for scope in (mean, std) if scope is not RewardScope.NONE]
    over = next((scope for scope in scopes if scope is not RewardScope.BATCH), RewardScope.BATCH)
    grouping = {RewardScope.GROUP: "traj_group_id", RewardScope.TAG: "tags"}.get(over, "batch")
    if mean is not RewardScope.NONE and std in (mean, RewardScope.NONE):
        return {"reward_normalization": {"grouping": grouping, "method": "mean_std" if std is mean else "mean"}}
    words |= {RewardScope.TAG: "group", RewardScope.BATCH: "batch"}
    return {
        "reward_normalization": {"grouping": grouping} | given(norm_mean_type=words[mean], norm_std_type=words[std])
    }


def _algorithm(plan: Plan) -> dict[str, Any]:
    """Advantage estimator, and KL in the loss or in the rewards."""
    coefficient = plan.settings.get(KL_COEF)
    section = _estimator(plan)
    if coefficient is None:
        return section
    if plan.settings.get(KL_IN) == "reward":
        return section | {"add_token_level_kl": True, "init_kl_coef": coefficient}
    return section | {"use_kl_loss": True, "kl_loss_coef": coefficient}


def _role(part: ComponentPlan, plan: Plan, findings: Findings) -> dict[str, Any]:
    place = Where(path=(part.name,))
    kinds = set(part.table.kinds)
    if kinds - {ACCELERATOR, NODE}:
        findings.error(
            "RST-N054",
            place,
            f"ROLL has no word for {', '.join(sorted(kinds - {ACCELERATOR, NODE}))}",
            fix=KEEP,
        )
    if ACCELERATOR in kinds:
        role = _devices(part, plan, findings, place) | _model(part, plan)
    else:
        role = {"world_size": part.world_size}
    variables = _variables(part, findings, place)
    return role | ({"system_envs": variables} if variables else {})


def _model(part: ComponentPlan, plan: Plan) -> dict[str, Any]:
    """The role's model and its batch."""
    model, word = part.model, backend(part, plan.notation)
    if not uses_model(part):
        return {}
    arguments: dict[str, Any] = {"model_name_or_path": model.path} if model.path else {}
    arguments |= {"dtype": precision(model)} if model.names_type else {}
    arguments |= {"lora_rank": model.lora_rank} if model.lora_rank else {}
    if part.parallel.context > 1 and part.role is not Role.ENGINE and word != "megatron":
        arguments["ulysses_size"] = part.parallel.context  # of FSDP; Megatron's is in its strategy
    if says_recomputing(part) and word != "megatron":
        arguments["disable_gradient_checkpointing"] = not model.recomputes
    written: dict[str, Any] = {"model_args": arguments} if arguments else {}
    if part.role is Role.LEARNER and model.tokens and model.sequence and model.tokens % model.sequence == 0:
        written["training_args"] = {"per_device_train_batch_size": model.tokens // model.sequence}
    return written


def _devices(part: ComponentPlan, plan: Plan, findings: Findings, place: Where) -> dict[str, Any]:
    lengths = np.unique(np.diff(part.table.offsets)).tolist()
    if len(lengths) > 1:
        why = f"its processes hold {', '.join(map(str, lengths))}"
        findings.error("RST-N054", place, "ROLL gives every worker the same number of devices", why, KEEP)
    devices = part.table.device_numbers.tolist()
    per_worker = lengths[-1] if lengths else 1
    role: dict[str, Any] = {"device_mapping": _expression(devices)}
    strategy = _strategy(part, plan.notation, per_worker)
    if strategy is not None:
        config = _settings(part, strategy)
        if says_recomputing(part) and strategy.startswith("megatron"):
            config["recompute_granularity"] = "full" if part.model.recomputes else None
        role["strategy_args"] = {"strategy_name": strategy, "strategy_config": config}
    if per_worker != 1 and strategy != "vllm":
        role["num_gpus_per_worker"] = per_worker
    return role


def _strategy(part: ComponentPlan, notation: Notation, per_worker: int) -> str | None:
    """ROLL's own strategy if the job is one of ROLL; else the one that splits workers as the plan does."""
    if notation is Notation.ROLL:
        return part.model.strategy
    word = backend(part, notation)
    if part.role is Role.ENGINE:
        if word in ("sglang", "hf"):
            return {"sglang": "sglang", "hf": "hf_infer"}[word]
        return "vllm" if per_worker == part.parallel.tensor * part.parallel.pipeline else None
    if part.role is Role.LEARNER and per_worker == 1:
        return "megatron_train" if word == "megatron" else "fsdp2_train"
    if part.role is Role.SCORER and per_worker == 1:
        return "megatron_infer" if word == "megatron" or part.parallel.model > 1 else word and "fsdp2_infer"
    return None


def _settings(part: ComponentPlan, strategy: str) -> dict[str, Any]:
    """The parallel sizes, and an engine's memory."""
    sizes = part.parallel
    if strategy.startswith("megatron"):
        written = megatron_sizes(sizes)
    elif strategy.startswith("fsdp2"):
        written = above_one(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            expert_model_parallel_size=sizes.expert,
            fsdp_size=sizes.shard or 1,
        )
    else:
        written = above_one(tensor_parallel_size=sizes.tensor, pipeline_parallel_size=sizes.pipeline)
    if part.model.memory_fraction is not None:
        key = "mem_fraction_static" if strategy == "sglang" else "gpu_memory_utilization"
        written[key] = part.model.memory_fraction
    if not part.model.can_sleep:
        written["enable_sleep_mode"] = False
    return written


def _expression(devices: list[int]) -> str:
    """`list(range(...))` if the devices are a run, a sum of these for a few runs, else the list itself."""
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
        findings.error("RST-N051", place, "ROLL has no word for an interpreter", fix=KEEP)
    variables = {software.env_vars for software in found}
    if len(variables) > 1:
        findings.error("RST-N051", place, "ROLL gives all nodes of a role the same variables", fix=KEEP)
    return {**dict(next(iter(variables), ())), **dict(part.env)}
