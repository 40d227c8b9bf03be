import asyncio

import numpy as np
import pytest
import torch

from roost.rollout.episode import Task
from roost.rollout.rewards.config import SCENARIO, Route, Routing
from roost.rollout.rewards.reward import Answer, RewardFailed, Scored, as_scored
from roost.rollout.rewards.scoring import Rewards
from tests.limits import HANG_S


class Says:
    """A reward that gives what it is told to give, or raises it."""

    def __init__(self, value):
        self.value, self.asked, self.is_closed = value, 0, False

    async def score(self, answer):
        self.asked += 1
        await asyncio.sleep(3600 if self.value == "hang" else 0)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    async def close(self):
        self.is_closed = True


def answer_of(tag, reward=9.0):
    return Answer(Task("t", tag=tag), "text", reward)


def scored(rewards, answer, **more):
    routes = tuple(Route(name, frozenset(tags), weight) for name, (_, tags, weight) in rewards.items())
    local = {name: reward for name, (reward, *_) in rewards.items()}
    limit_s = 0.2 if any(reward.value == "hang" for reward in local.values()) else HANG_S
    return asyncio.run(Rewards(Routing(routes, **more), local, limit_s=limit_s).score(answer)).reward


def test_those_that_take_it_are_added_up_and_others_not_asked():
    code = Says(5.0)
    rewards = {"math": (Says(1.0), {"math"}, 2.0), "code": (code, {"code"}, 1.0), "all": (Says(True), (), 0.5)}
    assert scored(rewards, answer_of("math")) == 2.5
    assert code.asked == 0
    assert scored(rewards, answer_of("math"), own=Route(SCENARIO, weight=0.1)) == pytest.approx(3.4)


def test_an_answer_that_nobody_takes_keeps_the_scenarios():
    assert scored({"math": (Says(1.0), {"math"}, 2.0)}, answer_of("chat")) == 9.0


@pytest.mark.parametrize(
    ("tag", "own", "parts"),
    [
        pytest.param("math", None, {"math": 1.0, "all": 0.5}, id="those that take it"),
        pytest.param(
            "math", Route(SCENARIO, weight=0.1), {"math": 1.0, "all": 0.5, "scenario": 9.0}, id="the scenario"
        ),
        pytest.param("math", Route(SCENARIO, frozenset({"code"})), {"math": 1.0, "all": 0.5}, id="not the scenario"),
        pytest.param("chat", None, {"all": 0.5}, id="fewer"),
    ],
)
def test_parts_are_what_each_gave_before_it_was_weighted(tag, own, parts):
    routing = Routing((Route("math", frozenset({"math"}), 2.0), Route("all", weight=-1.0)), own)
    rewards = Rewards(routing, {"math": Says(1.0), "all": Says(0.5)})
    assert asyncio.run(rewards.score(answer_of(tag))).parts == parts


def test_an_answer_that_nobody_takes_is_the_scenarios_alone():
    rewards = Rewards(Routing((Route("math", frozenset({"math"})),)), {"math": Says(1.0)})
    assert asyncio.run(rewards.score(answer_of("chat"))) == Scored(9.0, {"scenario": 9.0})


@pytest.mark.parametrize(
    ("value", "weight", "message"),
    [
        pytest.param(RewardFailed("no tests"), 1.0, "reward bad: no tests", id="failed"),
        pytest.param(KeyError("x"), 1.0, "reward bad: KeyError: 'x'", id="raised"),
        pytest.param(float("nan"), 1.0, "it must be a finite number", id="nan"),
        pytest.param("much", 1.0, "it must be a finite number", id="text"),
        pytest.param("hang", 1.0, r"reward bad: TimeoutError: timed out after 0\.2 s", id="hangs"),
        pytest.param(1e300, 1e300, "the sum of all rewards: the reward is inf", id="a sum without end"),
    ],
)
def test_what_cannot_be_scored(value, weight, message):
    other = Says(1.0)
    with pytest.raises(RewardFailed, match=message):
        scored({"bad": (Says(value), (), weight), "good": (other, (), 1.0)}, answer_of("math"))
    assert other.asked == 1


NOT_SCORED = {
    "a list without turns": ([], "returned 0 rewards for 3 turns"),
    "a mapping without parts": ({}, "an empty mapping"),
    "turns that add up to more than a float": ([1e308, 1e308, 0], "beyond the range of floats"),
    "parts that add up to more than a float": ({"a": 1e308, "b": 1e308}, "beyond the range of floats"),
    "a tensor of two elements": (torch.ones(2), "it must be a finite number"),
    "an array of two elements": (np.ones(2), "it must be a finite number"),
}


@pytest.mark.parametrize("value, message", NOT_SCORED.values(), ids=NOT_SCORED)
def test_values_that_are_no_score(value, message):
    with pytest.raises(RewardFailed, match=message):
        as_scored(value, "mine", turns=3)


@pytest.mark.parametrize("one", [torch.tensor(2), torch.tensor([2.0]), np.array([[2]]), np.float32(2)], ids=repr)
def test_one_element_is_a_number(one):
    assert as_scored(one, "mine").reward == 2.0


