"""A plan as keys of SkyRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.skyrl import DEFAULTS
from roost.config.job import Notation
from roost.config.notations.algorithm import ESTIMATOR
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import PREFILL, Parts, above_one, given, megatron_sizes
from roost.placement.plan import Plan, learner_backend, whitens

_ROLES = {"actor": "policy", "reference": "ref", "critic": "critic"}


def skyrl_program(plan: Plan, values: Mapping[str, Any]) -> str:
    """The module that starts the job; asynchronous jobs have one of SkyRL's examples."""
    if "trainer" not in values:
        return "skyrl.train.main_sft"
    if "fully_async" in values["trainer"]:
        return "examples.train.fully_async.main_fully_async"
    return "skyrl.train.entrypoints.main_base"


def to_skyrl(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "SkyRL", findings, splits=True)
    if parts is None:
        return {}
    if not parts.engines and not {ESTIMATOR, "reference", "critic"} & {*plan.settings, *parts.by_name}:
        return _supervised(parts)
    is_shared = parts.shares_actor()
    placement: dict[str, Any] = {"colocate_all": is_shared}
    if not is_shared and "reference" in parts:
        placement["colocate_policy_ref"] = parts.share("actor", "reference")
    for name, role in _ROLES.items():
        if name in parts:
            nodes, per_node = parts.pool(name)
            placement |= {f"{role}_num_nodes": nodes, f"{role}_num_gpus_per_node": per_node}
    trainer = {"placement": placement, "algorithm": _algorithm(parts)} | _learner(parts)
    if "critic" in parts:
        key, usual = "trainer.critic.model.path", DEFAULTS["trainer.policy.model.path"]
        path = parts["critic"].model.path or parts.path
        trainer["critic"] = {"model": {"path": path or parts.assume(key, usual, "SkyRL starts a critic by its model")}}
        trainer["critic"] |= _sizes(parts["critic"])
    if "reference" in parts:
        trainer |= given(ref=_sizes(parts["reference"]))
    if parts.is_async and not is_shared:
        trainer["fully_async"] = {"enabled": True, "max_staleness_steps": parts.staleness}
    generator: dict[str, Any] = {"inference_engine": _engines(parts)}
    lengths = parts.lengths("trainer.max_prompt_length", int(DEFAULTS["trainer.max_prompt_length"]))
    if lengths is not None:
        trainer["max_prompt_length"], length = lengths
        generator["sampling_params"] = {"max_generate_length": length}
    return {"trainer": trainer, "generator": generator}


def _algorithm(parts: Parts) -> dict[str, Any]:
    """KL, and the estimator where it is not the usual one."""
    key = "trainer.algorithm.kl_loss_coef"
    coefficient = parts.penalty(key, float(DEFAULTS[key])) if "reference" in parts else None
    section: dict[str, Any] = {"use_kl_loss": coefficient is not None and not parts.is_penalty_in_reward}
    if coefficient is not None:
        section |= {"use_kl_in_reward": True} if parts.is_penalty_in_reward else {}
        section["kl_loss_coef"] = coefficient
    estimator = parts.estimator(Notation.SKYRL, "trainer.algorithm.advantage_estimator")
    section |= {"advantage_estimator": estimator} if estimator != "grpo" else {}
    does_itself = estimator in ("gae", "reinforce++")
    return section | ({"advantage_batch_normalize": True} if whitens(parts.plan) and not does_itself else {})


def _supervised(parts: Parts) -> dict[str, Any]:
    """A learner alone: supervised fine-tuning."""
    nodes, per_node = parts.pool("actor")
    model = parts.actor.model
    section = given(path=parts.path, lora={"rank": model.lora_rank} if model.lora_rank else None)
    placement = {"num_nodes": nodes, "num_gpus_per_node": per_node}
    return {"placement": placement, "strategy": learner_backend(parts.actor)} | given(model=section)


def _learner(parts: Parts) -> dict[str, Any]:
    model = parts.actor.model
    strategy = learner_backend(parts.actor)
    word = model.strategy if parts.plan.notation is Notation.SKYRL and model.strategy else strategy  # fsdp2 among them
    policy = {"model": given(path=parts.path, lora={"rank": model.lora_rank} if model.lora_rank else None)}
    policy |= _sizes(parts.actor)
    section = {"strategy": word, "policy": policy} | given(max_tokens_per_microbatch=model.tokens)
    return section if model.recomputes else section | {"gradient_checkpointing": False}


def _sizes(part: ComponentPlan) -> dict[str, Any]:
    """Parallel sizes of one model; SkyRL's default is 1."""
    if learner_backend(part) == "megatron":
        return given(megatron_config=megatron_sizes(part.parallel))
    return above_one(sequence_parallel_size=part.parallel.context)


def _engines(parts: Parts) -> dict[str, Any]:
    if not parts.engines:
        return {"run_engines_locally": False}
    part = parts.engines[0]
    sizes = part.parallel
    data = parts.engine_size(part) // (sizes.tensor * sizes.pipeline)
    section: dict[str, Any] = {"num_engines": sum(one.world_size for one in parts.engines)}
    section |= {"tensor_parallel_size": sizes.tensor}
    section |= above_one(pipeline_parallel_size=sizes.pipeline, data_parallel_size=data)
    if sizes.expert == sizes.tensor * data:  # the only one that SkyRL takes
        section |= above_one(expert_parallel_size=sizes.expert)
    section |= {"backend": parts.backend(part, ("vllm", "sglang"))}
    section |= given(gpu_memory_utilization=part.model.memory_fraction)
    return section | ({"enable_pd": True, "num_prefill": part.world_size} if part.name == PREFILL else {})
