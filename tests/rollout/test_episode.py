import numpy as np
import pytest

from roost.rollout.episode import NOT_GENERATED, Episode, EpisodeReward, Group, Task, Tokens


def episode(versions=(), reward=0.0):
    made = len(versions)
    tokens = Tokens(
        np.arange(made + 1),
        np.array([NOT_GENERATED] + [0] * made),
        np.zeros(made + 1, np.float32),
        np.array([NOT_GENERATED, *versions]),
    )
    return Episode((tokens,), EpisodeReward(reward), 1.0)


def group(*episodes, began_at=3):
    return Group(0, Task("one"), began_at, episodes)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        pytest.param((1.0, 1.0), True, id="the same"),
        pytest.param((0.3, 0.1 + 0.2), True, id="the same but for rounding"),
        pytest.param((0.0, 0.001), False, id="not the same"),
        pytest.param((5.0,), True, id="one"),
        pytest.param((), True, id="none"),
    ],
)
def test_groups_that_teach_nothing(rewards, equal):
    assert group(*(episode(reward=reward) for reward in rewards)).is_equal == equal


def test_what_was_shown_does_not_count_as_made():
    assert episode((1, 1, 2)).completion_tokens == 3
    assert episode(()).completion_tokens == 0
