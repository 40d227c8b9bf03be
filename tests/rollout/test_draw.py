import pytest

from roost.config.train import SamplingSettings
from roost.trainer.rollout_workers import FleetSamplers
from tests.rollout.script import completion, ran


class NotingFleet:
    """Answers with one token, and keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.ended = []

    async def generate(self, token_ids, sampling, episode=None):
        self.asked.append((token_ids, sampling, episode))
        return completion((1,))

    def end_episode(self, episode):
        self.ended.append(episode)


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        pytest.param(None, 9, id="the run's own"),
        pytest.param(4, 4, id="less"),
        pytest.param(50, 9, id="more is not given"),
    ],
)
def test_a_turn_is_drawn_as_the_run_says(asked, limit):
    fleet = NotingFleet()
    draws = FleetSamplers(
        fleet, SamplingSettings(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1), seed=3
    )
    ran(draws.open(12, 0, 0)([1, 2], 0, asked))
    token_ids, sampling, _ = fleet.asked[0]
    assert token_ids == [1, 2]
    assert (sampling.max_tokens, sampling.temperature) == (limit, 0.7)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 5, 0.1)


def test_the_episodes_of_a_group_go_to_one_engine_with_seeds_of_their_own():
    fleet = NotingFleet()
    draws = FleetSamplers(fleet, SamplingSettings(), seed=3)
    for episode, attempt, turn in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        ran(draws.open(12, episode, attempt)([1], turn, None))
    assert {episode for _, _, episode in fleet.asked} == {"group 12"}
    assert len({sampling.seed for _, sampling, _ in fleet.asked}) == 4
    draws.close(12)
    assert fleet.ended == ["group 12"]


def test_the_same_numbers_draw_the_same():
    seeds = []
    for _ in range(2):
        fleet = NotingFleet()
        ran(FleetSamplers(fleet, SamplingSettings(), seed=3).open(12, 1, 0)([1], 2, None))
        seeds.append(fleet.asked[0][1].seed)
    assert seeds[0] == seeds[1]
