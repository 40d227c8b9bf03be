"""Sums over the turns and sequences of tokens that lie flat, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from roost.config.train import ImportanceSamplingLevel
from roost.learner.sample import Floats, Ints, Sample


def segment_sums(values: Tensor, segments: Tensor) -> Tensor:
    """For each token the sum over the tokens of its segment. The gradient of each token reaches all of them.

    >>> import torch
    >>> segment_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1])).tolist()
    [3.0, 3.0, 4.0]
    """
    count = int(segments.max()) + 1 if len(segments) else 0
    return values.new_zeros(count).index_add(0, segments, values)[segments]


def level_sums(values: Tensor, sequence: Tensor, turn: Tensor, level: ImportanceSamplingLevel) -> Tensor:
    """For each token the sum over what a ratio is taken of at this level: itself, its turn, or its sequence."""
    match level:
        case ImportanceSamplingLevel.TURN:
            return segment_sums(values, turn)
        case ImportanceSamplingLevel.TRAJECTORY:
            return segment_sums(values, sequence)
        case ImportanceSamplingLevel.TOKEN | ImportanceSamplingLevel.NONE:
            return values


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """Several sequences as one row of tokens.

    A `row` is a token whose next one is to be predicted: one that the policy made, of the same sequence.
    """

    token_ids: Ints
    positions: Ints  # from 0 in each sequence
    borders: Ints  # where sequences begin, and the end of the last
    rows: Ints
    targets: Ints  # the token after each row
    sequence: Ints  # of each row, numbered from 0
    turn: Ints  # of each target, numbered through over all sequences


def balanced(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Which sequences go together, so that no part has more than `limit` tokens and all have about as many.

    A sequence that is longer than the limit is alone. There are few parts, and the order within each is that given.

    >>> balanced([5, 3, 3, 9], limit=8)
    [[3], [0], [1, 2]]
    """
    if limit < 1:
        raise ValueError(f"a part holds {limit} tokens, but must hold at least 1")
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    tight = _first_fit(lengths, longest_first, limit)
    even = _least_filled(lengths, longest_first, len(tight))
    fits = all(len(part) == 1 or sum(lengths[index] for index in part) <= limit for part in even)
    return [sorted(part) for part in (even if fits else tight)]


def _first_fit(lengths: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = []
    filled: list[int] = []
    for index in order:
        room = next((part for part, size in enumerate(filled) if size + lengths[index] <= limit), None)
        if room is None:
            parts.append([index])
            filled.append(lengths[index])
        else:
            parts[room].append(index)
            filled[room] += lengths[index]
    return parts


def _least_filled(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in order:
        room = filled.index(min(filled))
        parts[room].append(index)
        filled[room] += lengths[index]
    return parts


def predicted(sample: Sample) -> npt.NDArray[np.bool_]:
    """Which tokens have a probability: those that the policy made, but never the first, which follows nothing."""
    made = sample.is_made
    made[:1] = False
    return made


def pack(samples: Sequence[Sample]) -> Packed:
    """The samples one after another. Without any there is one token, and none that is predicted."""
    if not samples:
        none = np.zeros(0, np.int64)
        return Packed(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([0, 1]), none, none, none, none)
    lengths = np.array([len(sample) for sample in samples])
    borders = np.concatenate([[0], lengths.cumsum()])
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    ends = np.flatnonzero(np.concatenate([predicted(sample) for sample in samples]))
    sequence = np.repeat(np.arange(len(samples)), lengths)[ends]
    turns = np.concatenate([sample.turns for sample in samples])[ends]
    _, turn = np.unique(sequence * (turns.max(initial=0) + 1) + turns, return_inverse=True)
    return Packed(
        token_ids=token_ids,
        positions=np.arange(len(token_ids)) - np.repeat(borders[:-1], lengths),
        borders=borders,
        rows=ends - 1,
        targets=token_ids[ends],
        sequence=sequence,
        turn=turn,
    )


def picked(samples: Sequence[Sample], arrays: Sequence[Floats]) -> Floats:
    """What arrays with an entry for each token say of the predicted ones, in the order of `Packed.rows`."""
    parts = [array[predicted(sample)] for sample, array in zip(samples, arrays, strict=True)]
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


def spread(samples: Sequence[Sample], values: Floats) -> list[Floats]:
    """The other way round: an array for each sample, with 0 for the tokens that are not predicted."""
    arrays, start = [], 0
    for sample in samples:
        where = predicted(sample)
        array = np.zeros(len(sample), np.float32)
        array[where] = values[start : start + int(where.sum())]
        start += int(where.sum())
        arrays.append(array)
    return arrays


Say = Callable[[Sequence[Sample]], list[Floats]]


def check_packing(say: Say, vocabulary: int, tolerance: float, model: str) -> None:
    """Raise if what is said of a sequence depends on others beside it, or on tokens that come after.

    Every log-probability would be wrong then, and nothing else would tell.
    """
    one, other = _sample(7, vocabulary, 1), _sample(9, vocabulary, 2)
    longer = _sample(12, vocabulary, 1)  # begins as the first one does
    alone = [say([sample])[0] for sample in (one, other)]
    beside = say([one, other])
    pairs = [*zip(alone, beside, strict=True), (alone[0], say([longer])[0][: len(one)])]
    apart = max(float(np.abs(first - second).max()) for first, second in pairs)
    if not apart <= tolerance:
        raise ValueError(
            f"{model} mixes sequences that are packed into one row, so it cannot be trained here: log-probabilities of "
            f"a sequence differ by up to {apart:.2g} with another beside it. Layers other than attention (state space, "
            "convolutions, linear attention) and attention of a model's own are not supported"
        )


def _sample(length: int, vocabulary: int, seed: int) -> Sample:
    """The first tokens of a sequence that follows from the seed."""
    return Sample.of_policy(np.random.default_rng(seed).integers(0, vocabulary, 16)[:length])
