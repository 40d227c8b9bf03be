"""The loss of ROLL's notation: ratio, clips, `pg_variant`, KL, and `train_infer_correction`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roost.config.findings import shown
from roost.config.learning import DIFFERENCE, RATIO
from roost.config.notations.roll import is_distilled_alone
from roost.config.notations.words import AGGREGATIONS, clip_ranges, named
from roost.config.source import Section
from roost.config.train_choices import ImportanceSamplingLevel, LossAggregation, PolicyLoss

CLIP = 0.2
VANILLA, PPO, TIS, CISPO = "vanilla", "ppo", "tis", "cispo"
VARIANTS = {
    VANILLA: PolicyLoss.PPO,
    PPO: PolicyLoss.PPO,
    TIS: PolicyLoss.CISPO,  # with bounds of its own
    CISPO: PolicyLoss.CISPO,
    "topr": PolicyLoss.TOPR,
    "kimi15": PolicyLoss.KIMI15,
}
# Keys of each variant; those of topr are settings of their own. ROLL's worker drops them from its config before its
# loss reads them, so that ROLL always uses its defaults.
OWN_KEYS = {
    TIS: ("tis_lower_bound", "tis_upper_bound"),
    CISPO: ("cispo_epsilon_low", "cispo_epsilon_high", "cispo_use_unified_mask"),
    "kimi15": ("kimi15_tau",),
}
WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
WORKER_OF_AGENTS = "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"
RATIO_LEVELS = {"token": ImportanceSamplingLevel.TOKEN, "seq": ImportanceSamplingLevel.SEQUENCE}
AGENT_LEVELS = {"token": ImportanceSamplingLevel.TOKEN, "segment": ImportanceSamplingLevel.TURN_MEAN}
CORRECTION_LEVELS = {
    "token": ImportanceSamplingLevel.TOKEN,
    "segment": ImportanceSamplingLevel.TURN_MEAN,
    "geometric": ImportanceSamplingLevel.SEQUENCE,
    "sequence": ImportanceSamplingLevel.TRAJECTORY,
}
CORRECTION = "train_infer_correction"
UPPER_BOUND = 1.2
BOUNDS = {RATIO: (0.8, 1.2), DIFFERENCE: (-0.2, 0.2)}
Bounds = dict[str, dict[str, list[float]]]


def loss_settings(root: Section, learner: Section) -> dict[str, Any]:
    """Settings of the policy loss that the config gives."""
    variant = _variant(learner)
    clip, is_range = root.number("pg_clip"), root.values.get("use_pg_clip_range") is True
    low, high = (root.number("pg_clip_low"), root.number("pg_clip_high")) if is_range else (clip, clip)
    is_clipped = variant == PPO
    around = 1 + 2 * (CLIP if clip is None else clip)
    _note_norm(root)
    _warn_unread(root, learner, variant)
    return {
        "loss_aggregation": named(root, "loss_agg_mode", AGGREGATIONS),
        **clip_ranges(low, high),
        "dual_clip": around if is_clipped and root.values.get("dual_clip_loss") is True else None,
        "importance_sampling_level": _level(root, learner, variant),
        **_variant_settings(learner, variant),
        "kl_coef": _kl_coef(root),
        **_correction(root),
    }


def has_variants(learner: Section) -> bool:
    """Return True for ROLL's PG workers, which alone read `pg_variant`."""
    return "actor_pg_worker" in str(learner.values.get("worker_cls"))


def _variant(learner: Section) -> str:
    if not has_variants(learner):
        return PPO
    named(learner, "pg_variant", VARIANTS)
    return str(learner.values.get("pg_variant") or PPO)


def _warn_unread(root: Section, learner: Section, variant: str) -> None:
    """Warn of keys of other variants than the one used; for a worker without variants, of all."""
    keys = [key for name, own in OWN_KEYS.items() if name != variant for key in own]
    why, fix = f"it is of another pg_variant than {variant}", "remove it"
    if not has_variants(learner):
        written = learner.get("pg_variant")
        keys = [*(["pg_variant"] if written != PPO else []), *keys]
        worker = WORKER_OF_AGENTS if "train_env_manager" in root else WORKER
        why = f"worker_cls is not {worker}, and ROLL's other workers have no variants"
        fix = f"write worker_cls: {worker}, or remove it"
    for key in keys:
        if learner.get(key) is not None:
            learner.findings.warn("RST-T014", learner.where(key), "has no effect", why, fix)


def _level(root: Section, learner: Section, variant: str) -> ImportanceSamplingLevel | None:
    """Level of the ratio: `ratio_type` with environments, else `importance_sampling`, which variants do not read."""
    if variant == VANILLA:
        return ImportanceSamplingLevel.NONE
    if "train_env_manager" in root:
        found: ImportanceSamplingLevel | None = named(root, "ratio_type", AGENT_LEVELS)
        return found
    return None if has_variants(learner) else named(root, "importance_sampling", RATIO_LEVELS)