def test_a_route_without_a_reward():
    with pytest.raises(ValueError, match="there is no reward math; there is code"):
        Rewards(Routing((Route("math"),)), {"code": Says(1.0)})


def test_counts_and_closing():
    counting, silent = Says(1.0), Says(1.0)
    counting.counts = {"timeouts": 3}
    rewards = Rewards(Routing(), {"a": counting, "b": silent})

    async def run():
        counts = await rewards.counts()
        await rewards.close()
        return counts

    assert asyncio.run(run()) == {"a": {"timeouts": 3}}
    assert counting.is_closed
    assert silent.is_closed


def test_counts_of_a_step_are_those_since_the_last():
    counting, broken = Says(1.0), Says(1.0)
    broken.counts = "nothing that can be counted"
    rewards = Rewards(Routing(), {"a": counting, "b": broken})

    async def run():
        found = []
        for count in (3, 5, 5, 2):  # at last it was started again
            counting.counts = {"timeouts": count}
            found.append(await rewards.new_counts())
        return found

    assert asyncio.run(run()) == [{"reward/a/count/timeouts": new} for new in (3, 2, 0, 0)]


def test_one_that_cannot_be_closed_does_not_keep_others_from_it():
    class Stuck(Says):
        async def close(self):
            raise OSError("gone")

    other = Says(1.0)
    asyncio.run(Rewards(Routing(), {"a": Stuck(1.0), "b": other}).close())
    assert other.is_closed


class Prepares(Says):
    """A reward that has something to do before its first answer; `value` is what comes of it."""

    is_prepared = False

    async def prepare(self):
        if isinstance(self.value, Exception):
            raise self.value
        self.is_prepared = True


def test_those_that_prepare_are_prepared_and_what_fails_is_told_with_its_name():
    ready, routes = Prepares(1.0), (Route("ready"), Route("plain"))
    asyncio.run(Rewards(Routing(routes), {"ready": ready, "plain": Says(1.0)}).prepare())
    assert ready.is_prepared
    failing = {"judge": Prepares(RewardFailed("no engine"))}
    with pytest.raises(RewardFailed, match="reward judge: no engine"):
        asyncio.run(Rewards(Routing((Route("judge"),)), failing).prepare())


class Together:
    """A reward that scores in batches."""

    def __init__(self):
        self.batches = []

    async def score_batch(self, answers):
        self.batches.append([answer.text for answer in answers])
        return [{"length": len(answer.text), "bonus": 0.5} for answer in answers]

    async def close(self):
        pass


def test_answers_are_batched_and_have_parts():
    async def run():
        reward = Together()
        rewards = Rewards(Routing((Route("both", weight=2.0),)), {"both": reward})
        found = await asyncio.gather(*(rewards.score(Answer(Task("t"), text)) for text in ("a", "bb")))
        return reward.batches, found

    batches, found = asyncio.run(run())
    assert batches == [["a", "bb"]]
    assert found[1] == Scored(5.0, {"both": 2.5, "both/length": 2.0, "both/bonus": 0.5})


def test_a_batch_that_leaves_answers_out_fails_them():
    class Short(Together):
        async def score_batch(self, answers):
            return []

    rewards = Rewards(Routing((Route("short"),)), {"short": Short()})
    with pytest.raises(RewardFailed, match="0 rewards for 1 answers"):
        asyncio.run(rewards.score(Answer(Task("t"), "a")))


def test_equal_answers_are_scored_once():
    class Counts(Says):
        calls = 0

        async def score(self, answer):
            self.calls += 1
            if answer.text == "fails":
                raise ValueError("no")
            return 1.0

    async def run():
        reward = Counts(1.0)
        rewards = Rewards(Routing((Route("once", is_cached=True),)), {"once": reward})
        task = Task("t", {"answer": [1]})
        answers = [Answer(task, "a"), Answer(task, "a"), Answer(task, "b"), Answer(Task("t", {"answer": [2]}), "a")]
        await asyncio.gather(*map(rewards.score, answers))
        await rewards.score(Answer(Task("t", {"answer": [1]}), "b"))
        failing = [rewards.score(Answer(task, "fails")) for _ in range(2)]
        errors = [await asyncio.gather(one, return_exceptions=True) for one in failing]
        return reward.calls, await rewards.counts(), errors

    calls, counts, errors = asyncio.run(run())
    assert (calls, counts) == (5, {"once": {"cached": 2}})  # what fails is tried again
    assert all(isinstance(error, RewardFailed) for (error,) in errors)


def test_turn_rewards_are_weighted_and_counted():
    async def run(turns):
        rewards = Rewards(
            Routing((Route("steps", weight=2.0), Route("end"))), {"steps": Says([0.5, 1.0]), "end": Says(1.0)}
        )
        return await rewards.score(Answer(Task("t"), "a", turns=turns))

    assert asyncio.run(run(2)) == Scored(4.0, {"steps": 1.5, "end": 1.0}, (1.0, 2.0))
    with pytest.raises(RewardFailed, match="returned 2 rewards for 3 turns"):
        asyncio.run(run(3))
