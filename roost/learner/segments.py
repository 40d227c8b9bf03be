"""Sums over the turns and sequences of tokens that lie flat, one after another."""

from __future__ import annotations

from torch import Tensor

from roost.config.training import RatioLevel


def segment_sums(values: Tensor, segments: Tensor) -> Tensor:
    """For each token the sum over the tokens of its segment. The gradient of each token reaches all of them.

    >>> import torch
    >>> segment_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 3.0, 4.0]
    """
    count = int(segments.max()) + 1 if len(segments) else 0
    return values.new_zeros(count).index_add(0, segments, values)[segments]


def level_sums(values: Tensor, sequence: Tensor, turn: Tensor, level: RatioLevel) -> Tensor:
    """For each token the sum over what a ratio is taken of at this level: itself, its turn, or its sequence."""
    match level:
        case RatioLevel.TURN:
            return segment_sums(values, turn)
        case RatioLevel.TRAJECTORY:
            return segment_sums(values, sequence)
        case RatioLevel.TOKEN | RatioLevel.NONE:
            return values
