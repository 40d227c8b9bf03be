import random

import pytest
from hypothesis import given, settings, strategies as st

from roost.trainer.feed import StartedGroup, choose, may_begin


def over(number, began_at):
    return StartedGroup(number, began_at, is_over=True)


def under_way(number, began_at):
    return StartedGroup(number, began_at, is_over=False)


@pytest.mark.parametrize(
    ("case", "begin"),
    [
        pytest.param({"consumed": 0, "in_flight": 0, "version": 0, "max_staleness": 0}, 4, id="no staleness: one step"),
        pytest.param(
            {"consumed": 0, "in_flight": 0, "version": 0, "max_staleness": 2}, 12, id="staleness of 2: three steps"
        ),
        pytest.param(
            {"consumed": 4, "in_flight": 8, "version": 1, "max_staleness": 2}, 4, id="each version begins one more"
        ),
        pytest.param({"consumed": 4, "in_flight": 12, "version": 1, "max_staleness": 2}, 0, id="asked twice"),
        pytest.param(
            {"consumed": 0, "in_flight": 0, "version": 7, "max_staleness": 1, "first_version": 7}, 8, id="resumed"
        ),
        pytest.param({"consumed": 9, "in_flight": 9, "version": 0, "max_staleness": 0}, 0, id="never less than none"),
    ],
)
def test_how_many_may_begin(case, begin):
    assert may_begin(groups=4, **case) == begin


@pytest.mark.parametrize(
    ("in_flight", "case", "chosen"),
    [
        pytest.param([over(1, 0), over(0, 0)], {}, (0, 1), id="all of a step, in order"),
        pytest.param([over(0, 0), under_way(1, 0)], {}, None, id="without staleness all are waited for"),
        pytest.param([over(0, 0)], {}, None, id="too few"),
        pytest.param(
            [under_way(0, 0), over(1, 0), over(2, 0), over(3, 0)], {"max_staleness": 1}, (1, 2), id="slow ones may wait"
        ),
        pytest.param(
            [under_way(0, 0), over(1, 0), over(2, 1), over(3, 1)],
            {"max_staleness": 1, "version": 1},
            None,
            id="but not beyond the staleness",
        ),
        pytest.param(
            [under_way(0, 0), under_way(1, 0), under_way(2, 0), under_way(3, 0), over(4, 1), over(5, 1)],
            {"max_staleness": 2, "version": 1},
            None,
            id="nor may more wait than the next step takes",
        ),
        pytest.param(
            [under_way(0, 0), under_way(1, 0), over(2, 0), over(3, 0), over(4, 1), over(5, 1)],
            {"max_staleness": 2, "version": 1},
            (2, 3),
            id="as many as that may wait",
        ),
        pytest.param([over(0, 0), under_way(1, 0)], {"count": 1, "left": 1}, (0,), id="a part of a step"),
        pytest.param([under_way(0, 0), under_way(1, 0), over(2, 0)], {"count": 1}, None, id="the last part of one"),
    ],
)
def test_which_are_taken(in_flight, case, chosen):
    assert choose(in_flight, **{"count": 2, "version": 0, "max_staleness": 0, "groups": 2, **case}) == chosen


@settings(max_examples=300)
@given(
    groups=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    first=st.integers(0, 5),
    parts=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_no_group_is_ever_too_old_whatever_the_order_they_finish_in(groups, max_staleness, first, parts, seed):
    chance = random.Random(seed)
    in_flight, consumed, begun = {}, [], 0

    def begin(count, version):
        nonlocal begun
        for _ in range(count):
            in_flight[begun] = under_way(begun, version)
            begun += 1

    for version in range(first, first + 8):
        begin(may_begin(len(consumed), len(in_flight), version, groups, max_staleness, first), version)
        left = groups
        while left:
            assert sum(group.began_at <= version - max_staleness for group in in_flight.values()) <= left
            count = min(left, -(-groups // parts))
            chosen = choose(list(in_flight.values()), count, version, max_staleness, groups, left - count)
            if chosen is None:
                playing = [group for group in in_flight.values() if not group.is_over]
                assert playing, "all are over, and still none is taken"
                one = chance.choice(playing)
                if chance.random() < 0.2:
                    del in_flight[one.number]
                    begin(1, version)  # it was lost or taught nothing: another takes its place
                else:
                    in_flight[one.number] = over(one.number, one.began_at)
                continue
            assert len(set(chosen)) == count
            for number in chosen:
                group = in_flight.pop(number)
                assert group.is_over
                assert version - max_staleness <= group.began_at <= version
                consumed.append(number)
                left -= 1
    assert len(consumed) == len(set(consumed)) == 8 * groups