def _variant_settings(learner: Section, variant: str) -> dict[str, Any]:
    """The loss of a variant and its own keys."""
    if variant in (VANILLA, PPO):
        return {}
    for key in OWN_KEYS.get(variant, ()):
        if learner.get(key) is not None:
            learner.findings.warn(
                "RST-T048",
                learner.where(key),
                f"is {shown(learner.get(key))}, and is followed",
                "ROLL drops the key before its loss reads it, and takes its default",
                "remove it for ROLL's default",
            )
    found: dict[str, Any] = {"loss_type": VARIANTS.get(variant)}
    if variant == TIS:
        low, high = _given(learner, "tis_lower_bound", 0.0), _given(learner, "tis_upper_bound", 1.0)
        for key, bound, is_beyond, side in (
            ("tis_lower_bound", low, low > 1, "at most"),
            ("tis_upper_bound", high, high < 1, "at least"),
        ):
            if is_beyond:
                learner.error(
                    "RST-T013",
                    key,
                    f"is {bound:g}; it must be {side} 1",
                    "Roost bounds ratios by 1 - clip_range and 1 + clip_range_high",
                    f"write {key}: 1, or remove it",
                )
        return found | {"clip_range": 1 - min(low, 1.0), "clip_range_high": max(high, 1.0) - 1}
    if variant == CISPO:
        ranges = (_given(learner, f"cispo_epsilon_{end}", 0.1) for end in ("low", "high"))
        return found | clip_ranges(*ranges) | {"cispo_mask": learner.flag("cispo_use_unified_mask")}
    return found | {"kimi15_tau": learner.number("kimi15_tau") if variant == "kimi15" else None}


def _given(section: Section, key: str, default: float) -> float:
    value = section.number(key)
    return default if value is None else value


def _kl_coef(root: Section) -> float | None:
    """Coefficient of the KL loss; ROLL multiplies it by `rl_loss_coef` as well."""
    is_used = root.values.get("use_kl_loss") is True and not is_distilled_alone(root)
    coef = root.number("kl_loss_coef") if is_used else None
    weight = root.number("rl_loss_coef")
    return coef if coef is None or weight is None else coef * weight


def _note_norm(root: Section) -> None:
    if root.values.get("loss_agg_mode") == LossAggregation.SEQ_SUM_NORM:
        root.findings.note(
            "RST-T048",
            root.where("loss_agg_mode"),
            "divides the sums of sequences by their number and by max_new_tokens",
            "ROLL divides their sum by sequence_length - 1 alone, so that the loss grows with the batch",
            "nothing to do: AdamW does not see the factor, but max_grad_norm clips less here",
        )


def _correction(root: Section) -> dict[str, Any]:
    """Weights and filters of tokens by the ratio of the learner's log-probs to the engine's."""
    section = root.below(CORRECTION)
    weight = section.below("is_weight")
    found: dict[str, Any] = {}
    if weight.values.get("enabled") is True:
        level = named(weight, "weight_type", CORRECTION_LEVELS)
        found["rollout_is"] = ImportanceSamplingLevel.TOKEN if level is None else level
        bound = weight.number("upper_bound") if "upper_bound" in weight else UPPER_BOUND
        found["importance_weight_cap"] = bound or 0.0
        if weight.get("detach") is False:
            what, why = "is false, but weights have no gradient", "ROLL's have one where log-probs are not recomputed"
            weight.findings.warn("RST-T014", weight.where("detach"), what, why, "remove it")
    elif weight.values.get("enabled") is False:
        found["rollout_is"] = ImportanceSamplingLevel.NONE
    else:
        _note_added_weights(root)
    bounds: Bounds = {}
    for rule in section.mappings("filters", "write filters: [{enabled: true, agg_type: token, ratio_high: 2}]"):
        if rule.flag("enabled"):
            _add_filter(rule, bounds)
    return found | ({"rollout_rejection": bounds} if bounds else {})


def _note_added_weights(root: Section) -> None:
    """Note that Roost weighs stale samples where the config does not say whether to."""
    ratio = root.values.get("async_generation_ratio")
    is_stale = isinstance(ratio, int | float) and ratio > 0
    if is_stale and not any(key in root.below("train") for key in ("rollout_is", "old_logprobs", "max_staleness")):
        root.findings.note(
            "RST-T048",
            root.where("async_generation_ratio"),
            "weighs the loss of stale samples by the ratio of the learner's log-probs to the engine's",
            f"ROLL has no such weights unless {CORRECTION}.is_weight is enabled",
            f"write {CORRECTION}: {{is_weight: {{enabled: false}}}} to train without them",
        )


def _add_filter(rule: Section, bounds: Bounds) -> None:
    """Add the bounds of a filter; filters of one level hold together, so the narrower bounds count."""
    level = named(rule, "agg_type", CORRECTION_LEVELS) or ImportanceSamplingLevel.TOKEN
    for kind, word, usual in ((RATIO, "ratio", True), (DIFFERENCE, "diff", False)):
        if not rule.flag(f"{word}_enabled", default=usual):
            continue
        low, high = (_bound(rule, f"{word}_{end}", BOUNDS[kind][side]) for side, end in enumerate(("low", "high")))
        given = bounds.setdefault(level.value, {}).get(kind, [-math.inf, math.inf])
        narrowed = [max(low, given[0]), min(high, given[1])]
        if narrowed[0] < narrowed[1]:
            bounds[level.value][kind] = narrowed
            continue
        rule.error(
            "RST-T093",
            f"{word}_low",
            f"leaves no {word} for agg_type {level.value}: at least {narrowed[0]:g}, at most {narrowed[1]:g}",
            "filters of one agg_type hold together",
            "write a lower bound below the upper one, or remove a filter",
        )


def _bound(rule: Section, key: str, default: float) -> float:
    """A number of either sign."""
    value = rule.get(key)
    if value is None:
        return default
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    rule.error("RST-C026", key, f"is {shown(value)}; it must be a number", fix=f"write {key}: {default:g}")
    return default


DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "rollout_is": (f"{CORRECTION}.is_weight.enabled", f"{CORRECTION}.is_weight.weight_type"),
    "importance_weight_cap": (f"{CORRECTION}.is_weight.upper_bound",),
    "rollout_rejection": (f"{CORRECTION}.filters",),
    "loss_aggregation": ("loss_agg_mode",),
    "dual_clip": ("dual_clip_loss",),
    "kl_coef": ("kl_loss_coef", "use_kl_loss"),
}
