"""A plan as flags of OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.openrlhf import DEFAULTS, WHITENED
from roost.config.job import OFFLOADED_PARTS, Notation, Sharding
from roost.config.notations.algorithm import AGENT, MEAN_ALONE, REWARD, WHITEN
from roost.placement.convert.parts import Parts, known_lengths
from roost.placement.plan import Plan, uses_model

PROGRAM = "openrlhf.cli.train_ppo_ray"
REWARD_FUNCTION = "REWARD.py"  # to be replaced: a plan does not name the reward function
USUAL_PROMPT = 512  # tokens, as in verl and SkyRL
_ROLES = {"actor": "actor", "reference": "ref", "critic": "critic", "reward": "reward"}


def openrlhf_program(plan: Plan, values: Mapping[str, Any]) -> str:
    return PROGRAM


def to_openrlhf(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "OpenRLHF", findings, idles=False)
    if parts is None:
        return {}
    has_reward = "reward" in parts and uses_model(parts["reward"])
    values: dict[str, Any] = {}
    for name, role in _ROLES.items():
        if name in parts and (name != "reward" or has_reward):
            nodes, per_node = parts.pool(name)
            values |= {f"--{role}.num_nodes": nodes, f"--{role}.num_gpus_per_node": per_node}
            path = parts.path if name == "actor" else parts[name].model.path
            if path and role != "ref":
                values[f"--{role}.model_name_or_path"] = path
    values |= _engines(parts) | _sharing(parts, has_reward) | _learner(parts)
    flag, estimator = "--algo.kl.init_coef", "--algo.advantage.estimator"
    coefficient = parts.penalty(flag, float(DEFAULTS[flag])) if "reference" in parts else 0.0
    values[flag] = coefficient or 0
    if coefficient and not parts.is_penalty_in_reward:
        values["--algo.kl.use_loss"] = True
    values[estimator] = "gae" if "critic" in parts else parts.estimator(Notation.OPENRLHF, estimator)
    if plan.settings.get(WHITEN) == MEAN_ALONE and values[estimator] in WHITENED:
        values["--algo.advantage.no_std_norm"] = True
    if AGENT in plan.settings:
        values["--train.agent_func_path"] = plan.settings[AGENT]
    if not has_reward and (REWARD in plan.settings or AGENT not in plan.settings):
        values["--reward.remote_url"] = plan.settings.get(REWARD) or parts.assume(
            "--reward.remote_url", REWARD_FUNCTION, "OpenRLHF needs a reward model, a URL or a file with a function"
        )
    return values


def _engines(parts: Parts) -> dict[str, Any]:
    if "rollout" not in parts:
        return {}
    part = parts["rollout"]
    values: dict[str, Any] = {
        "--vllm.num_engines": part.world_size,
        "--vllm.tensor_parallel_size": parts.engine_size(part),
    }
    if part.model.memory_fraction is not None:
        values["--vllm.gpu_memory_utilization"] = part.model.memory_fraction
    return values


def _sharing(parts: Parts, has_reward: bool) -> dict[str, Any]:
    """Which roles share GPUs, and whether engines generate while the actor learns."""
    values: dict[str, Any] = {}
    others = [name for name in ("reference", "critic", *(["reward"] if has_reward else [])) if name in parts]
    on_actor = [name for name in others if parts.share("actor", name)]
    is_shared = parts.shares_actor()
    if is_shared or {"critic", "reward"} & set(on_actor):
        values["--train.colocate_all"] = True
        if is_shared and parts.engines_sleep():
            values["--vllm.enable_sleep"] = True
    elif "reference" in on_actor:
        values["--train.colocate_actor_ref"] = True
    if has_reward and "critic" in parts and parts.share("critic", "reward") and "critic" not in on_actor:
        values["--train.colocate_critic_reward"] = True
    if not is_shared and "rollout" in parts and (parts.is_async or "--train.colocate_all" in values):
        values["--train.async_enable"] = True
        if parts.staleness > 1:
            values["--train.async_queue_size"] = parts.staleness
    return values


def _learner(parts: Parts) -> dict[str, Any]:
    model, sizes = parts.actor.model, parts.actor.parallel
    values: dict[str, Any] = {"--ds.zero_stage": 3 if model.sharding is Sharding.FULL else 2}
    if sizes.tensor > 1:
        values["--ds.tensor_parallel_size"] = sizes.tensor
    if sizes.context > 1:
        values["--ds.ring_attn_size"] = sizes.context
    if model.lora_rank:
        values["--ds.lora.rank"] = model.lora_rank
    prompt, response, sequence = known_lengths(parts.plan, model.sequence)
    if response and not sequence:
        why = "OpenRLHF limits a prompt and its completion together, and the job says that of a completion alone"
        sequence = prompt + response if prompt else int(parts.assume("--data.max_len", response + USUAL_PROMPT, why))
    if sequence:
        values["--data.max_len"] = sequence
        values |= {"--rollout.max_new_tokens": response} if response else {}
    if tokens := (model.tokens or 0) // (sizes.tensor * sizes.context):
        values |= {"--train.dynamic_batch_enable": True, "--train.max_tokens_per_gpu": tokens}
    if model.recomputes:
        values["--actor.gradient_checkpointing_enable"] = True
    if model.offloads == OFFLOADED_PARTS:
        values["--ds.enable_sleep"] = True
    if model.optimizer_on_host or model.offloads == ("optimizer",):
        values["--ds.adam_offload"] = True
    for name in ("actor", "critic"):
        if name in parts and parts[name].model.optimizer == "muon":
            values[f"--{name}.optim"] = "muon"
    return values
