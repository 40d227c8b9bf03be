import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.rollout.order import TaskOrder, draw_seed


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


def test_a_scenario_without_tasks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        TaskOrder(0, seed=1)


def test_no_two_draws_have_the_same_seed():
    names = list(itertools.product((1, 2), range(10), range(8), range(3), range(4)))
    assert len({draw_seed(*name) for name in names}) == len(names)
