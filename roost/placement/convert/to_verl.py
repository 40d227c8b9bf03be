"""A plan as Hydra overrides of verl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roost.config.findings import Findings
from roost.config.job import Notation, Role
from roost.config.teacher import TEACHER, is_teacher
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.models import backend, has_devices, learner_backend, refuse_without, size_of_all
from roost.placement.plan import Plan

_BACKENDS = ("fsdp", "megatron", "veomni", "torchtitan")
_OFFLOADS = {"weight": "param_offload", "grad": "grad_offload", "optimizer": "optimizer_offload"}


def verl_program(plan: Plan, values: Mapping[str, Any]) -> str:
    """The module that starts the job."""
    if "async_training" in values:
        return "verl.experimental.fully_async_policy.fully_async_main"
    return "verl.trainer.main_ppo"


def to_verl(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = {part.name: part for part in plan.components if has_devices(part)}
    if not refuse_without(parts, ("actor", "rollout"), findings):
        return {}
    actor, rollout = parts["actor"], parts["rollout"]
    nodes, per_node = _pool(actor.table.device_numbers.tolist(), plan)
    values: dict[str, Any] = {
        "trainer": {"nnodes": nodes, "n_gpus_per_node": per_node},
        "algorithm": {"adv_estimator": "gae" if "critic" in parts else "grpo"},
        "critic": {"enable": "critic" in parts},
        "actor_rollout_ref": {
            "model": _model(actor, rollout),
            "actor": _learner(actor, plan.notation) | {"use_kl_loss": "reference" in parts},
            "rollout": _engine(rollout, plan, findings),
        },
    }
    if "critic" in parts and parts["critic"].model.path:
        values["critic"]["model"] = {"path": parts["critic"].model.path}
    _own_engines(values, actor, rollout, plan)
    if "reward" in parts and parts["reward"].role is Role.ENGINE:
        values["reward"] = {"reward_model": _reward(parts["reward"], actor, plan, findings)}
    teachers = [part for name, part in parts.items() if is_teacher(name)]
    if teachers:
        values["distillation"] = _teachers(teachers, plan)
    return values


def _pool(devices: list[int], plan: Plan) -> tuple[int, int]:
    """Nodes and GPUs on each that a pool of these devices has."""
    nodes = np.searchsorted(plan.inventory.first_accelerators, devices, side="right")
    count = len(np.unique(nodes))
    return count, len(set(devices)) // count


def _model(actor: ComponentPlan, rollout: ComponentPlan) -> dict[str, Any]:
    path, rank = actor.model.path or rollout.model.path, actor.model.lora_rank
    return ({"path": path} if path else {}) | ({"lora_rank": rank} if rank else {})


def _learner(actor: ComponentPlan, notation: Notation) -> dict[str, Any]:
    sizes, model = actor.parallel, actor.model
    word = learner_backend(actor, _BACKENDS)
    is_megatron = word == "megatron"
    section: dict[str, Any] = {"strategy": model.strategy if notation is Notation.VERL else word}
    offloads = {_OFFLOADS[name]: True for name in model.offloads if is_megatron or name != "grad"}
    if is_megatron:
        named = {
            "tensor_model_parallel_size": sizes.tensor,
            "pipeline_model_parallel_size": sizes.pipeline,
            "context_parallel_size": sizes.context,
            "expert_model_parallel_size": sizes.expert,
        }
        section["megatron"] = {key: size for key, size in named.items() if size > 1} | offloads
    else:
        section |= {"ulysses_sequence_parallel_size": sizes.context} if sizes.context > 1 else {}
        section |= {"fsdp_config": offloads} if offloads else {}
    return section | ({"ppo_max_token_len_per_gpu": model.tokens} if model.tokens else {})


def _engine(part: ComponentPlan, plan: Plan, findings: Findings) -> dict[str, Any]:
    size = size_of_all(part, "verl", findings)
    tensor, pipeline = part.parallel.tensor, part.parallel.pipeline
    data = size // (tensor * pipeline)
    named = {
        "tensor_model_parallel_size": tensor,
        **({"pipeline_model_parallel_size": pipeline} if pipeline > 1 else {}),
        **({"data_parallel_size": data} if data > 1 else {}),
    }
    word = backend(part, plan.notation)
    section: dict[str, Any] = {"name": word} if word is not None else {}
    section |= named
    if part.model.memory_fraction is not None:
        section["gpu_memory_utilization"] = part.model.memory_fraction
    if plan.settings.get("engines_sleep") is False or not part.model.can_sleep:
        section["free_cache_engine"] = False
    return section


def _own_engines(values: dict[str, Any], actor: ComponentPlan, rollout: ComponentPlan, plan: Plan) -> None:
    """Engines beside the trainer's nodes, which only asynchronous trainers have."""
    shared = set(actor.table.device_numbers.tolist())
    devices = rollout.table.device_numbers.tolist()
    own = [device for device in devices if device not in shared]
    if not own:
        return
    nodes, per_node = _pool(own, plan)
    pool = {"nnodes": nodes, "n_gpus_per_node": per_node}
    if len(own) < len(devices):
        values["trainer"]["v1"] = {"trainer_mode": "separate_async"}
        values["actor_rollout_ref"]["rollout"] |= pool
    else:
        values["rollout"] = pool
        values["async_training"] = {"use_dynamic_resource_scheduling": False}


def _reward(part: ComponentPlan, actor: ComponentPlan, plan: Plan, findings: Findings) -> dict[str, Any]:
    section: dict[str, Any] = {"enable": True}
    devices = part.table.device_numbers.tolist()
    if not set(devices) & set(actor.table.device_numbers.tolist()):
        nodes, per_node = _pool(devices, plan)
        section |= {"enable_resource_pool": True, "nnodes": nodes, "n_gpus_per_node": per_node}
    section |= {"model_path": part.model.path} if part.model.path else {}
    engine = _engine(part, plan, findings)
    return section | {"rollout": {key: value for key, value in engine.items() if key != "name"}}


def _teachers(teachers: list[ComponentPlan], plan: Plan) -> dict[str, Any]:
    nodes, per_node = _pool([number for part in teachers for number in part.table.device_numbers.tolist()], plan)
    models = {}
    for part in teachers:
        name = part.name.removeprefix(f"{TEACHER}.")
        size = len(part.table.device_ranks) // part.world_size
        inference = {"tensor_model_parallel_size": size}
        models[name] = {"num_replicas": part.world_size, "inference": inference} | (
            {"model_path": part.model.path} if part.model.path else {}
        )
    return {"enabled": True, "nnodes": nodes, "n_gpus_per_node": per_node, "teacher_models": models}
