"""Answers spread over workers, and scored again when one is lost; with real ones in live/."""

import asyncio
import itertools

import pytest

from roost.rollout.episode import Task
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.rollout.rewards.scoring import RemoteReward
from roost.transport.context import Address, Failure, FailureKind, WorkerFailed


class Ranks:
    """Stands for a group; each rank answers by a function of its own."""

    name = "rewards"

    def __init__(self, *ranks):
        self.ranks, self.calls = ranks, []

    @property
    def world_size(self):
        return len(self.ranks)

    def execute_on(self, rank):
        class Selected:
            async def score(_, answers):
                texts = [answer.text for answer in answers]
                self.calls.append((rank, texts))
                return [await self.ranks[rank](texts)]

            async def close_reward(_):
                return []

        return Selected()


async def lengths(texts):
    await asyncio.sleep(0)
    return [float(len(text)) for text in texts]


def failing(kind=FailureKind.DIED, will_restart=False, address=None, per_death=1):
    """Fails every call; so many calls tell of the same death."""
    calls = itertools.count()

    async def fail(texts):
        ended = f"its process {next(calls) // per_death} ended"
        raise WorkerFailed([Failure(address or Address("rewards", 0), kind, ended, 1, will_restart=will_restart)])

    return fail


def once(first, then):
    """The first call is answered otherwise than those after it."""
    left = [first]

    async def answer(texts):
        return await (left.pop() if left else then)(texts)

    return answer


async def outcomes(reward, texts):
    asked = [reward.score(Answer(Task("t"), text)) for text in texts]
    return await asyncio.gather(*asked, return_exceptions=True)


def test_answers_that_come_together_go_in_few_calls():
    group = Ranks(lengths, lengths)
    assert asyncio.run(outcomes(RemoteReward(group), ["a", "bb", "ccc", "dddd"])) == [1.0, 2.0, 3.0, 4.0]
    assert group.calls == [(0, ["a", "ccc"]), (1, ["bb", "dddd"])]


def test_calls_have_a_largest_size():
    group = Ranks(lengths)
    asyncio.run(outcomes(RemoteReward(group, largest=2), list("abcde")))
    assert [len(texts) for _, texts in group.calls] == [2, 2, 1]


def test_a_busy_rank_gets_less():
    group = Ranks(lengths, lengths)

    async def run():
        stuck, free = asyncio.Event(), RemoteReward(group)

        async def hold(texts):
            await stuck.wait()
            return await lengths(texts)

        group.ranks = (hold, lengths)
        first = asyncio.create_task(outcomes(free, ["held"]))
        while not group.calls:
            await asyncio.sleep(0.001)
        after = [await outcomes(free, ["a"]) for _ in range(3)]
        stuck.set()
        return await first, after

    assert asyncio.run(run()) == ([4.0], [[1.0]] * 3)
    assert [rank for rank, _ in group.calls] == [0, 1, 1, 1]


async def some_fail(texts):
    return [f"no score for {text}" if "x" in text else 1.0 for text in texts]


def test_an_answer_that_cannot_be_scored_is_alone():
    one, two = asyncio.run(outcomes(RemoteReward(Ranks(some_fail)), ["a", "x"]))
    assert one == 1.0
    assert isinstance(two, RewardFailed)
    assert str(two) == "no score for x"


@pytest.mark.parametrize(
    ("ranks", "calls", "expected"),
    [
        pytest.param([failing(), lengths], [0, 1, 1], 1.0, id="another rank; the lost one is not asked again"),
        pytest.param([failing(will_restart=True), lengths], [0, 1, 0, 1], 1.0, id="one that comes back is asked again"),
        pytest.param([once(failing(will_restart=True), lengths)], [0, 0, 0], 1.0, id="the only one comes back"),
        pytest.param([failing(will_restart=True)], [0, 0, 0, 0], " was lost: ", id="only once more"),
        pytest.param(
            [failing(will_restart=True, per_death=2)], [0, 0, 0, 0, 0], " was lost: ", id="not there again yet"
        ),
        pytest.param([failing()], [0], "no worker of rewards is left", id="none is left"),
        pytest.param([failing(FailureKind.RAISED), lengths], [0, 0], " was lost: its process", id="not made at all"),
    ],
)
def test_workers_that_are_lost(ranks, calls, expected):
    group = Ranks(*ranks)

    async def run():
        reward = RemoteReward(group)
        return [(await outcomes(reward, ["a"]))[0] for _ in range(2)]

    described = asyncio.run(run())
    assert [rank for rank, _ in group.calls] == calls
    if isinstance(expected, str):
        assert all(isinstance(error, RewardFailed) and expected in str(error) for error in described)
    else:
        assert described == [expected] * 2


def test_what_is_lost_elsewhere_is_told_as_it_is():
    (error,) = asyncio.run(outcomes(RemoteReward(Ranks(failing(address=Address("actor", 0)))), ["a"]))
    assert isinstance(error, WorkerFailed)


async def too_few(texts):
    return []


async def cannot_be_sent(texts):
    raise TypeError("cannot pickle")


@pytest.mark.parametrize(
    ("rank", "kind"), [(too_few, ValueError), (cannot_be_sent, TypeError)], ids=["too few", "unsent"]
)
def test_nobody_waits_for_ever(rank, kind):
    (error,) = asyncio.run(outcomes(RemoteReward(Ranks(rank)), ["a"]))
    assert isinstance(error, kind)


def test_answers_of_episodes_that_were_cut_off_are_not_sent():
    group = Ranks(lengths)

    async def run():
        reward = RemoteReward(group)
        tasks = [asyncio.create_task(reward.score(Answer(Task("t"), text))) for text in ("a", "bb")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await tasks[1]

    assert asyncio.run(run()) == 2.0
    assert group.calls == [(0, ["bb"])]


def test_closing_ends_what_waits():
    async def never(texts):
        await asyncio.Event().wait()

    async def run():
        group = Ranks(never)
        reward = RemoteReward(group)
        sent = asyncio.create_task(outcomes(reward, ["a"]))
        while not group.calls:
            await asyncio.sleep(0.001)
        gathered = asyncio.create_task(reward.score(Answer(Task("t"), "b")))
        await asyncio.sleep(0)
        await reward.close()
        return [*await sent, *await asyncio.gather(gathered, return_exceptions=True), *await outcomes(reward, ["c"])]

    assert [str(error) for error in asyncio.run(run())] == ["rewards was closed"] * 3
