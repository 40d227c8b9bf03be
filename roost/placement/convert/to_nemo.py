"""A plan as a config of NeMo-RL."""

from __future__ import annotations

from typing import Any

from roost.config.data import TEACHER, is_teacher
from roost.config.findings import Findings, Where
from roost.config.job import Notation
from roost.config.notations.algorithm import ESTIMATOR, PROMPT, RESPONSE
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import Parts, above_one, given, megatron_sizes
from roost.placement.plan import Plan, learner_backend, uses_model, whitens

USUAL_PENALTY = 0.01
_WHY_BASE = "NeMo-RL has no defaults outside its config files"
# Configs of NeMo-RL with the keys that are not about placement.
_BASES = {
    "ppo": "examples/configs/ppo_math_1B.yaml",
    "grpo": "examples/configs/grpo_math_1B.yaml",
    "distillation": "examples/configs/distillation_math.yaml",
    "sft": "examples/configs/sft.yaml",
}
_FIX_BASE = "add `defaults:` with the path of that file, or of another"
_ENGINES = ("vllm", "sglang", "megatron", "trtllm", "dynamo")


def to_nemo(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "NeMo-RL", findings, idles=False)
    if parts is None:
        return {}
    policy = _model(parts.actor) | given(model_name=parts.path)
    values: dict[str, Any] = {"cluster": {"num_nodes": parts.nodes, "gpus_per_node": parts.width}, "policy": policy}
    if "rollout" in parts:
        policy["generation"] = _generation(parts["rollout"], parts)
        is_async = parts.is_async and not parts.shares_actor()
        name = _algorithm(parts)
        is_said = plan.notation is not Notation.NEMO or ESTIMATOR in plan.settings  # else its base file says it
        if name != "distillation" and (is_said or is_async):
            ahead = {"enabled": True, "max_trajectory_age_steps": parts.staleness} if is_async else {"enabled": False}
            values[name] = {f"async_{name}": ahead}
            estimator = parts.estimator(Notation.NEMO, f"{name}.adv_estimator.name")
            if estimator == "gae":
                values[name]["adv_estimator"] = {"normalize_advantages": whitens(plan)}
            elif estimator != "grpo":
                values[name]["adv_estimator"] = {"name": estimator}
        key = "loss_fn.reference_policy_kl_penalty"
        values["loss_fn"] = {"reference_policy_kl_penalty": parts.penalty(key, USUAL_PENALTY) or 0.0}
    else:
        name = "sft"
        values[name] = {}
    values |= given(data=given(max_input_seq_length=plan.settings.get(PROMPT)))
    if "critic" in parts:
        values["value"] = _model(parts["critic"])
    if "reward" in parts and uses_model(parts["reward"]):
        nodes, gpus = parts.pool("reward")
        resources = {"num_nodes": nodes, "gpus_per_node": gpus}
        values["data"] = values.get("data", {}) | {"default": {"env_name": "reward_model"}}
        values["env"] = {"reward_model": _model(parts["reward"]) | {"resources": resources}}
    findings.note(
        "RST-N084", Where(path=("defaults",)), f"not in the source; put this over {_BASES[name]}", _WHY_BASE, _FIX_BASE
    )
    return values | _teachers(parts)


def _algorithm(parts: Parts) -> str:
    """The section of the algorithm; plain distillation has no rewards, and so no advantages."""
    if "critic" in parts:
        return "ppo"
    is_distilled = ESTIMATOR not in parts.plan.settings and any(is_teacher(part.name) for part in parts)
    return "distillation" if is_distilled and not parts.is_async else "grpo"


def _model(part: ComponentPlan) -> dict[str, Any]:
    """The model of a component with one process per GPU, and how it is split."""
    model, sizes = part.model, part.parallel
    is_megatron = learner_backend(part) == "megatron"
    adapter = {"enabled": True, "dim": model.lora_rank} if model.lora_rank else None
    common = {"enabled": True} | ({"activation_checkpointing": True} if model.recomputes else {})
    if is_megatron:
        section = {"megatron_cfg": common | megatron_sizes(sizes) | given(peft=adapter)}
    else:
        named = above_one(
            tensor_parallel_size=sizes.tensor,
            context_parallel_size=sizes.context,
            expert_parallel_size=sizes.expert,
        )
        section = {"dtensor_cfg": common | named | given(lora_cfg=adapter)}
    is_packed = model.tokens is not None and model.tokens != model.sequence
    packing = {"enabled": True, "train_mb_tokens": model.tokens} if is_packed else None
    named_model = given(model_name=model.path, max_total_sequence_length=model.sequence)
    return named_model | section | given(sequence_packing=packing)


def _generation(part: ComponentPlan, parts: Parts) -> dict[str, Any]:
    word, size = parts.backend(part, _ENGINES), parts.engine_size(part)
    fraction = part.model.memory_fraction
    if word == "sglang":
        engine = {"sglang_cfg": {"gpus_per_server": size} | given(mem_fraction_static=fraction)}
    elif word == "megatron":
        engine = {}  # split as the learner is
    else:
        sizes = {
            "tensor_parallel_size": part.parallel.tensor,
            **above_one(pipeline_parallel_size=part.parallel.pipeline, expert_parallel_size=part.parallel.expert),
        }
        key = "trtllm_cfg" if word == "trtllm" else "vllm_cfg"
        engine = {key: sizes | given(gpu_memory_utilization=fraction)}
    shared: dict[str, Any] = {"enabled": parts.shares_actor()}
    if not parts.shares_actor():
        nodes, gpus = parts.pool(part.name)
        shared["resources"] = {"num_nodes": nodes, "gpus_per_node": gpus}
    limit = given(max_new_tokens=parts.plan.settings.get(RESPONSE))
    return {"backend": word, "colocated": shared} | limit | engine


def _teachers(parts: Parts) -> dict[str, Any]:
    """Teachers on the learner's GPUs, or on nodes of their own."""
    teachers = [part for part in parts if is_teacher(part.name)]
    if not teachers:
        return {}
    if all(parts.share("actor", part.name) for part in teachers):
        models = [_model(part) for part in teachers]
        return {"teacher": models[0]} if len(models) == 1 else {"teachers": models}
    names = {part.name.removeprefix(f"{TEACHER}."): part for part in teachers}
    own = {}
    for name, part in names.items():
        nodes, gpus = parts.pool(part.name)
        own[name] = {"num_nodes": nodes, "gpus_per_node": gpus} | megatron_sizes(part.parallel)
    return {
        "on_policy_distillation": {
            "enabled": True,
            "teacher_model_by_agent_name": {
                name: part.model.path
                or parts.assume(f"teacher_model_by_agent_name.{name}", name, "NeMo-RL starts a teacher by its model")
                for name, part in names.items()
            },
            "non_colocated_teachers": {"enabled": True, "teacher_overrides": own},
        }
    }
