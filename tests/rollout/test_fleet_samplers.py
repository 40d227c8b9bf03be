import asyncio
from types import SimpleNamespace

import pytest

from roost.config.train import (
    LearnerSettings,
    LossSettings,
    OldLogprobs,
    RolloutLogprobs,
    RolloutSettings,
    SamplingSettings,
    TrainSettings,
)
from roost.engines.protocol import EngineRefused
from roost.rollout.episode import TurnOptions
from roost.trainer.samplers import FleetSamplers, joint_generations, logprob_interval, samplers_of
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
    samplers = FleetSamplers(
        fleet, SamplingSettings(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1), seed=3
    )
    ran(samplers.open(12, 0, 0)([1, 2], 0, asked))
    token_ids, sampling, _ = fleet.asked[0]
    assert token_ids == [1, 2]
    assert (sampling.max_tokens, sampling.temperature) == (limit, 0.7)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 5, 0.1)


def test_the_episodes_of_a_group_go_to_one_engine_with_seeds_of_their_own():
    fleet = NotingFleet()
    samplers = FleetSamplers(fleet, SamplingSettings(), seed=3)
    for episode, attempt, turn in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        ran(samplers.open(12, episode, attempt)([1], turn, None))
    assert {episode for _, _, episode in fleet.asked} == {"group 12"}
    assert len({sampling.seed for _, sampling, _ in fleet.asked}) == 4
    samplers.close(12)
    assert fleet.ended == ["group 12"]


def test_the_same_numbers_draw_the_same():
    seeds = []
    for _ in range(2):
        fleet = NotingFleet()
        ran(FleetSamplers(fleet, SamplingSettings(), seed=3).open(12, 1, 0)([1], 2, None))
        seeds.append(fleet.asked[0][1].seed)
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (SamplingSettings(top_p=0.9, sampling_mask_replay=True), True),
        (SamplingSettings(top_p=0.9), False),
        (SamplingSettings(top_k=1_000_000, sampling_mask_replay=True), False),  # all tokens
    ],
)
def test_masks_are_requested_to_be_replayed(settings, expected):
    fleet = NotingFleet()
    ran(FleetSamplers(fleet, settings, seed=3).open(12, 1, 0)([1], 2, None))
    assert fleet.asked[0][1].return_sampling_mask is expected


@pytest.mark.parametrize("replays", [True, False])
def test_experts_are_requested_to_be_replayed(replays):
    fleet = NotingFleet()
    ran(FleetSamplers(fleet, SamplingSettings(router_replay=replays), seed=3).open(12, 1, 0)([1], 2, None))
    assert fleet.asked[0][1].return_routed_experts is replays


def test_strings_of_settings_end_turns_beside_those_of_the_agent():
    fleet, options = NotingFleet(), TurnOptions(stop=("</a>", "</b>"))
    settings = SamplingSettings(stop_strings=("</b>", "</c>"), min_new_tokens=2, repetition_penalty=1.1)
    ran(FleetSamplers(fleet, settings, seed=3).open(12, 1, 0)([1], 2, None, options))
    asked = fleet.asked[0][1]
    assert (asked.stop, asked.min_tokens, asked.repetition_penalty) == (("</a>", "</b>", "</c>"), 2, 1.1)


class GroupFleet(NotingFleet):
    """Answers requests for several completions when it is let."""

    def __init__(self, error=None):
        super().__init__()
        self.together, self.error = [], error
        self.may_answer = asyncio.Event()

    async def generate_n(self, token_ids, sampling, n, episode=None):
        self.together.append((token_ids, sampling.seed, n, episode))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [completion((sampling.seed + index,)) for index in range(n)]


def first_turns(samplers, episodes, attempt=0):
    return [asyncio.create_task(samplers.open(12, episode, attempt)([1, 2], 0, None)) for episode in episodes]


async def sent(fleet, count=1):
    while len(fleet.together) < count:
        await asyncio.sleep(0)


def test_first_turns_of_a_group_are_one_request_with_the_seeds_they_have_alone():
    async def turns():
        alone, fleet = NotingFleet(), GroupFleet()
        await asyncio.gather(*first_turns(FleetSamplers(alone, SamplingSettings(), seed=3), range(4)))
        fleet.may_answer.set()
        made = await asyncio.gather(
            *first_turns(FleetSamplers(fleet, SamplingSettings(), seed=3, group_size=4), range(4))
        )
        assert [answer.token_ids[0] for answer in made] == [sampling.seed for _, sampling, _ in alone.asked]
        assert [(ids, n, label) for ids, _, n, label in fleet.together] == [((1, 2), 4, "group 12")]
        assert not fleet.asked

    ran(turns())


def test_a_group_that_is_not_whole_is_sent_after_a_moment_in_runs():
    async def turns():
        fleet = GroupFleet()
        fleet.may_answer.set()
        made = await asyncio.gather(
            *first_turns(FleetSamplers(fleet, SamplingSettings(), seed=3, group_size=8), (5, 0, 1))
        )
        first = fleet.together[0][1]
        assert [(seed - first, n) for _, seed, n, _ in fleet.together] == [(0, 2), (5, 1)]
        assert [answer.token_ids[0] - first for answer in made] == [5, 0, 1]

    ran(turns())


