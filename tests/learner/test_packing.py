"""Packing: nothing is lost, no part is too large, and what is computed comes back to its tokens."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roost.learner.sample import NOT_GENERATED, Sample, balanced, pack, picked, predicted, spread
from tests.learner.random_samples import random_samples


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_every_sequence_is_in_one_part_that_is_not_too_large(lengths, limit):
    parts = balanced(lengths, limit)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in part) <= limit or len(part) == 1 for part in parts)
    assert len(parts) <= 2 * -(-sum(lengths) // limit), "most parts are more than half full"


@pytest.mark.parametrize(
    ("lengths", "limit", "parts"),
    [
        pytest.param([], 8, [], id="nothing"),
        pytest.param([2, 2, 2], 8, [[0, 1, 2]], id="all together"),
        pytest.param([9, 1, 1], 8, [[0], [1, 2]], id="longer than the limit: alone"),
        pytest.param([5, 5, 1, 1], 10, [[0, 2], [1, 3]], id="balanced rather than filled up"),
    ],
)
def test_parts(lengths, limit, parts):
    assert balanced(lengths, limit) == parts


def test_a_part_must_hold_something():
    with pytest.raises(ValueError, match="holds 0 tokens"):
        balanced([1], 0)


def test_packed_samples():
    one = _sample([10, 11, 12], turns=[-1, 0, 0])
    two = _sample([20, 21, 22, 23], turns=[-1, 4, -1, 6])
    packed = pack([one, two])
    assert packed.token_ids.tolist() == [10, 11, 12, 20, 21, 22, 23]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.borders.tolist() == [0, 3, 7]
    assert packed.rows.tolist() == [0, 1, 3, 5]
    assert packed.targets.tolist() == [11, 12, 21, 23]
    assert packed.sequence.tolist() == [0, 0, 1, 1]
    assert packed.turn.tolist() == [0, 0, 1, 2]


def test_the_first_token_is_never_predicted():
    made = _sample([1, 2], turns=[0, 0])
    assert predicted(made).tolist() == [False, True]
    assert made.turns.tolist() == [0, 0]


def test_without_samples_there_is_a_token_to_run():
    packed = pack([])
    assert (len(packed.token_ids), len(packed.rows)) == (1, 0)


def test_what_is_picked_is_spread_to_the_same_places():
    samples = random_samples(5, 9, 12)
    arrays = [np.where(predicted(sample), sample.logprobs, 0).astype(np.float32) for sample in samples]
    back = spread(samples, picked(samples, arrays))
    assert all((one == other).all() for one, other in zip(arrays, back, strict=True))


def _sample(token_ids, turns):
    zeros = np.zeros(len(turns), np.float32)
    assert NOT_GENERATED == -1
    return Sample(np.array(token_ids), np.array(turns), zeros, zeros)
