"""A plan as Hydra overrides of verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roost.config.data import TEACHER, is_teacher
from roost.config.findings import Findings
from roost.config.frameworks.verl import DEFAULTS
from roost.config.job import EXPERT_TENSOR, Notation, Role
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import Parts, above_one, given, megatron_sizes
from roost.placement.plan import Plan, learner_backend

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
    estimator, _, also = parts.estimator(Notation.VERL, "algorithm.adv_estimator").partition(" with ")
    nodes, per_node = parts.pool("actor")
    values: dict[str, Any] = {
        "trainer": {"nnodes": nodes, "n_gpus_per_node": per_node},
        "algorithm": {"adv_estimator": estimator},
        "critic": {"enable": "critic" in parts},
        "actor_rollout_ref": {
            "model": given(path=parts.path, lora_rank=actor.model.lora_rank)
            | ({} if actor.model.recomputes else {"enable_gradient_checkpointing": False}),
            "actor": _learner(actor, plan.notation),
            "rollout": _engine(rollout, parts),
        },
    }
    if also:
        values["actor_rollout_ref"]["actor"]["policy_loss"] = {"loss_mode": "gspo"}
    _penalty(values, parts)
    lengths = parts.lengths("data.max_prompt_length", int(DEFAULTS["data.max_prompt_length"]))
    if lengths is not None:
        values["data"] = dict(zip(("max_prompt_length", "max_response_length"), lengths, strict=True))
    if "critic" in parts:
        critic = parts["critic"]
        values["critic"] |= _learner(critic, plan.notation, "fsdp", actor.model.offloads)
        values["critic"] |= given(model=given(path=critic.model.path, lora_rank=critic.model.lora_rank))
        if not critic.model.recomputes:
            values["critic"].setdefault("model", {})["enable_gradient_checkpointing"] = False
    if "reference" in parts and parts["reference"].parallel != actor.parallel:
        values["actor_rollout_ref"]["ref"] = _reference_sizes(parts["reference"])
    _own_engines(values, parts)
    if "reward" in parts and parts["reward"].role is Role.ENGINE:
        values["reward"] = {"reward_model": _reward(parts)}
    teachers = [part for part in parts if is_teacher(part.name)]
    if teachers:
        values["distillation"] = _teachers(teachers, parts)
    return _config_of(actor, values) | values


def _config_of(actor: ComponentPlan, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that choose the config of a backend other than FSDP; without them Hydra refuses the backend's keys."""
    word = learner_backend(actor, _BACKENDS)
    if word == "fsdp":
        return {}
    if word == "megatron" and "async_training" in values:
        return {"--config-name": "fully_async_ppo_megatron_trainer.yaml"}
    return {"model_engine": word}


def _penalty(values: dict[str, Any], parts: Parts) -> None:
    """KL in the loss or in the rewards, either of which starts a reference."""
    actor = values["actor_rollout_ref"]["actor"]
    key = "actor_rollout_ref.actor.kl_loss_coef"
    coefficient = parts.penalty(key, float(DEFAULTS[key]))
    if coefficient is not None and parts.is_penalty_in_reward:
        values["algorithm"] |= {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": coefficient}}
    actor["use_kl_loss"] = coefficient is not None and not parts.is_penalty_in_reward
    if actor["use_kl_loss"]:
        actor["kl_loss_coef"] = coefficient


def _learner(
    part: ComponentPlan, notation: Notation, engine: str = "fsdp_config", others: Sequence[str] = ()
) -> dict[str, Any]:
    """The section of a learner. `engine` is its key for FSDP; offloads that only `others` has are written as false."""
    sizes, model = part.parallel, part.model
    word = learner_backend(part, _BACKENDS)
    is_megatron = word == "megatron"
    section: dict[str, Any] = {"strategy": model.strategy if notation is Notation.VERL else word}
    names = [name for name in _OFFLOADS if name in (*model.offloads, *others) and (is_megatron or name != "grad")]
    offloads = {_OFFLOADS[name]: name in model.offloads for name in names}
    if is_megatron:
        section["megatron"] = megatron_sizes(sizes) | offloads
    else:
        section |= {"ulysses_sequence_parallel_size": sizes.context} if sizes.context > 1 else {}
        state = offloads | ({"fsdp_size": sizes.shard} if sizes.shard else {})
        section |= {engine: state} if state else {}
    per_gpu = model.tokens // sizes.context if model.tokens else None
    return section | ({"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": per_gpu} if per_gpu else {})


def _reference_sizes(part: ComponentPlan) -> dict[str, Any]:
    """Sizes of a reference that are not the actor's; verl takes the actor's where none are written."""
    sizes = part.parallel
    if learner_backend(part, _BACKENDS) == "megatron":
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        values = (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert)
        written = {f"{name}_parallel_size": value for name, value in zip(names, values, strict=True)}
        of_experts = {} if sizes.expert_tensor is None else {EXPERT_TENSOR: sizes.expert_tensor}
        return {"megatron": written | of_experts}
    return {"ulysses_sequence_parallel_size": sizes.context, "fsdp_config": {"fsdp_size": sizes.shard or -1}}


def _engine(part: ComponentPlan, parts: Parts) -> dict[str, Any]:
    tensor, pipeline = part.parallel.tensor, part.parallel.pipeline
    data = parts.engine_size(part) // (tensor * pipeline)
    section = given(name=parts.engine(part, _ENGINES)) | {"tensor_model_parallel_size": tensor}
    section |= above_one(pipeline_model_parallel_size=pipeline, data_parallel_size=data)
    if part.parallel.expert == tensor * data:  # the only one that verl takes
        section |= above_one(expert_parallel_size=part.parallel.expert)
    section |= given(gpu_memory_utilization=part.model.memory_fraction)
    stays = parts.shares_actor() and not parts.engines_sleep()
    return section | {"free_cache_engine": False} if stays else section


def _own_engines(values: dict[str, Any], parts: Parts) -> None:
    """Write engines on GPUs of their own, which only asynchronous trainers have."""
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
        values["async_training"] = {
            "use_dynamic_resource_scheduling": False,
            "staleness_threshold": ahead,
            "trigger_parameter_sync_step": 1,
        }


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
