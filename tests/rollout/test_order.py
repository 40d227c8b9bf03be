import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from roost.config.data import shares_of_batch
from roost.rollout.order import MixedOrder, TaskOrder, sample_seed


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 3))
def test_every_task_comes_once_in_every_epoch(size, seed, epoch):
    order = TaskOrder(size, seed)
    assert sorted(order.index(epoch * size + place) for place in range(size)) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        (seed, epoch): tuple(TaskOrder(20, seed).index(epoch * 20 + place) for place in range(20))
        for seed, epoch in itertools.product(range(3), range(3))
    }
    assert len(set(orders.values())) == len(orders)


def test_the_order_is_that_of_older_runs():
    """They are resumed by the number of the next task."""
    epochs = [np.random.default_rng((5, epoch)).permutation(9).tolist() for epoch in range(6)]
    order = TaskOrder(9, seed=5)
    for number in (*range(54), 0, 53, 7, 30):
        assert order.index(number) == epochs[number // 9][number % 9]


def test_an_epoch_is_put_in_order_once(monkeypatch):
    """Tasks of this epoch and of the one before come by turns in a resumed run, with those of evaluations between."""
    made = []
    whole = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(seed) or whole(seed))
    training, evaluation = TaskOrder(50, seed=3), TaskOrder(20, seed=3)
    for place in range(20):
        training.index(place), training.index(50 + place), evaluation.index(place)
    assert len(made) == 3


def test_the_incomplete_last_batch_of_an_epoch_is_dropped():
    order = TaskOrder(10, seed=3, used=8)
    first, second = ([order.index(number) for number in range(start, start + 8)] for start in (0, 8))
    assert len(set(first)) == len(set(second)) == 8 and first != second


def test_every_batch_has_its_shares():
    """ROLL's rule: the whole part of each share, and the rest for the last; each kind goes through its own epochs."""
    kinds = [np.arange(0, 10), np.arange(10, 14), np.arange(14, 34)]
    counts = shares_of_batch([0.4, 0.3, 0.3], 8)
    assert counts == [3, 2, 3]
    order = MixedOrder(kinds, counts, seed=1)
    batches = [[order.index(number) for number in range(start, start + 8)] for start in range(0, 160, 8)]
    for batch in batches:
        assert [sum(index in kind for index in batch) for kind in kinds] == counts
    of_second = [index for batch in batches for index in batch if 10 <= index < 14]
    assert all(sorted(of_second[start : start + 4]) == [10, 11, 12, 13] for start in range(0, 40, 4))


def test_a_scenario_without_tasks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        TaskOrder(0, seed=1)


def test_no_two_draws_have_the_same_seed():
    names = list(itertools.product((1, 2), range(10), range(8), range(3), range(4)))
    assert len({sample_seed(*name) for name in names}) == len(names)
