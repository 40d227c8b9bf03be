"""A plan as flags of slime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.slime import DEFAULTS
from roost.config.model_files import OFFLOADED_PARTS
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.models import has_devices, learner_backend, refuse_without, size_of_all
from roost.placement.plan import Plan


def slime_program(plan: Plan, values: Mapping[str, Any]) -> str:
    """The script that starts the job; the asynchronous one does not share GPUs."""
    settings = plan.settings
    is_async = settings.get("async_rollouts") is True or bool(settings.get("async_generation_ratio"))
    return "train_async.py" if is_async and "--colocate" not in values else "train.py"


def to_slime(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = {part.name: part for part in plan.components if has_devices(part)}
    if not refuse_without(parts, ("actor",), findings):
        return {}
    actor = parts["actor"]
    width = int(plan.inventory.accelerator_counts.max(initial=1))
    learners = len(actor.table.device_ranks)
    per_node = next(size for size in range(min(width, learners), 0, -1) if learners % size == 0)
    values: dict[str, Any] = {"--actor-num-nodes": learners // per_node, "--actor-num-gpus-per-node": per_node}
    if width != DEFAULTS["--num-gpus-per-node"]:
        values["--num-gpus-per-node"] = width
    if "rollout" in parts:
        values |= _engines(parts["rollout"], actor, plan, findings)
    else:
        values["--debug-train-only"] = True
    values |= _learner(actor, "--colocate" in values)
    path = actor.model.path or (parts["rollout"].model.path if "rollout" in parts else None)
    if path:
        values["--hf-checkpoint"] = path
    if "critic" in parts:
        values["--advantage-estimator"] = "ppo"
    if "reference" in parts:
        values["--use-kl-loss"] = True
    return values


def _engines(part: ComponentPlan, actor: ComponentPlan, plan: Plan, findings: Findings) -> dict[str, Any]:
    shared = set(actor.table.device_numbers.tolist())
    devices = part.table.device_numbers.tolist()
    values: dict[str, Any] = {"--colocate": True} if shared & set(devices) else {}
    if not values or len(devices) != len(shared):
        values["--rollout-num-gpus"] = len(devices)
    values["--rollout-num-gpus-per-engine"] = size_of_all(part, "slime", findings)
    if part.model.memory_fraction is not None:
        values["--sglang-mem-fraction-static"] = part.model.memory_fraction
    sleeps = plan.settings.get("engines_sleep")
    if "--colocate" in values and (sleeps is False or not part.model.can_sleep):
        values["--no-offload-rollout"] = True
    elif "--colocate" not in values and sleeps is True:
        values["--offload-rollout"] = True
    return values


def _learner(actor: ComponentPlan, is_shared: bool) -> dict[str, Any]:
    model, sizes = actor.model, actor.parallel
    named = {
        "--tensor-model-parallel-size": sizes.tensor,
        "--pipeline-model-parallel-size": sizes.pipeline,
        "--context-parallel-size": sizes.context,
        "--expert-model-parallel-size": sizes.expert,
    }
    values: dict[str, Any] = {key: size for key, size in named.items() if size > 1}
    if learner_backend(actor) != "megatron":
        values["--train-backend"] = "fsdp"
    if model.tokens:
        values["--max-tokens-per-gpu"] = model.tokens
    if model.lora_rank:
        values["--lora-rank"] = model.lora_rank
    offloads = model.offloads == OFFLOADED_PARTS
    if offloads != is_shared:
        values["--offload-train" if offloads else "--no-offload-train"] = True
    return values
