"""Selection of the samples to learn from."""

import numpy as np
import pytest

from roost.config.train import AdvantageSettings
from roost.learner.advantages import downsample_group, select
from tests.grid import grid

ADVANTAGES = np.array([0.3, -0.3, 0.0, 0.01, -0.02])


@pytest.mark.parametrize(
    ("settings", "kept", "too_small", "not_positive"),
    [
        pytest.param({}, [0, 1, 2, 3, 4], 0, 0, id="all, even without advantage"),
        pytest.param({"min_abs_advantage": 0.02}, [0, 1, 4], 2, 0, id="as far as the least is far enough"),
        pytest.param({"positive_advantages_only": True}, [0, 3], 0, 3, id="zero is not positive"),
        pytest.param(
            {"min_abs_advantage": 0.1, "positive_advantages_only": True}, [0], 3, 1, id="each is counted for one reason"
        ),
        pytest.param({"min_abs_advantage": 1.0}, [], 5, 0, id="none is left"),
    ],
)
def test_selection(settings, kept, too_small, not_positive):
    chosen = select(ADVANTAGES, AdvantageSettings(**settings))
    assert chosen.kept.tolist() == kept
    assert (chosen.too_small, chosen.not_positive) == (too_small, not_positive)
    assert chosen.dropped == 5 - len(kept)


def test_nothing_to_select():
    chosen = select(np.array([]), AdvantageSettings(min_abs_advantage=0.1))
    assert (chosen.kept.tolist(), chosen.dropped) == ([], 0)


def rstar2_quotas(positive, others, keep, least_positive, least_others):
    """Numbers of both kinds that RLinf's down-sampling takes, where it fills the group."""
    size = positive + others
    of_others, of_positive = round(others * keep / size), round(positive * keep / size)
    if of_others <= min(least_others, others):
        of_others = min(least_others, others)
        of_positive = keep - of_others
    if of_positive <= min(least_positive, positive):
        of_positive = min(least_positive, positive)
        of_others = keep - of_positive
    return of_positive, of_others


@grid("least", [(0, 0), (2, 2), (1, 3)])
@grid("keep", [4, 8])
@grid("positive", range(17))
def test_samples_of_a_group_are_kept_in_proportion(positive, keep, least):
    rewards = np.random.default_rng(positive).permutation([1.0] * positive + [0.0] * (16 - positive)).tolist()
    settings = AdvantageSettings(keep_generations=keep, keep_positive=least[0], keep_others=least[1])
    kept = downsample_group(rewards, [0.0] * 16, settings)
    assert len(kept) == len(set(kept)) == keep
    found = [sum(rewards[index] > 0 for index in kept), sum(rewards[index] <= 0 for index in kept)]
    assert found == list(rstar2_quotas(positive, 16 - positive, keep, *least))
    firsts = [index for index in range(16) if rewards[index] > 0][: found[0]]
    assert [index for index in kept if rewards[index] > 0] == firsts


def test_a_group_that_is_small_enough_is_kept():
    assert downsample_group([1.0, 0.0], [0.0, 0.0], AdvantageSettings(keep_generations=2)) == [0, 1]
    assert downsample_group([1.0, 0.0], [0.0, 0.0], AdvantageSettings()) == [0, 1]


def test_positive_samples_are_kept_by_their_penalty():
    settings = AdvantageSettings(keep_generations=2)
    assert downsample_group([1.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.9, 0.0], settings) == [1, 2]
