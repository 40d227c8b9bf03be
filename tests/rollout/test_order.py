import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.rollout.order import TaskOrder, _permutation, sample_seed


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


def test_an_epoch_is_put_in_order_once():
    """Tasks of this epoch and of the one before come by turns in a resumed run, with those of evaluations between."""
    _permutation.cache_clear()
    training, evaluation = TaskOrder(50, seed=3), TaskOrder(20, seed=3)
    for place in range(20):
        training.index(place), training.index(50 + place), evaluation.index(place)
    assert _permutation.cache_info().misses == 3


def test_a_scenario_without_tasks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        TaskOrder(0, seed=1)


def test_no_two_draws_have_the_same_seed():
    names = list(itertools.product((1, 2), range(10), range(8), range(3), range(4)))
    assert len({sample_seed(*name) for name in names}) == len(names)
