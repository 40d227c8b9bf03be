"""A plan as a config of AReaL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roost.config.data import TEACHER
from roost.config.findings import Findings
from roost.config.frameworks.allocation import ENGINES, LEARNERS
from roost.config.frameworks.areal import DEFAULTS
from roost.config.job import OFFLOADED_PARTS, Notation
from roost.config.notations.algorithm import (
    BASELINE,
    ESTIMATOR,
    LEAVES_OUT,
    NORMALISED,
    PROMPT,
    STD,
    WEIGHT_UPDATE,
    WHITEN,
)
from roost.config.train_choices import RewardScope
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import Parts, given
from roost.placement.plan import Plan, learner_backend, whitens

# Scopes of the mean that estimators subtract before they whiten all tokens.
_WHITENED = {"reinforce_plus_plus": RewardScope.NONE, "reinforce_plus_plus_baseline": RewardScope.GROUP}
_WITH_ACTOR = {"type": "colocation", "target": "actor"}


def to_areal(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "AReaL", findings, ("actor", "rollout"), idles=False)
    if parts is None:
        return {}
    is_shared = parts.shares_actor()
    coefficient = parts.penalty("actor.kl_ctl", float(DEFAULTS["actor.kl_ctl"])) if "reference" in parts else 0.0
    actor = _learner(parts.actor) | given(path=parts.path) | {"kl_ctl": coefficient}
    rollout = _engine(parts["rollout"], parts)
    values: dict[str, Any] = {"cluster": {"n_nodes": parts.nodes, "n_gpus_per_node": parts.width}, "actor": actor}
    mode = plan.settings.get(WEIGHT_UPDATE)
    if mode:
        actor["weight_update_mode"] = mode
    if is_shared and (mode != "awex" or parts.actor.model.offloads):
        why = "engines on the learner's GPUs cannot take weights by xccl, AReaL's default"
        if mode not in ("disk", "awex"):
            actor["weight_update_mode"] = parts.assume("actor.weight_update_mode", "disk", why)
        rollout["scheduling_strategy"] = dict(_WITH_ACTOR)
        values["enable_offload"] = True
        if not parts.engines_sleep():
            parts.assume("enable_offload", True, "AReaL shares GPUs between roles that offload only")
    elif parts.is_async and not is_shared:
        rollout["max_head_offpolicyness"] = parts.staleness
    for name, role in (("critic", "critic"), ("reference", "ref")):
        if name in parts:
            section = _learner(parts[name]) | given(path=parts[name].model.path)
            section |= {"is_critic": True} if name == "critic" else {}  # without it AReaL loads a language model
            shares = parts.share("actor", name)
            values[role] = section | ({"scheduling_strategy": dict(_WITH_ACTOR)} if shares else {})
    values["rollout"] = rollout
    actor |= _normalisation(parts)
    values |= _lengths(parts)
    values |= _server(rollout["backend"].partition(":")[0], parts) | given(tokenizer_path=parts.path)
    if TEACHER in parts:
        values[TEACHER] = _teacher(parts[TEACHER], parts)
    return values


def _server(word: str, parts: Parts) -> dict[str, Any]:
    """The section of the engine's own arguments, which names the model again."""
    model, fraction = ("model_path", "mem_fraction_static") if word == "sglang" else ("model", "gpu_memory_utilization")
    section = given(**{model: parts.path, fraction: parts["rollout"].model.memory_fraction})
    return {word: section} if section else {}


def _normalisation(parts: Parts) -> dict[str, Any]:
    """AReaL's normalisation of rewards and advantages, which is its choice of an estimator."""
    settings, notation = parts.plan.settings, parts.plan.notation
    word = parts.estimator(Notation.AREAL, "actor.reward_norm")
    said = "batch/batch" if whitens(parts.plan) else settings.get(WHITEN)
    mean, std = (str(settings.get(name, RewardScope.NONE)) for name in (BASELINE, STD))
    leaves_out = word == "rloo" or settings.get(LEAVES_OUT) is True
    if word == "rloo":
        mean = RewardScope.GROUP
    elif word in _WHITENED and (settings.get(ESTIMATOR) != word or notation not in (Notation.AREAL, Notation.ROLL)):
        said, mean = said or "batch/batch", _WHITENED[word]
    else:
        scopes = next((pair for pair, name in NORMALISED.items() if name == word), (mean, std))
        mean, std = scopes if word != "reinforce" else (mean, std)
    found = {"adv_norm": _levels(*str(said).split("/"))} if said else {}
    levels = _levels(mean, std)
    if not any(levels.values()):
        return found
    norm = levels | ({"mean_leave1out": True} if leaves_out else {})
    return {"reward_norm": norm | ({"group_size": "${gconfig.n_samples}"} if "group" in norm.values() else {})} | found


def _levels(mean: str, std: str) -> dict[str, Any]:
    written = {"mean_level": mean, "std_level": std}
    return {key: str(level) if level in ("group", "batch") else None for key, level in written.items()}


def _lengths(parts: Parts) -> dict[str, Any]:
    sampling = given(max_new_tokens=parts.completion, max_tokens=parts.actor.model.sequence)
    return given(gconfig=sampling, train_dataset=given(max_length=parts.plan.settings.get(PROMPT)))


def _dimensions(part: ComponentPlan, size: int) -> str:
    """Dimensions as in d4t2; those that are 1 are left out."""
    sizes = part.parallel
    inner = {"t": sizes.tensor, "p": sizes.pipeline, "c": sizes.context, "e": sizes.expert}
    data = len(part.table.device_ranks) // size
    return f"d{data}" + "".join(f"{letter}{number}" for letter, number in inner.items() if number > 1)


def _learner(part: ComponentPlan) -> dict[str, Any]:
    model, sizes = part.model, part.parallel
    word = learner_backend(part, LEARNERS)
    if word == "fsdp" and (sizes.pipeline > 1 or sizes.expert > 1):
        word = "archon"  # fsdp has no stages and no expert parallelism
    section: dict[str, Any] = {"backend": f"{word}:{_dimensions(part, sizes.model)}"}
    if model.lora_rank:
        section |= {"use_lora": True, "lora_rank": model.lora_rank}
    section |= {"gradient_checkpointing": True} if model.recomputes else {}
    section |= {"offload": True} if model.offloads == OFFLOADED_PARTS else {}
    return section | given(mb_spec=given(max_tokens_per_mb=model.tokens))


def _engine(part: ComponentPlan, parts: Parts, known: Sequence[str] = ENGINES) -> dict[str, Any]:
    parts.engine_size(part)  # a finding where engines differ
    sizes = part.parallel
    plain = f"d{len(part.table.device_ranks) // (sizes.tensor * sizes.pipeline)}t{sizes.tensor}"
    pipeline = f"p{sizes.pipeline}" if sizes.pipeline > 1 else ""
    return {"backend": f"{parts.backend(part, known)}:{plain}{pipeline}"}


def _teacher(part: ComponentPlan, parts: Parts) -> dict[str, Any]:
    """A teacher behind an engine where its processes have several GPUs, else in the training backend."""
    rest = given(path=part.model.path)
    if parts.share("actor", TEACHER):
        rest["scheduling_strategy"] = dict(_WITH_ACTOR)
    if len(part.table.device_ranks) > part.world_size:
        return {"engine_type": "rollout", "rollout": _engine(part, parts) | rest}
    return {"engine_type": "train", "train": _learner(part) | rest}
