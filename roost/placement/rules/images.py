"""Rules about models that read images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roost.config.findings import Findings, Where
from roost.config.train import TrainSettings
from roost.placement.component_plan import ComponentPlan

At = Callable[[str], Where]  # a setting's place, or a component's
FAMILIES = "qwen2_vl or qwen2_5_vl"


def check_images(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    actor = parts.get("actor")
    config = None if actor is None else actor.model.config
    has_images = bool((settings.data or {}).get("images"))
    if has_images and settings.engine in ("vllm", "sglang"):
        what, why = "has images, which Roost sends to its built-in engine alone", f"engine is {settings.engine}"
        findings.error("RST-T160", at("data"), what, why, "write engine: torch in train")
    if config is None:
        return
    family = f"its model_type is {config.get('model_type')}"
    if has_images and "vision_config" not in config:
        fix = f"train a model of {FAMILIES}, or remove the columns of images"
        findings.error("RST-T160", at("data"), "has images, but the model reads text alone", family, fix)
    if "vision_config" in config and settings.learner.adapter is not None:
        what = "is not supported for a model that reads images"
        findings.error("RST-T160", at("lora_rank"), what, family, "leave it out, and train the whole model")
