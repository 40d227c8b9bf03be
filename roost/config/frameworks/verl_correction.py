"""Verl's rollout correction: importance weights and rejection between engine and learner."""

from __future__ import annotations

import math
from typing import Any

from roost.config.notations.words import IS_LEVELS, named
from roost.config.source import Section
from roost.config.train import ImportanceSamplingLevel, OldLogprobs

# Rules of verl that reject samples by bounds on a ratio, by their current and older names.
RS_LEVELS = {
    **dict.fromkeys(("token_k1", "token"), ImportanceSamplingLevel.TOKEN),
    **dict.fromkeys(("seq_sum_k1", "sequence"), ImportanceSamplingLevel.TRAJECTORY),
    **dict.fromkeys(("seq_mean_k1", "geometric"), ImportanceSamplingLevel.SEQUENCE),
}


def correction(section: Section, bypasses: bool) -> dict[str, Any]:
    """Importance sampling between engine and learner; with bypass_mode, the policy ratio does it, without weights."""
    bypasses = section.flag("bypass_mode", bypasses)
    level = named(section, "rollout_is", IS_LEVELS) if section.values.get("rollout_is") else None
    if bypasses and level is not None:
        _note_weights(section)
        level = None
    cap, bounds = _weight_bounds(section) if level is not None else (None, None)
    return {
        "rollout_is": level,
        "importance_weight_cap": cap,
        "rollout_is_batch_normalize": (not bypasses and section.flag("rollout_is_batch_normalize")) or None,
        "rollout_rejection": _rejection(section, {level.value: bounds} if level is not None and bounds else {}),
        "old_logprobs": OldLogprobs.ROLLOUT if bypasses else None,
    }


def _note_weights(section: Section) -> None:
    """Note that importance weights have no effect with bypass_mode."""
    why = "the ratio of ppo_clip is already against the engine; verl computes the weights for metrics only"
    fix = "remove it, or write bypass_mode: false"
    section.findings.note("RST-N068", section.where("rollout_is"), "has no effect with bypass_mode", why, fix)


def _weight_bounds(section: Section) -> tuple[float | None, list[float] | None]:
    """The cap of weights, or the bounds of a text such as 0.5_5.0, outside of which verl sets a weight to 0."""
    key = "rollout_is_threshold"
    written = section.values.get(key)
    bounds = _numbers(written) if isinstance(written, str) else []
    if len(bounds) == 1 and bounds[0] > 0:
        return bounds[0], None
    if len(bounds) != 2 or not 0 < bounds[0] < bounds[1]:
        return section.number(key), None
    section.findings.note(
        "RST-T048",
        section.where(key),
        f"leaves tokens with weights outside {bounds[0]:g} to {bounds[1]:g} out of the loss",
        "verl gives them weight 0, and counts them in the loss's mean, in KL and in entropy",
        "the loss is larger where many are outside; there is nothing to do",
    )
    return 0.0, bounds


def _numbers(text: str) -> list[float]:
    """The numbers of a text such as 0.5_5.0; none where it has other words.

    >>> _numbers("0.5_5.0"), _numbers("2"), _numbers("low_5")
    ([0.5, 5.0], [2.0], [])
    """
    try:
        return [float(part) for part in text.strip("'\"").split("_")]
    except ValueError:
        return []


def _rejection(section: Section, found: dict[str, Any]) -> dict[str, Any] | None:
    """Bounds of ratios by level; a bound of token_k2 (half the squared log ratio) is converted to one of ratios.

    Ratios are of learner to engine; verl's rules that end in k1 compare those of engine to learner.
    """
    words, limits = (
        [part.strip() for part in str(section.values.get(key) or "").strip("'\"").split(",") if part.strip()]
        for key in ("rollout_rs", "rollout_rs_threshold")
    )
    lower = section.number("rollout_rs_threshold_lower")
    for index, word in enumerate(words):
        limit = limits[min(index, len(limits) - 1)] if limits else ""
        bounds = _numbers(limit)
        is_pair = len(bounds) == 2 and word != "token_k2"
        if word in RS_LEVELS and (is_pair or len(bounds) == 1) and min(bounds) > 0:
            low = bounds[0] if is_pair else 1 / bounds[0] if lower is None else lower
            high = bounds[-1]
            if word.endswith("_k1"):
                if low == 0:
                    why, fix = f"{word} compares engine to learner, which Roost inverts", "write a number above 0"
                    section.error("RST-T093", "rollout_rs_threshold_lower", "is 0", why, fix)
                    continue
                low, high = 1 / high, 1 / low
            _narrow(found, RS_LEVELS[word], low, high)
        elif word == "token_k2" and len(bounds) == 1 and bounds[0] > 0:
            width = math.sqrt(2 * bounds[0])
            _narrow(found, ImportanceSamplingLevel.TOKEN, math.exp(-width), math.exp(width))
        else:
            limit = limit or "nothing"
            why = f"{word} with the threshold {limit} is none of Roost's bounds, which are of ratios by level"
            fix = f"use {', '.join(list(RS_LEVELS)[::2])} or token_k2, or write rollout_rejection in train"
            section.findings.warn("RST-T014", section.where("rollout_rs"), "is not followed", why, fix)
    return found or None


def _narrow(found: dict[str, Any], level: ImportanceSamplingLevel, low: float, high: float) -> None:
    """Add bounds of a level; with two rules of one level, both hold."""
    before = found.get(level.value, [low, high])
    found[level.value] = [max(low, before[0]), min(high, before[1])]
