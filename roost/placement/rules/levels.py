"""Checks of clip ranges, bounds and weights against the level of their ratios: geometric means, or products."""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.findings import Findings
from roost.config.learning import Rejection
from roost.config.train import ImportanceSamplingLevel, LossSettings, OldLogprobs, PolicyLoss, TrainSettings
from roost.placement.rules.placing import At

MEANS = (ImportanceSamplingLevel.SEQUENCE, ImportanceSamplingLevel.TURN_MEAN)
PRODUCTS = (ImportanceSamplingLevel.TRAJECTORY, ImportanceSamplingLevel.TURN)
WIDE_OF_MEANS = 0.05  # clip range of ratios that are means over tokens
WIDE_BOUNDS_OF_MEANS = 0.2  # bounds of a mean at least so far from 1 reject almost nothing
NARROW_BOUNDS_OF_PRODUCTS = 0.05  # bounds of a product at most so far from 1 reject almost everything
CLIPPING = (PolicyLoss.PPO, PolicyLoss.CISPO)
PRODUCT_OF = {
    ImportanceSamplingLevel.SEQUENCE: ImportanceSamplingLevel.TRAJECTORY,
    ImportanceSamplingLevel.TURN_MEAN: ImportanceSamplingLevel.TURN,
}
# Keys of notations that give a clip range: a switch, and the lower and upper range.
_RANGE = (None, "clip_ratio_low", "clip_ratio_high")
_PG_CLIP = ("use_pg_clip_range", "pg_clip_low", "pg_clip_high")
_CISPO = (None, "cispo_epsilon_low", "cispo_epsilon_high")
CLIP_KEYS: Mapping[str, tuple[str | None, str, str]] = {
    **dict.fromkeys(("ratio_clip_eps", "clip_ratio_low", "clip_ratio_high"), _RANGE),
    **dict.fromkeys(("pg_clip", "pg_clip_low", "pg_clip_high"), _PG_CLIP),
    **dict.fromkeys(("cispo_epsilon_low", "cispo_epsilon_high"), _CISPO),
    **dict.fromkeys(("epsilon", "epsilon_high"), (None, "epsilon", "epsilon_high")),
}


def check_levels(settings: TrainSettings, at: At, findings: Findings) -> None:
    """Check clip ranges, rejections and weights."""
    loss = settings.learner.loss
    _check_clips(loss, at, findings)
    for rule in loss.rejections:
        _check_rejection(rule, at, findings)
    is_explicit = loss.rollout_is in MEANS and loss.old_logprobs is not OldLogprobs.ROLLOUT
    if settings.max_staleness and is_explicit:
        findings.warn(
            "RST-T127",
            at("rollout_is"),
            f"is {loss.weight_level.value}, whose weights hardly correct for samples of an older policy",
            f"max_staleness is {settings.max_staleness}: geometric means over many tokens stay near 1 however stale",
            f"write rollout_is: token, or {PRODUCT_OF[loss.weight_level].value} for the product",
        )


def _check_clips(loss: LossSettings, at: At, findings: Findings) -> None:
    level, width = loss.importance_sampling_level, min(loss.clip_range, loss.clip_range_high)
    if level in MEANS and loss.loss_type in CLIPPING and width > WIDE_OF_MEANS:
        findings.warn(
            "RST-T127",
            at("clip_range"),
            f"is {loss.clip_range:g}, with which almost no ratio is clipped",
            f"importance_sampling_level is {level.value}: geometric means over many tokens are near 1",
            f"{_narrow_clips(at)}, as GSPO does",
        )


def _narrow_clips(at: At) -> str:
    """The fix that narrows the clip range, in the keys that give it: those of train would contradict them."""
    written = [at(name) for name in ("clip_range", "clip_range_high")]
    own = next((where for where in written if where.path[:1] != ("train",)), written[0])
    *above, key = map(str, own.path)
    switch, low, high = CLIP_KEYS.get(key, (None, "clip_range", "clip_range_high"))
    switched = f"{switch}: true, " if switch else ""
    low, high = (".".join((*above, name)) if key in CLIP_KEYS else name for name in (low, high))
    return f"write {switched}{low}: 0.0003 and {high}: 0.0004"


def _check_rejection(rule: Rejection, at: At, findings: Findings) -> None:
    """Report bounds of a mean that fit a product, and bounds of a product that fit a mean."""
    if rule.of_difference:
        return
    below, above = 1 - max(rule.low, 0.0), rule.high - 1
    level, bounds = rule.level.value, f"[{max(rule.low, 0.0):g}, {rule.high:g}]"
    unit = "turn" if rule.level in (ImportanceSamplingLevel.TURN, ImportanceSamplingLevel.TURN_MEAN) else "sample"
    if rule.level in MEANS and min(below, above) >= WIDE_BOUNDS_OF_MEANS:
        other = PRODUCT_OF[rule.level].value
        findings.warn(
            "RST-T127",
            at("rollout_rejection"),
            f"has {level}: {bounds}, which rejects almost nothing",
            f"{level} is the geometric mean over a {unit}, which is near 1",
            f"write {level}: [0.99, 1.01], or {other}: {bounds} for the product",
        )
    elif rule.level in PRODUCTS and min(below, above) >= 0 and max(below, above) <= NARROW_BOUNDS_OF_PRODUCTS:
        other = next(mean for mean, product in PRODUCT_OF.items() if product is rule.level).value
        findings.warn(
            "RST-T127",
            at("rollout_rejection"),
            f"has {level}: {bounds}, which rejects almost every {unit} of many tokens",
            f"{level} is the product over a {unit}, in which small differences of all tokens add up",
            f"write {level}: [0.5, 2.0], or {other}: {bounds} for the geometric mean",
        )
