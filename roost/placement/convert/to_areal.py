"""A plan as a config of AReaL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.allocation import ENGINES, LEARNERS
from roost.config.frameworks.areal import DEFAULTS
from roost.config.model_files import OFFLOADED_PARTS
from roost.config.notations.algorithm import WEIGHT_UPDATE
from roost.config.teacher import TEACHER
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import Parts, given
from roost.placement.models import learner_backend
from roost.placement.plan import Plan

_WITH_ACTOR = {"type": "colocation", "target": "actor"}


def to_areal(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "AReaL", findings, ("actor", "rollout"))
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
            shares = parts.share("actor", name)
            values[role] = section | ({"scheduling_strategy": dict(_WITH_ACTOR)} if shares else {})
    values["rollout"] = rollout
    fraction = parts["rollout"].model.memory_fraction
    word = rollout["backend"].partition(":")[0]
    if fraction is not None:
        values[word] = {"mem_fraction_static" if word == "sglang" else "gpu_memory_utilization": fraction}
    if TEACHER in parts:
        values[TEACHER] = _teacher(parts[TEACHER], parts)
    return values


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
