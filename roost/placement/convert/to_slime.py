"""A plan as flags of slime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.slime import DEFAULTS
from roost.config.job import OFFLOADED_PARTS, Notation
from roost.config.notations.algorithm import NOT_WHITENED, PROMPT, shared_estimator
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import PREFILL, Parts, above_one, megatron_sizes
from roost.placement.plan import Plan, whitens

USUAL_PENALTY = 0.001  # slime's own default is 0, with which the reference would do nothing


def slime_program(plan: Plan, values: Mapping[str, Any]) -> str:
    """The script that starts the job; the asynchronous one does not share GPUs."""
    settings = plan.settings
    is_async = settings.get("async_rollouts") is True or bool(settings.get("async_generation_ratio"))
    return "train_async.py" if is_async and "--colocate" not in values else "train.py"


def to_slime(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "slime", findings, splits=True)
    if parts is None:
        return {}
    actor = parts.actor
    width = int(plan.inventory.accelerator_counts.max(initial=1))
    learners = len(actor.table.device_ranks)
    per_node = next(size for size in range(min(width, learners), 0, -1) if learners % size == 0)
    values: dict[str, Any] = {"--actor-num-nodes": learners // per_node, "--actor-num-gpus-per-node": per_node}
    if width != DEFAULTS["--num-gpus-per-node"]:
        values["--num-gpus-per-node"] = width
    values |= _engines(parts) if parts.engines else {"--debug-train-only": True}
    values |= _learner(actor, "--colocate" in values)
    if parts.path:
        values["--hf-checkpoint"] = parts.path
    values |= _lengths(parts, actor.model.sequence)
    estimator = parts.estimator(Notation.SLIME, "--advantage-estimator")
    if estimator != DEFAULTS["--advantage-estimator"]:
        values["--advantage-estimator"] = estimator
    if whitens(plan) or shared_estimator(plan.settings) in NOT_WHITENED:
        values["--normalize-advantages"] = True
    coefficient = parts.penalty("--kl-loss-coef", USUAL_PENALTY)
    if coefficient and parts.is_penalty_in_reward:
        values["--kl-coef"] = coefficient
    elif coefficient is not None and not parts.is_penalty_in_reward:
        values |= {"--use-kl-loss": True, "--kl-loss-coef": coefficient}
    return values


def _lengths(parts: Parts, sequence: int | None) -> dict[str, Any]:
    """Lengths of prompt and completion, and of both together where it is not their sum."""
    prompt, response = parts.plan.settings.get(PROMPT), parts.completion
    is_sum = prompt and response and prompt + response == sequence
    named = {"prompt": prompt, "response": response, "context": None if is_sum else sequence}
    return {f"--rollout-max-{name}-len": length for name, length in named.items() if length}


def _engines(parts: Parts) -> dict[str, Any]:
    part = parts.engines[0]
    gpus = sum(len(parts.devices(one.name)) for one in parts.engines)
    values: dict[str, Any] = {"--colocate": True} if parts.shares_actor() else {}
    if not values or gpus != len(parts.devices("actor")):
        values["--rollout-num-gpus"] = gpus
    values["--rollout-num-gpus-per-engine"] = parts.engine_size(part)
    sizes = part.parallel
    data = parts.engine_size(part) // (sizes.tensor * sizes.pipeline)
    values |= above_one(**{"--sglang-pp-size": sizes.pipeline, "--sglang-ep-size": sizes.expert})
    if data > 1 and sizes.expert == sizes.tensor * data:
        values |= {"--sglang-dp-size": data, "--sglang-enable-dp-attention": True}
    if part.name == PREFILL:
        values["--prefill-num-servers"] = part.world_size
    if part.model.memory_fraction is not None:
        values["--sglang-mem-fraction-static"] = part.model.memory_fraction
    if "--colocate" in values and not parts.engines_sleep():
        values["--no-offload-rollout"] = True
    elif "--colocate" not in values and parts.plan.settings.get("engines_sleep") is True:
        values["--offload-rollout"] = True
    return values


def _learner(actor: ComponentPlan, is_shared: bool) -> dict[str, Any]:
    """Flags of the learner, which is Megatron's in all versions of slime that are newer than March 2026."""
    model = actor.model
    named = megatron_sizes(actor.parallel)
    values: dict[str, Any] = {f"--{name.replace('_', '-')}": size for name, size in named.items()}
    if model.tokens:
        of_rank = -(-model.tokens // actor.parallel.context)
        values |= {"--use-dynamic-batch-size": True, "--max-tokens-per-gpu": of_rank}
    if model.lora_rank:
        values["--lora-rank"] = model.lora_rank
    offloads = model.offloads == OFFLOADED_PARTS
    if offloads != is_shared:
        values["--offload-train" if offloads else "--no-offload-train"] = True
    return values
