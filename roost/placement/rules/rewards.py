"""Rules about placed rewards: accelerators that a judge or a reward model leaves idle or cannot use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from roost.cluster.inventory import ACCELERATOR
from roost.config.findings import Findings, Where
from roost.placement.component_plan import ComponentPlan

REWARD = "reward"
JUDGE = "roost.rollout.rewards.judge.Judge"
SERVED = (JUDGE, "roost.rollout.rewards.reward_model.RewardModel")  # rewards that may have an engine
ON_ONE_DEVICE = "torch"  # the built-in engine


class SizesDoNotFit(ValueError):
    """An engine cannot be sharded over the accelerators of its process."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(f"{why}; {fix}")
        self.why, self.fix = why, fix


def placed_rewards(rewards: Mapping[str, Any], placed: Collection[str]) -> dict[str, str]:
    """The component of each reward that has one: `reward.NAME`, or `reward` where there is one reward alone.

    >>> placed_rewards({"math": {}, "code": {}}, ["actor", "reward", "reward.code"])
    {'code': 'reward.code'}
    >>> placed_rewards({"math": {}}, ["actor", "reward"])
    {'math': 'reward'}
    """
    own = {name: f"{REWARD}.{name}" for name in rewards}
    found = {name: component for name, component in own.items() if component in placed}
    if not found and len(rewards) == 1 and REWARD in placed:
        found = dict.fromkeys(rewards, REWARD)
    return found


def engine_sizes(kind: str, tensor: int | None, pipeline: int | None, devices: int) -> tuple[int, int]:
    """Tensor and pipeline size of a judge's engine, which must fill the accelerators of its process.

    >>> engine_sizes("vllm", None, 2, devices=8)
    (4, 2)
    """
    pipeline = pipeline or 1
    tensor = tensor or max(1, devices // pipeline)
    size = tensor * pipeline
    if kind == ON_ONE_DEVICE and max(devices, size) > 1:
        why = f"the built-in engine uses one accelerator; each process has {devices}, and tensor x pipeline is {size}"
        raise SizesDoNotFit(why, "give each process one, or write kind: vllm or kind: sglang")
    if devices and size != devices:
        why = f"tensor {tensor} x pipeline {pipeline} is {size}, but each process has {devices} accelerators"
        raise SizesDoNotFit(why, "leave tensor out, or place the judge on as many for each process")
    return tensor, pipeline


def check_rewards(
    rewards: Mapping[str, Any], parts: Mapping[str, ComponentPlan], where: Where, findings: Findings
) -> None:
    """Check judges against the accelerators of their processes; unknown keys are reported by the judge."""
    used = placed_rewards(rewards, parts)
    for component in parts:
        if component.partition(".")[0] == REWARD and component not in used.values():
            _warn_unused(component, rewards, where, findings)
    for name, component in used.items():
        keys = rewards[name]
        held = _accelerators_held(parts[component])
        if held and isinstance(keys, Mapping) and keys.get("_target_") in SERVED:
            _check_judge(keys, held, component, where.under(name), findings)


def _warn_unused(component: str, rewards: Mapping[str, Any], where: Where, findings: Findings) -> None:
    there = f"has {', '.join(rewards)}" if rewards else "is empty"
    fix = "place reward.NAME for one of them" if rewards else "name a reward there"
    findings.warn(
        "RST-P025",
        where,
        f"{component} is placed, but has nothing to do",
        f"train.rewards {there}, so it is not started",
        f"{fix}, or remove {component}",
    )


def _check_judge(keys: Mapping[str, Any], held: list[int], component: str, where: Where, findings: Findings) -> None:
    if keys.get("base_url") is not None and keys.get("engine") is None:
        findings.warn(
            "RST-A017",
            where.under("base_url"),
            f"uses an external server, so {component} does not use its accelerators",
            f"each of its processes has {held[-1]}",
            f"write engine: {{kind: vllm}} instead of base_url, or place {component} on a node group of CPUs",
        )
    engine = keys.get("engine")
    if not isinstance(engine, Mapping):
        return
    tensor, pipeline = engine.get("tensor"), engine.get("pipeline")
    if not all(size is None or (isinstance(size, int) and size > 0) for size in (tensor, pipeline)):
        return
    try:
        for devices in held:
            engine_sizes(str(engine.get("kind")), tensor, pipeline, devices)
    except SizesDoNotFit as error:
        findings.error(
            "RST-A018", where.under("engine"), f"does not fit the accelerators of {component}", error.why, error.fix
        )


def _accelerators_held(part: ComponentPlan) -> list[int]:
    """Distinct numbers of accelerators per process."""
    table = part.table
    is_accelerator = np.array([kind == ACCELERATOR for kind in table.kinds])[table.groups]
    counts: list[int] = np.unique(np.diff(table.offsets)[is_accelerator]).tolist()
    return counts
