"""Rules about models that read images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roost.config.findings import Findings, Where
from roost.config.job import Role
from roost.config.train import AdvantageEstimator, TrainSettings
from roost.placement.component_plan import ComponentPlan

At = Callable[[str], Where]  # a setting's place, or a component's
FAMILIES = "qwen2_vl or qwen2_5_vl"


def check_images(settings: TrainSettings, parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    actor = parts.get("actor")
    config = None if actor is None else actor.model.config
    has_images = bool((settings.data or {}).get("images"))
    if has_images and settings.engine == "sglang":
        what = "has images, which Roost sends to its built-in engine and to vLLM"
        findings.error("RST-T160", at("data"), what, "engine is sglang", "write engine: torch or vllm in train")
    _check_critic(settings, parts, has_images, at, findings)
    check_undivided(parts, at, findings)
    if config is None:
        return
    family = f"its model_type is {config.get('model_type')}"
    if has_images and "vision_config" not in config:
        fix = f"train a model of {FAMILIES}, or remove the columns of images"
        findings.error("RST-T160", at("data"), "has images, but the model reads text alone", family, fix)
    if "vision_config" in config and settings.learner.adapter is not None:
        what = "is not supported for a model that reads images"
        findings.error("RST-T160", at("lora_rank"), what, family, "leave it out, and train the whole model")


def check_no_images(settings: TrainSettings, at: At, findings: Findings) -> None:
    """Check that data of supervised training has no columns of images."""
    if images := (settings.data or {}).get("images"):
        what = "has images, which supervised training does not read"
        fix = "remove the columns of images, or train with a reward (roost train)"
        findings.error("RST-T160", at("data"), what, f"images is {images}", fix)


def _check_critic(
    settings: TrainSettings, parts: Mapping[str, ComponentPlan], has_images: bool, at: At, findings: Findings
) -> None:
    critic = parts.get("critic")
    if critic is None or settings.advantage.advantage_estimator is not AdvantageEstimator.GAE:
        return
    config = critic.model.config or {}
    if has_images or "vision_config" in config:
        why = "data has images" if has_images else f"model_type of the critic is {config.get('model_type')}"
        fix = "write an estimator without a critic, such as advantage_estimator: grpo, and remove critic"
        what = "is gae, but a critic reads text alone"
        findings.error("RST-T160", at("advantage_estimator"), what, why, fix)


def check_undivided(parts: Mapping[str, ComponentPlan], at: At, findings: Findings) -> None:
    """Check that no learner or scorer divides a model that reads images."""
    for name, part in parts.items():
        sizes, config = part.parallel, part.model.config or {}
        is_divided = sizes.tensor * sizes.context > 1
        if part.role in (Role.LEARNER, Role.SCORER) and is_divided and "vision_config" in config:
            what = f"tensor size {sizes.tensor} and context size {sizes.context} would divide a model that reads images"
            why, fix = f"its model_type is {config.get('model_type')}", "write tensor and context sizes of 1"
            findings.error("RST-T160", at(name), what, f"{why}; FSDP shards it", fix)
