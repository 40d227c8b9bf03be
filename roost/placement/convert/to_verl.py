"""A plan as Hydra overrides of verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.verl import DEFAULTS
from roost.config.job import Notation, Role
from roost.config.teacher import TEACHER, is_teacher
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import Parts, above_one, given, megatron_sizes
from roost.placement.models import learner_backend
from roost.placement.plan import Plan

_BACKENDS = ("fsdp", "megatron", "veomni", "torchtitan")
_ENGINES = ("vllm", "sglang", "hf", "trtllm")
_OFFLOADS = {"weight": "param_offload", "grad": "grad_offload", "optimizer": "optimizer_offload"}


def verl_program(plan: Plan, values: Mapping[str, Any]) -> str:
    """The module that starts the job."""
    if "async_training" in values:
        return "verl.experimental.fully_async_policy.fully_async_main"
    return "verl.trainer.main_ppo"


def to_verl(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "verl", findings, ("actor", "rollout"))
    if parts is None:
        return {}
    actor, rollout = parts["actor"], parts["rollout"]
    nodes, per_node = parts.pool("actor")
    values: dict[str, Any] = {
        "trainer": {"nnodes": nodes, "n_gpus_per_node": per_node},
        "algorithm": {"adv_estimator": parts.estimator(Notation.VERL, "algorithm.adv_estimator")},
        "critic": {"enable": "critic" in parts},
        "actor_rollout_ref": {
            "model": given(path=parts.path, lora_rank=actor.model.lora_rank)
            | ({} if actor.model.recomputes else {"enable_gradient_checkpointing": False}),
            "actor": _learner(actor, plan.notation),
            "rollout": _engine(rollout, parts),
        },
    }
    _penalty(values, parts)
    lengths = parts.lengths("data.max_prompt_length", int(DEFAULTS["data.max_prompt_length"]))
    if lengths is not None:
        values["data"] = dict(zip(("max_prompt_length", "max_response_length"), lengths, strict=True))
    if "critic" in parts and parts["critic"].model.path:
        values["critic"]["model"] = {"path": parts["critic"].model.path}
    _own_engines(values, parts)
    if "reward" in parts and parts["reward"].role is Role.ENGINE:
        values["reward"] = {"reward_model": _reward(parts)}
    teachers = [part for part in parts if is_teacher(part.name)]
    if teachers:
        values["distillation"] = _teachers(teachers, parts)
    return values


def _penalty(values: dict[str, Any], parts: Parts) -> None:
    """KL in the loss or in the rewards, either of which starts a reference."""
    actor = values["actor_rollout_ref"]["actor"]
    key = "actor_rollout_ref.actor.kl_loss_coef"
    coefficient = parts.penalty(key, float(DEFAULTS[key]))
    if coefficient and parts.is_penalty_in_reward:
        values["algorithm"] |= {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": coefficient}}
    actor["use_kl_loss"] = bool(coefficient) and not parts.is_penalty_in_reward
    if actor["use_kl_loss"]:
        actor["kl_loss_coef"] = coefficient


def _learner(actor: ComponentPlan, notation: Notation) -> dict[str, Any]:
    sizes, model = actor.parallel, actor.model
    word = learner_backend(actor, _BACKENDS)
    is_megatron = word == "megatron"
    section: dict[str, Any] = {"strategy": model.strategy if notation is Notation.VERL else word}
    offloads = {_OFFLOADS[name]: True for name in model.offloads if is_megatron or name != "grad"}
    if is_megatron:
        section["megatron"] = megatron_sizes(sizes) | offloads
    else:
        section |= {"ulysses_sequence_parallel_size": sizes.context} if sizes.context > 1 else {}
        state = offloads | ({"fsdp_size": sizes.shard} if sizes.shard else {})
        section |= {"fsdp_config": state} if state else {}
    tokens = model.tokens // (1 if is_megatron else sizes.context) if model.tokens else None
    return section | ({"ppo_max_token_len_per_gpu": tokens} if tokens else {})


def _engine(part: ComponentPlan, parts: Parts) -> dict[str, Any]:
    tensor, pipeline = part.parallel.tensor, part.parallel.pipeline
    data = parts.engine_size(part) // (tensor * pipeline)
    section = given(name=parts.engine(part, _ENGINES)) | {"tensor_model_parallel_size": tensor}
    section |= above_one(pipeline_model_parallel_size=pipeline, data_parallel_size=data)
    section |= given(gpu_memory_utilization=part.model.memory_fraction)
    return section if parts.engines_sleep() else section | {"free_cache_engine": False}


def _own_engines(values: dict[str, Any], parts: Parts) -> None:
    """Engines beside the trainer's nodes, which only asynchronous trainers have."""
    shared, devices = set(parts.devices("actor")), parts.devices("rollout")
    own = [device for device in devices if device not in shared]
    if not own:
        return
    nodes, per_node = parts.pool_of(own)
    pool = {"nnodes": nodes, "n_gpus_per_node": per_node}
    if len(own) < len(devices):
        values["trainer"]["v1"] = {"trainer_mode": "separate_async"}
        values["actor_rollout_ref"]["rollout"] |= pool
    else:
        values["rollout"] = pool
        ratio = parts.plan.settings.get("async_generation_ratio")
        ahead = ratio if isinstance(ratio, int | float) else int(parts.is_async)
        values["async_training"] = {"use_dynamic_resource_scheduling": False, "staleness_threshold": ahead}


def _reward(parts: Parts) -> dict[str, Any]:
    section: dict[str, Any] = {"enable": True}
    if not parts.share("actor", "reward"):
        nodes, per_node = parts.pool("reward")
        section |= {"enable_resource_pool": True, "nnodes": nodes, "n_gpus_per_node": per_node}
    engine = _engine(parts["reward"], parts)
    engine.pop("name", None)
    return section | given(model_path=parts["reward"].model.path) | {"rollout": engine}


def _teachers(teachers: list[ComponentPlan], parts: Parts) -> dict[str, Any]:
    nodes, per_node = parts.pool(*(part.name for part in teachers))
    models = {}
    for part in teachers:
        size = len(part.table.device_ranks) // part.world_size
        section = {"num_replicas": part.world_size, "inference": {"tensor_model_parallel_size": size}}
        models[part.name.removeprefix(f"{TEACHER}.")] = section | given(model_path=part.model.path)
    return {"enabled": True, "nnodes": nodes, "n_gpus_per_node": per_node, "teacher_models": models}
