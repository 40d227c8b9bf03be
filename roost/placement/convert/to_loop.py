"""A plan as a config of ml-loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.job import Notation, family
from roost.config.notations.loop import MEMORY_KEYS
from roost.placement.component_plan import ComponentPlan
from roost.placement.convert.parts import KEEP, refuse_without
from roost.placement.plan import Plan, has_devices

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
    on_devices = {part.name: part for part in plan.components if has_devices(part)}
    others = [name for name in on_devices if name not in ("actor", "rollout")]
    if others:
        what = f"ml-loop has learners and servers only, and the job has {', '.join(others)} on devices"
        findings.error("RST-N048", Where(), what, fix=KEEP)
    splits = any(family(name) == "rollout" for name in others)
    refuse_without(on_devices, ("actor",) if splits else ("actor", "rollout"), "ml-loop", findings)
    names = {part.name: part for part in plan.components}
    keys = (("actor", "learning_gpus"), ("rollout", "inference_gpus"))
    allocation = {key: names[name].table.device_ranks.tolist() for name, key in keys if name in names}
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
    _refuse_software(plan, findings)
    return config


def _model(names: dict[str, ComponentPlan]) -> dict[str, Any]:
    path = names["rollout"].model.path
    rank = names["actor"].model.lora_rank if "actor" in names else None
    return ({"base_model_path": path} if path else {}) | ({"lora_rank": rank} if rank else {})


def _is_async(plan: Plan, findings: Findings) -> bool:
    ratio, is_verl = plan.settings.get("async_generation_ratio"), plan.notation is Notation.VERL
    if ratio not in (None, 0, 1):
        findings.error(
            "RST-N050",
            Where(plan.file, path=(_AHEAD.get(plan.notation, "async_generation_ratio"),)),
            f"ml-loop's rollouts are one iteration ahead at most, and the job's {ratio}",
            fix=f"write 0 or 1{' with async_training.trigger_parameter_sync_step=1' if is_verl else ''}, or {KEEP}",
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


def _refuse_software(plan: Plan, findings: Findings) -> None:
    groups = plan.inventory.group
    named = [
        part.name for part in plan.components if part.env or any(groups(one).software for one in part.table.labels)
    ]
    if named:
        what = f"ml-loop has no variables or interpreters of components, and the job sets them for {', '.join(named)}"
        findings.error("RST-N051", Where(), what, fix=KEEP)
