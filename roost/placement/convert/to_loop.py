"""A plan as a config of ml-loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.job import Notation
from roost.config.notations.loop import MEMORY_KEYS
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.models import KEEP
from roost.placement.models import has_devices
from roost.placement.plan import Plan

# The key of other notations that says how far rollouts are ahead.
_AHEAD = {
    Notation.AREAL: "rollout.max_head_offpolicyness",
    Notation.PRIME: "orchestrator.max_off_policy_steps",
    Notation.SKYRL: "trainer.fully_async.max_staleness_steps",
    Notation.VERL: "async_training.staleness_threshold",
    Notation.NEMO: "max_trajectory_age_steps",
}


def to_loop(plan: Plan, findings: Findings) -> dict[str, Any]:
    if plan.inventory.num_nodes > 1:
        findings.error(
            "RST-N047",
            Where(path=("nodes",)),
            "ml-loop runs on one machine",
            f"the plan has {plan.inventory.num_nodes} nodes",
            KEEP,
        )
    for part in plan.components:
        if part.name not in ("actor", "rollout") and has_devices(part):
            findings.error("RST-N048", Where(path=(part.name,)), "ml-loop has learners and servers only", fix=KEEP)
    names = {part.name: part for part in plan.components}
    allocation = {}
    for name, key in (("actor", "learning_gpus"), ("rollout", "inference_gpus")):
        if name in names:
            allocation[key] = names[name].table.device_ranks.tolist()
        else:
            findings.error(
                "RST-N048", Where(path=(name,)), f"ml-loop needs {key}, and the plan has no {name}", fix=KEEP
            )
    rl: dict[str, Any] = {"gpu_allocation": allocation, "async_rollouts": _is_async(plan, findings)}
    rl |= {key: plan.settings[key] for key in MEMORY_KEYS if plan.settings.get(key) is not None}
    config: dict[str, Any] = {"rl": rl}
    if "actor" in names and np.diff(names["actor"].table.offsets).max() > 1:
        findings.error("RST-N049", Where(path=("actor",)), "ml-loop gives every learner one GPU", fix=KEEP)
    if "rollout" in names:
        server: dict[str, Any] = {"gpus_per_vllm_server": _server_size(names["rollout"], findings)}
        if not names["rollout"].model.can_sleep:
            server["enable_sleep_mode"] = False
        config["llm"] = _model(names) | {"vllm_server": server}
        if plan.settings.get("max_gpu_mem_utilization") is not None:
            config["llm"]["max_gpu_mem_utilization"] = plan.settings["max_gpu_mem_utilization"]
    for part in names.values():
        _refuse_software(part, findings)
    return config


def _model(names: dict[str, ComponentPlan]) -> dict[str, Any]:
    path = names["rollout"].model.path
    rank = names["actor"].model.lora_rank if "actor" in names else None
    return ({"base_model_path": path} if path else {}) | ({"lora_rank": rank} if rank else {})


def _is_async(plan: Plan, findings: Findings) -> bool:
    ratio = plan.settings.get("async_generation_ratio")
    if ratio not in (None, 0, 1):
        findings.error(
            "RST-N050",
            Where(plan.file, path=(_AHEAD.get(plan.notation, "async_generation_ratio"),)),
            f"ml-loop lags by one iteration, not by {ratio}",
            fix="write 0 or 1",
        )
    return bool(ratio) or plan.settings.get("async_rollouts") is True


def _server_size(part: ComponentPlan, findings: Findings) -> int:
    sizes = np.diff(part.table.offsets).tolist()
    if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
        findings.error(
            "RST-N049",
            Where(path=(part.name,)),
            "ml-loop cuts servers of one size, the last one smaller at most",
            fix=KEEP,
        )
    return int(sizes[0])


def _refuse_software(part: ComponentPlan, findings: Findings) -> None:
    if part.env or any(part.table.inventory.group(label).software for label in part.table.labels):
        findings.error(
            "RST-N051",
            Where(path=(part.name,)),
            "ml-loop has no word for variables or interpreters of a component",
            fix=KEEP,
        )
