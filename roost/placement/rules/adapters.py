"""Checks of a LoRA adapter against its model."""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.findings import Findings, did_you_mean
from roost.config.train import TrainSettings
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.model import known_shape
from roost.placement.memory.shape import adaptable_layers, unmatched
from roost.placement.rules.placing import SUPERVISED, At


def check_adapter(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    """Check that each name in lora_target_modules matches a layer, if the model's sizes are known."""
    learner, adapter = next((parts[name] for name in SUPERVISED if name in parts), None), settings.learner.adapter
    shape = None if learner is None else known_shape(learner)
    if adapter is None or learner is None or shape is None or "vision_config" in (learner.model.config or {}):
        return
    layers = adaptable_layers(shape)
    missing = unmatched(adapter.lora_target_modules, layers)
    if missing:
        names = sorted({path.rpartition(".")[2] for path in layers})
        why = did_you_mean(missing[0], names)
        if shape.expert_layers:
            why = "; ".join(filter(None, [why, "routers, routed experts and dense layers beside them get no adapter"]))
        what = f"has {', '.join(missing)}, but no linear layer of the model is called so"
        findings.error("RST-T161", at("lora_target_modules"), what, why, f"write any of {', '.join(names)}")
