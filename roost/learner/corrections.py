"""Corrections for what the engine's and the learner's log-probs differ by: importance weights and rejected tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roost.config.learning import LossSettings, Rejection
from roost.config.train_choices import ImportanceSamplingLevel
from roost.learner.packing import level_values, segment_sums

# Clamp for log-ratios, after summation. Sums over thousands of tokens reach hundreds, where exp is infinite, and
# infinity times a gradient or an advantage of 0 is NaN. A ratio of exp(20), 5e8, is outside any clip range. A clamped
# ratio has no gradient; unclamped, its gradient would dominate the step.
LARGEST_LOG_RATIO = 20.0


def ratios(
    logprobs: Tensor,
    old: Tensor,
    sequence: Tensor,
    turn: Tensor,
    level: ImportanceSamplingLevel,
    clamp: tuple[float, float] = (-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO),
) -> Tensor:
    """Importance ratios per token, turn or sequence, with one entry per token.

    With d = logprob - old: token exp(d); turn and trajectory exp(Σ d) over their tokens; turn_mean and sequence (GSPO)
    exp(Σ d / n) over their n tokens.

    >>> turns = torch.tensor([0, 0, 1])
    >>> halves, quarters = torch.tensor([0.5, 0.5, 0.5]).log(), torch.tensor([0.25, 0.25, 0.25]).log()
    >>> for level in (ImportanceSamplingLevel.TURN, ImportanceSamplingLevel.TURN_MEAN):
    ...     ratios(halves, quarters, torch.zeros_like(turns), turns, level).round(decimals=4).tolist()
    [4.0, 4.0, 2.0]
    [2.0, 2.0, 2.0]
    """
    total = level_values(logprobs - old, sequence, turn, level)
    return total.clamp(*clamp).exp()


@torch.no_grad()
def importance_weights(
    learner: Tensor,
    engine: Tensor,
    sequence: Tensor,
    turn: Tensor,
    level: ImportanceSamplingLevel,
    cap: float | None,
) -> Tensor:
    """Truncated importance weights, min(ratio of learner to engine, cap), without a gradient.

    The cap trades bias for variance: without it, a few unlikely tokens would outweigh all others.
    """
    found = ratios(learner, engine, sequence, turn, level)
    return found.clamp(max=cap) if cap else found


@torch.no_grad()
def kept_tokens(
    learner: Tensor, engine: Tensor, sequence: Tensor, turn: Tensor, rules: tuple[Rejection, ...]
) -> Tensor:
    """Mask of the tokens that all rules keep: low <= value of the token's unit <= high.

    The value is the ratio of learner to engine at the rule's level, or the difference of their probabilities, summed
    (turn, trajectory) or averaged (turn_mean, sequence) over the unit.

    >>> halves, given, places = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.1, 0.4]).log(), torch.tensor([0, 0])
    >>> kept_tokens(halves, given, places, places, (Rejection(ImportanceSamplingLevel.TOKEN, 0.5, 2.0),)).tolist()
    [False, True]
    """
    kept = torch.ones(len(learner), dtype=torch.bool, device=learner.device)
    for rule in rules:
        if rule.of_difference:
            values = level_values(learner.exp() - engine.exp(), sequence, turn, rule.level)
        else:
            values = ratios(learner, engine, sequence, turn, rule.level)
        kept &= (values >= rule.low) & (values <= rule.high)
    return kept


@dataclass(frozen=True, eq=False, slots=True)
class Correction:
    """Weights of tokens and the mask of those that are learnt from; None where the settings ask for none."""

    weights: Tensor | None
    kept: Tensor | None


def correction(learner: Tensor, engine: Tensor, sequence: Tensor, turn: Tensor, settings: LossSettings) -> Correction:
    """The correction that the settings ask for; `learner` are log-probs before the first optimizer step."""
    level, rules = settings.weight_level, settings.rejections
    weights = kept = None
    if level is not ImportanceSamplingLevel.NONE:
        weights = importance_weights(learner, engine, sequence, turn, level, settings.importance_weight_cap)
    if rules:
        kept = kept_tokens(learner, engine, sequence, turn, rules)
    return Correction(weights, kept)


def units_of(sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel) -> Tensor:
    """Index of each token's unit at a level."""
    match level:
        case ImportanceSamplingLevel.TURN | ImportanceSamplingLevel.TURN_MEAN:
            return turn
        case ImportanceSamplingLevel.TRAJECTORY | ImportanceSamplingLevel.SEQUENCE:
            return sequence
        case ImportanceSamplingLevel.TOKEN | ImportanceSamplingLevel.NONE:
            return torch.arange(len(sequence), device=sequence.device)


def mean_over_units(values: Tensor, sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel) -> float:
    """Mean over the units of a level of values that are equal within each; 1 without tokens.

    >>> where = torch.tensor([0, 0, 1])
    >>> mean_over_units(torch.tensor([2.0, 2.0, 1.0]), where, where, ImportanceSamplingLevel.SEQUENCE)
    1.5
    """
    units = units_of(sequence, turn, level)
    if not len(units):
        return 1.0
    shares = 1 / segment_sums(torch.ones_like(values), units)
    return float((values * shares).sum() / shares.sum())
