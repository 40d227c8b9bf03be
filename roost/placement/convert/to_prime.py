"""A plan as a TOML file of prime-rl, which puts engines on the first GPUs and the learner after them."""

from __future__ import annotations

from typing import Any

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.frameworks.prime import DEFAULTS
from roost.config.notations.algorithm import JOB_NAME
from roost.placement.convert.parts import DECODE, KEEP, PREFILL, Parts, above_one, given
from roost.placement.plan import Plan


def to_prime(plan: Plan, findings: Findings) -> dict[str, Any]:
    parts = Parts.of(plan, "prime-rl", findings, splits=True)
    if parts is None:
        return {}
    if parts.shares_actor():
        where = Where(path=(parts.engines[0].name,))
        what = "prime-rl gives engines GPUs of their own, and here they share the learner's"
        findings.error("RST-N048", where, what, fix=KEEP)
        return {}
    model = parts.actor.model
    values: dict[str, Any] = given(seq_len=model.sequence, model=given(name=parts.path))
    values["deployment"] = _deployment(parts)
    if values["deployment"]["type"] == "multi_node":
        why = "prime-rl starts jobs over several nodes by Slurm only"
        values["slurm"] = {"job_name": plan.settings.get(JOB_NAME) or parts.assume("slurm.job_name", "rl", why)}
    values["orchestrator"] = {"max_off_policy_steps": parts.staleness if parts.is_async else 0}
    if parts.completion:
        values["orchestrator"]["train"] = {"sampling": {"max_completion_tokens": parts.completion}}
    sizes = parts.actor.parallel
    section: dict[str, Any] = above_one(cp=sizes.context, ep=sizes.expert)
    section |= {"ac": {}} if model.recomputes else {}
    section |= {"lora": {"rank": model.lora_rank}} if model.lora_rank else {}
    values["trainer"] = {"model": section}
    if parts.engines:
        values["inference"] = _inference(parts)
    return values


def _deployment(parts: Parts) -> dict[str, Any]:
    engines = [part.name for part in parts.engines]
    if parts.nodes == 1 and PREFILL not in parts:
        infer = len(parts.devices("rollout")) if engines else 0
        return {"type": "single_node", "num_train_gpus": len(parts.devices("actor")), "num_infer_gpus": infer}
    section = {"type": "multi_node", "num_train_nodes": parts.pool("actor")[0]}
    width = parts.width
    section |= {"gpus_per_node": width} if width != DEFAULTS["deployment.gpus_per_node"] else {}
    replicas = _replicas(parts)
    section |= above_one(num_infer_replicas=replicas)
    return section | {"num_infer_nodes": parts.pool(*engines)[0] // replicas if engines else 0}


def _replicas(parts: Parts) -> int:
    """Groups of nodes for prefill, each of which has one for decode after it."""
    if PREFILL not in parts:
        return 1
    nodes = np.unique(parts[PREFILL].table.device_nodes)
    return int(np.sum(np.diff(nodes) > 1)) + 1


def _inference(parts: Parts) -> dict[str, Any]:
    part = parts.engines[0]
    engine: dict[str, Any] = {"tensor_parallel_size": parts.engine_size(part)}
    if part.model.path not in (None, parts.path):
        engine["model"] = part.model.path
    engine |= given(gpu_memory_utilization=part.model.memory_fraction)
    engine |= {"enable_expert_parallel": True} if part.parallel.expert > 1 else {}
    section: dict[str, Any] = {"vllm": engine}
    if part.name == PREFILL:
        replicas = _replicas(parts)
        nodes = {f"num_{name.partition('.')[2]}_nodes": parts.pool(name)[0] // replicas for name in (PREFILL, DECODE)}
        section["deployment"] = {"type": "disaggregated"} | nodes
    return section