def test_other_attempts_and_turns_are_requests_of_their_own():
    fleet = NotingFleet()
    samplers = FleetSamplers(fleet, SamplingSettings(), seed=3, group_size=4)
    ran(samplers.open(12, 0, 1)([1], 0, None))
    ran(samplers.open(12, 0, 0)([1], 1, None))
    assert len(fleet.asked) == 2


def test_a_group_request_ends_when_the_last_episode_is_cancelled_and_not_before():
    async def turns():
        fleet = GroupFleet()
        samplers = FleetSamplers(fleet, SamplingSettings(), seed=3, group_size=2)
        one, other = first_turns(samplers, range(2))
        await sent(fleet)
        one.cancel()
        fleet.may_answer.set()
        assert (await other).token_ids == (fleet.together[0][1] + 1,)
        fleet.may_answer.clear()
        both = first_turns(samplers, range(2))
        await sent(fleet, 2)
        for each in both:
            each.cancel()
        await asyncio.wait(both)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    ran(turns())


def test_an_error_of_a_group_request_fails_each_episode():
    async def turns():
        fleet = GroupFleet(EngineRefused("too long"))
        fleet.may_answer.set()
        samplers = FleetSamplers(fleet, SamplingSettings(), seed=3, group_size=2)
        made = await asyncio.gather(*first_turns(samplers, range(2)), return_exceptions=True)
        assert [str(each) for each in made] == ["too long"] * 2

    ran(turns())


@pytest.mark.parametrize(
    ("rollout", "single_turn", "count"),
    [
        pytest.param({}, True, 8, id="joint"),
        pytest.param({}, False, 1, id="several turns"),
        pytest.param({"extra_generations": 2}, True, 1, id="the slowest are cut off"),
        pytest.param({"rollout_fraction": 0.5}, True, 1, id="a part is waited for"),
        pytest.param({"max_new_tokens": 65}, True, 1, id="long completions"),
    ],
)
def test_generations_are_joint_only_where_none_is_waited_for(rollout, single_turn, count):
    sampling = SamplingSettings(max_new_tokens=rollout.pop("max_new_tokens", 64))
    settings = SimpleNamespace(rollout=RolloutSettings(num_generations=8, **rollout), sampling=sampling)
    assert joint_generations(settings, SimpleNamespace(single_turn=single_turn)) == count


def test_log_probs_are_requested_of_every_nth_group_and_seeds_only_if_there_is_one():
    fleet = NotingFleet()
    samplers = FleetSamplers(fleet, SamplingSettings(), seed=None, logprobs_every=4)
    for number in range(8, 14):
        ran(samplers.open(number, 0, 0)([1], 0, None))
    assert [sampling.logprobs for _, sampling, _ in fleet.asked] == [True, False, False, False, True, False]
    assert {sampling.seed for _, sampling, _ in fleet.asked} == {None}


@pytest.mark.parametrize(
    ("engine", "train", "single_turn", "every"),
    [
        pytest.param("vllm", {}, True, 8, id="a few of many"),
        pytest.param("vllm", {"prompts_per_step": 1024}, True, 16, id="more of very many"),
        pytest.param("vllm", {"prompts_per_step": 3}, True, 1, id="all of few"),
        pytest.param("vllm", {"old_logprobs": OldLogprobs.DECOUPLED}, True, 1, id="the loss uses them"),
        pytest.param("vllm", {"max_logprob_mismatch": 0.5}, True, 1, id="a limit compares them"),
        pytest.param("vllm", {}, False, 1, id="agents may read them"),
        pytest.param("torch", {}, True, 1, id="cheap on the built-in engine"),
        pytest.param("vllm", {"rollout_logprobs": RolloutLogprobs.ALL}, True, 1, id="all as written"),
        pytest.param("torch", {"rollout_logprobs": RolloutLogprobs.SOME}, False, 8, id="some as written"),
    ],
)
def test_log_probs_that_nobody_uses_are_not_requested(engine, train, single_turn, every):
    loss = LossSettings(**{name: train.pop(name) for name in ("old_logprobs", "max_logprob_mismatch") if name in train})
    rollout = RolloutSettings(**{"prompts_per_step": 32, **train})
    settings = TrainSettings(LearnerSettings("model", loss=loss), engine=engine, rollout=rollout)
    assert logprob_interval(settings, SimpleNamespace(single_turn=single_turn)) == every


@pytest.mark.parametrize(
    ("engine", "wanted", "is_seeded"),
    [("torch", None, True), ("vllm", None, False), ("vllm", True, True), ("torch", False, False)],
)
def test_requests_are_seeded_where_it_is_cheap_or_written(engine, wanted, is_seeded):
    fleet = NotingFleet()
    settings = TrainSettings(LearnerSettings("model"), engine=engine, rollout=RolloutSettings(request_seeds=wanted))
    for samplers in samplers_of(fleet, settings, SimpleNamespace(single_turn=True)).values():
        ran(samplers.open(0, 0, 0)([1], 1, None))
    assert {sampling.seed is not None for _, sampling, _ in fleet.asked} == {is_seeded}
