import pytest

from roost.config.train import RolloutSettings
from roost.rollout.episode_runner import may_end, needed_of_group

RECIPE = {
    "num_generations": 6,
    "rollout_fraction": 0.9,
    "group_fraction": 0.75,
}  # 240 samples: from 216 on, 4 of every prompt


@pytest.mark.parametrize(
    ("settings", "finished", "ends"),
    [
        pytest.param({"num_generations": 2}, [2, 2], True, id="all are there"),
        pytest.param({"num_generations": 2}, [2, 1], False, id="one is missing"),
        pytest.param(RECIPE, [6] * 32 + [4] * 6 + [0] * 2, False, id="a group without any"),
        pytest.param(RECIPE, [6] * 28 + [4] * 12, True, id="just enough"),
        pytest.param(RECIPE, [6] * 27 + [5] + [4] * 12, False, id="one too few in all"),
        pytest.param(RECIPE, [6] * 39 + [3], False, id="one too few in a group"),
        pytest.param(
            {"num_generations": 2, "rollout_fraction": 0.75}, [9, 1], False, id="surplus of one does not help others"
        ),
        pytest.param(
            {"num_generations": 4, "rollout_fraction": 0.0, "group_fraction": 0.0}, [1, 1], True, id="one of each"
        ),
        pytest.param(
            {"num_generations": 4, "rollout_fraction": 0.0, "group_fraction": 0.0}, [1, 0], False, id="never none"
        ),
    ],
)
def test_when_stragglers_are_cut_off(settings, finished, ends):
    rollout = RolloutSettings(**settings)
    assert may_end(finished, [rollout.num_generations] * len(finished), rollout) == ends


@pytest.mark.parametrize(
    ("finished", "possible", "ends"),
    [
        pytest.param([6] * 28 + [4] * 11 + [1], [6] * 39 + [1], True, id="over with fewer than it needs"),
        pytest.param([6] * 28 + [4] * 11 + [0], [6] * 39 + [0], True, id="over with none"),
        pytest.param([6] * 39 + [2], [6] * 39 + [3], False, id="one more can come where too few are there"),
        pytest.param([6] * 39 + [3], [6] * 39 + [3], True, id="all that can come"),
        pytest.param([3] * 4 + [6] * 6, [3] * 4 + [6] * 6, True, id="what failed is no part of the step's samples"),
        pytest.param([1] + [4] * 39, [1] + [6] * 39, False, id="one that is over is no reason to cut off early"),
    ],
)
def test_nobody_waits_for_what_has_failed(finished, possible, ends):
    assert may_end(finished, possible, RolloutSettings(**RECIPE)) == ends


@pytest.mark.parametrize(("size", "fraction", "needed"), [(6, 0.75, 4), (4, 0.5, 2), (4, 0.1, 1), (8, 1.0, 8)])
def test_how_many_every_group_needs(size, fraction, needed):
    assert needed_of_group(RolloutSettings(num_generations=size, group_fraction=fraction)) == needed
