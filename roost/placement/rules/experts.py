"""Rules about mixtures of experts: router replay, the load-balancing loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.config.findings import Findings, Where
from roost.config.train import TrainSettings
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.model import EXPERT_FAMILIES

At = Callable[[str], Where]  # a setting's place, or a component's
MIXTURE = f"a mixture of experts that Roost knows ({', '.join(EXPERT_FAMILIES)})"


def check_experts(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    actor = parts.get("actor")
    family = None if actor is None or actor.model.config is None else str(actor.model.config.get("model_type", ""))
    is_other = family is not None and family not in EXPERT_FAMILIES
    why = f"the model is of the family {family or 'without a name'}"
    asked = {
        "router_replay": settings.sampling.router_replay,
        "router_aux_loss_coef": settings.learner.router_aux_loss_coef > 0,
    }
    for key in (key for key, is_asked in asked.items() if is_asked and is_other):
        findings.error("RST-T112", at(key), f"needs {MIXTURE}", why, "remove it")
    if settings.sampling.router_replay and settings.engine == "sglang":
        fix = "write engine: torch or vllm, or router_replay: false"
        what = "needs an engine whose routed experts Roost reads"
        findings.error("RST-T111", at("router_replay"), what, "engine is sglang", fix)
    rollout = parts.get("rollout")
    if settings.sampling.router_replay and settings.engine == "vllm" and rollout is not None and _is_on_cpus(rollout):
        what = "needs routed experts, which vLLM's build for CPUs does not return"
        why = "its Model Runner V2, which returns them, needs Triton; accelerators are simulated here"
        findings.error("RST-T111", at("router_replay"), what, why, "write engine: torch, or router_replay: false")


def _is_on_cpus(part: ComponentPlan) -> bool:
    """Return True if the accelerators of a component are simulated, so that its models run on CPUs."""
    nodes = part.table.inventory.nodes
    return any(nodes[node].accelerator_type == AcceleratorType.SIMULATED for node in part.table.nodes)
