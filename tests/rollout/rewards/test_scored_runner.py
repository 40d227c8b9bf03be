"""Episodes that rewards score once they were played."""

import asyncio
import pickle
from dataclasses import replace

import pytest

from roost.config.train import RolloutSettings
from roost.rollout.episode import Episode, EpisodeReward, Task, Transcript
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest, EpisodeSlot, release_slot
from roost.rollout.rewards.config import Route, Routing
from roost.rollout.rewards.reward import RewardFailed
from roost.rollout.rewards.scoring import RewardedEpisodeRunner, Rewards
from roost.trainer.feed import Feed
from tests.rollout.script import Script, completion, ran


class Hears:
    """A reward that does what a test says with the answers it hears."""

    def __init__(self, scores):
        self._scores = scores

    async def score(self, answer):
        return await self._scores(answer)

    async def close(self):
        pass


class Plays:
    """A runner of one episode that was scored by its scenario."""

    def __init__(self, score):
        self._score = score

    async def run_episode(self, asked):
        return Episode((), self._score, 1.0)


def scored_by(runner, scores, weight=1.0):
    return RewardedEpisodeRunner(runner, Rewards(Routing((Route("hears", weight=weight),)), {"hears": Hears(scores)}))


@pytest.mark.parametrize(
    ("score", "judged"),
    [
        pytest.param(EpisodeReward(9.0, "shown"), "shown", id="what is shown"),
        pytest.param(EpisodeReward(9.0, "shown", answer="answered"), "answered", id="the answer"),
        pytest.param(EpisodeReward(9.0, "shown", answer=""), "", id="an answer of nothing"),
    ],
)
def test_what_is_judged(score, judged):
    heard = []

    async def half(answer):
        heard.append((answer.text, answer.reward))
        return 0.5

    episode = asyncio.run(scored_by(Plays(score), half, weight=2.0).run_episode(EpisodeRequest(Task("t"), 0, 0)))
    assert heard == [(judged, 9.0)]
    assert episode.score == replace(score, reward=1.0, parts={"hears": 0.5})


def test_what_cannot_be_scored_has_failed():
    async def fails(answer):
        raise RewardFailed("no key")

    with pytest.raises(EpisodeFailed, match="it could not be scored: reward hears: no key"):
        asyncio.run(scored_by(Plays(EpisodeReward(1.0)), fails).run_episode(EpisodeRequest(Task("t"), 0, 0)))


def test_others_are_played_while_one_is_scored():
    """There is one place to play in: with it taken by what is scored, the second would never be played."""

    async def run():
        heard, both = [], asyncio.Event()

        async def together(answer):
            heard.append(answer)
            if len(heard) == 2:
                both.set()
            await both.wait()
            return 1.0

        async def plays(number, episode, attempt):
            return 0.0

        script, rollout = (
            Script(plays),
            RolloutSettings(prompts_per_step=1, num_generations=2, max_concurrent_episodes=1),
        )
        feed = Feed(script, scored_by(script.runner(rollout), together), rollout, 0, 11)
        feed.begin(0)
        (group,) = await feed.take(0)
        await feed.close()
        return group.rewards

    assert ran(run()) == (1.0, 1.0)


def test_a_place_that_was_left_is_left_once():
    """One more than there are would be free if its end counted again."""

    async def run():
        places = asyncio.Semaphore(1)
        for _ in range(2):
            async with EpisodeSlot(places):
                assert places.locked()
                release_slot()
                release_slot()
                assert not places.locked()
        await places.acquire()
        release_slot()  # of nobody who plays
        return places.locked()

    assert asyncio.run(run())


OWN = Route("scenario", weight=0.5)


@pytest.mark.parametrize(
    ("routing", "reward", "turn_rewards"),
    [
        pytest.param(Routing((Route("hears"),)), 0.5, (), id="rewards alone"),
        pytest.param(Routing((Route("hears"),), OWN), 2.0, (0.5, 1.0), id="beside the scenario's"),
        pytest.param(Routing((Route("hears", frozenset({"other"})),)), 3.0, (1.0, 2.0), id="of other tasks"),
    ],
)
def test_what_turns_earned_counts_as_the_scenario_s_reward_does(routing, reward, turn_rewards):
    """A critic is told what each turn earned: what does not count in the sum must not count there."""

    async def half(answer):
        return 0.5

    runner = RewardedEpisodeRunner(
        Plays(EpisodeReward(3.0, turn_rewards=(1.0, 2.0))), Rewards(routing, {"hears": Hears(half)})
    )
    score = ran(runner.run_episode(EpisodeRequest(Task("a"), 0, 0))).score
    assert (score.reward, score.turn_rewards) == (reward, turn_rewards)


def test_rewards_read_the_whole_conversation():
    heard = []

    async def reads(answer):
        heard.append(pickle.loads(pickle.dumps(answer)))
        return 0.0

    async def sample(token_ids, turn, max_tokens):
        return completion([(7, 8), (9,)][turn])

    transcript = Transcript(sample)

    async def talk():
        transcript.give([1, 2], [("user", "say it")])
        await transcript.take()
        transcript.give([3])
        await transcript.take()
        return Episode(transcript.sequences(), EpisodeReward(0.0), 1.0)

    class Talks:
        async def run_episode(self, asked):
            return await talk()

    asyncio.run(scored_by(Talks(), reads).run_episode(EpisodeRequest(Task("t"), 0, 0)))
    (answer,) = heard
    assert [(one["role"], one["content"]) for one in answer.messages] == [
        ("user", "say it"),
        ("assistant", "7 8"),
        ("context", "3"),
        ("assistant", "9"),
    ]
    assert (answer.question, answer.turns, answer.tokens) == ("say it", 2, 3)
