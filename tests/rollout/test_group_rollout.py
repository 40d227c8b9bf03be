import asyncio

import numpy as np
import pytest

from roost.config.train import RolloutSettings
from roost.procs import user_code as bounded
from roost.procs.user_code import contain_tasks
from roost.rollout.episode import EpisodeReward, Split, Task
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest, GroupRollout, LocalEpisodeRunner
from tests.rollout.script import Script, completion, for_ever, others_running, ran, settled, who


def begin(scenario, places=100, number=0, **settings):
    rollout = RolloutSettings(**{"num_generations": 2, "episode_attempts": 3, **settings})
    task = scenario.task(Split.TRAIN, number)
    runner = LocalEpisodeRunner(scenario, scenario.open_policy, rollout.episode_timeout_s)
    return GroupRollout(number, task, 5, runner, rollout, asyncio.Semaphore(places), lambda: None)


async def over(play):
    while not play.is_over:
        await asyncio.sleep(0)
    return await play.result()


def test_a_group_is_its_episodes_in_order():
    async def plays(number, episode, attempt):
        for _ in range(10 - episode):  # the last one is the first to finish
            await asyncio.sleep(0)
        return episode / 2

    async def run_episode():
        return await over(begin(Script(plays), number=3, num_generations=4))

    group = ran(run_episode())
    assert (group.number, group.task.name, group.began_at) == (3, "train 3", 5)
    assert who(group) == [0, 1, 2, 3]
    assert group.rewards == (0.0, 0.5, 1.0, 1.5)
    assert (group.cancelled, group.failed, group.last_error) == (0, 0, "")


@pytest.mark.parametrize(("redundancy", "possible"), [(0, [3, 2, 2]), (1, [3, 3, 3]), (2, [3, 3, 3])])
def test_what_failed_is_no_longer_possible(redundancy, possible):
    """When it begins, when one has failed, and when it is over."""

    async def run_episode():
        last = asyncio.Event()

        async def plays(number, episode, attempt):
            if episode == 0:
                raise OSError("broken")
            if episode != 2:
                await last.wait()
            return 1.0

        playing = begin(Script(plays), num_generations=3, extra_generations=redundancy)
        seen = [playing.possible]
        await settled()
        seen.append(playing.possible)
        last.set()
        group = await over(playing)
        assert playing.possible == len(group.episodes)
        return [*seen, playing.possible]

    assert ran(run_episode()) == possible


def test_a_group_that_is_over_stays_as_it_is():
    """Although those that were played beyond what is needed still put their things in order."""

    async def run_episode():
        order = asyncio.Event()

        async def plays(number, episode, attempt):
            if episode in (1, 3):
                return 1.0
            try:
                return await for_ever()
            finally:
                await order.wait()

        playing = begin(Script(plays), extra_generations=2)
        await settled()
        assert playing.is_over and others_running()
        seen = playing.so_far
        order.set()
        return seen, await playing.result()

    seen, group = ran(run_episode())
    assert who(seen) == who(group) == [1, 3]
    assert (seen.cancelled, seen.failed) == (group.cancelled, group.failed) == (2, 0)


def test_an_episode_that_fails_is_played_again_then_counted():
    async def plays(number, episode, attempt):
        if episode == 2 or attempt < episode * 2:
            raise OSError(f"no {episode}.{attempt}")
        return 1.0

    async def run_episode():
        return await over(begin(Script(plays), num_generations=3))

    group = ran(run_episode())
    assert who(group) == [0, 1]
    assert [episode.attempts for episode in group.episodes] == [1, 3]
    assert [int(episode.sequences[0].token_ids[3]) for episode in group.episodes] == [
        0,
        2,
    ]  # the attempt that it drew as
    assert (group.failed, group.cancelled) == (1, 0)
    assert group.last_error.startswith("OSError: no 2.2 (test_group_rollout.py:"), "and where in the scenario"


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("bye"), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("where", ["in play", "in a task of its own", "before it is awaited"])
def test_an_episode_that_exits_fails_and_the_loop_goes_on(error, where):
    class Leaving(Script):
        def run_episode(self, task, transcript):
            if where == "before it is awaited":
                raise error
            return self._left(task, transcript)

        async def _left(self, task, transcript):
            transcript.give([7])
            _, episode, _ = await transcript.take()
            if episode == 0 and where == "in play":
                raise error
            if episode == 0:
                await asyncio.gather(self._leave(), asyncio.sleep(0))
            return EpisodeReward(1.0)

        async def _leave(self):
            raise error

    async def run_episode():
        contain_tasks(asyncio.get_running_loop())  # as in a run
        group = await over(begin(Leaving(None), episode_attempts=2))
        await settled()
        return group

    group = ran(run_episode())
    assert group.failed == (2 if where == "before it is awaited" else 1)
    assert type(error).__name__ in group.last_error and "(test_group_rollout.py:" in group.last_error


@pytest.mark.parametrize(
    "reward",
    [float("nan"), float("inf"), None, "1", 1j, np.array([1.0])],
    ids=["nan", "infinite", "none", "text", "complex", "array"],
)
def test_what_is_no_finite_number_fails_the_episode_and_not_the_run(reward):
    async def plays(number, episode, attempt):
        return reward if episode else 0.5

    async def run_episode():
        return await over(begin(Script(plays)))

    group = ran(run_episode())
    assert (group.rewards, group.failed) == ((0.5,), 1)
    assert "must be a finite number" in group.last_error


@pytest.mark.parametrize("reward", [True, 1, np.float32(1), np.int64(1)], ids=lambda value: type(value).__name__)
def test_numbers_of_all_kinds_become_plain_ones(reward):
    async def plays(number, episode, attempt):
        return reward

    async def run_episode():
        return await over(begin(Script(plays)))

    assert [type(one) for one in ran(run_episode()).rewards] == [float, float]


def test_a_scenario_that_is_not_asynchronous_fails_in_words():
    class Plain(Script):
        def run_episode(self, task, transcript):
            return EpisodeReward(1.0)

    async def run_episode():
        return await over(begin(Plain(None)))

    group = ran(run_episode())
    assert group.failed == 2
    assert "TypeError" in group.last_error


def test_redundant_episodes_end_as_soon_as_there_are_enough():
    cancelled = []

    async def plays(number, episode, attempt):
        if episode in (1, 3):
            return 1.0
        try:
            return await for_ever()
        finally:
            cancelled.append(episode)

    async def run_episode():
        playing = begin(Script(plays), extra_generations=2)
        await settled()
        assert playing.is_over
        assert sorted(cancelled) == [0, 2], "they would keep engines from other groups until somebody takes this one"
        return await playing.result()

    group = ran(run_episode())
    assert who(group) == [1, 3]
    assert (group.cancelled, group.failed) == (2, 0)


def test_every_episode_is_accounted_for_when_more_finish_than_are_needed():
    async def plays(number, episode, attempt):
        return 1.0

    async def run_episode():
        return await over(begin(Script(plays), extra_generations=3))

    group = ran(run_episode())
    assert len(group.episodes) == 2
    assert group.cancelled + group.failed + len(group.episodes) == 5


def test_places_bound_how_many_are_played_at_a_time():
    running, most = [], []

    async def plays(number, episode, attempt):
        running.append(episode)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(episode)
        if attempt == 0:
            raise OSError("once more")
        return 1.0

    async def run_episode():
        return await over(begin(Script(plays), places=3, num_generations=10))

    assert len(ran(run_episode()).episodes) == 10
    assert max(most) == 3
    assert len(most) == 20


def test_an_episode_that_hangs_ends_at_its_limit():
    async def plays(number, episode, attempt):
        return await for_ever() if episode else 1.0

    async def run_episode():
        return await over(begin(Script(plays), episode_timeout_s=0.5, episode_attempts=2))

    group = ran(run_episode())
    assert (who(group), group.failed) == ([0], 1)
    assert group.last_error == "TimeoutError: timed out after 0.5 s"


def test_a_scenario_s_own_timeout_is_not_taken_for_the_limit():
    async def plays(number, episode, attempt):
        raise TimeoutError("the environment did not answer")

    async def run_episode():
        return await over(begin(Script(plays)))

    assert ran(run_episode()).last_error.startswith("TimeoutError: the environment did not answer (")


def test_a_scenario_that_cancels_itself_has_failed():
    async def plays(number, episode, attempt):
        if episode == 0:
            raise asyncio.CancelledError
        return 1.0

    async def run_episode():
        return await over(begin(Script(plays)))

    group = ran(run_episode())
    assert (who(group), group.failed, group.cancelled) == ([1], 1, 0)


@pytest.mark.parametrize("ended_by", ["limit", "cut off"])
def test_a_scenario_that_does_not_hear_of_being_cancelled_is_left_behind(ended_by, monkeypatch):
    monkeypatch.setattr(bounded, "GRACE_S", 0.01)
    described = []

    async def run_episode():
        may_end = asyncio.Event()

        class Deaf(Script):
            async def run_episode(self, task, transcript):
                transcript.give([7])
                _, episode, _ = await transcript.take()
                if episode == 0:
                    return EpisodeReward(1.0)
                while not may_end.is_set():
                    try:
                        await may_end.wait()
                    except asyncio.CancelledError:
                        described.append("cancelled")
                await transcript.take()
                described.append("had another turn")
                return EpisodeReward(0.0)

        limit = 0.5 if ended_by == "limit" else 3600
        playing = begin(Deaf(None), episode_timeout_s=limit, episode_attempts=1)
        await settled()
        try:
            group = await (over(playing) if ended_by == "limit" else playing.result())
            left_behind = len(others_running())
        finally:
            may_end.set()
        await settled()
        return group, left_behind, len(others_running())

    group, left_behind, at_the_end = ran(run_episode())
    assert (left_behind, at_the_end) == (1, 0)
    assert who(group) == [0]
    assert (group.failed, group.cancelled) == ((1, 0) if ended_by == "limit" else (0, 1))
    assert described == ["cancelled"]


def test_what_is_cut_off_may_put_its_things_in_order():
    tidied = []

    async def plays(number, episode, attempt):
        try:
            return await for_ever()
        finally:
            await asyncio.sleep(0.01)
            tidied.append(episode)

    async def run_episode():
        playing = begin(Script(plays))
        await settled()
        playing.cut_off()
        await asyncio.sleep(0)
        playing.cut_off()
        group = await playing.result()
        assert not others_running()
        return group

    group = ran(run_episode())
    assert sorted(tidied) == [0, 1]
    assert (group.episodes, group.cancelled) == ((), 2)


def test_an_error_on_the_way_out_is_no_reason_to_play_again():
    attempts = []

    async def plays(number, episode, attempt):
        attempts.append(attempt)
        try:
            await for_ever()
        except asyncio.CancelledError:
            raise OSError("the environment is gone") from None

    async def run_episode():
        playing = begin(Script(plays))
        await settled()
        return await playing.result()

    group = ran(run_episode())
    assert attempts == [0, 0]
    assert (group.cancelled, group.failed) == (2, 0)


class Unending:
    """A scenario that says it would have gone on, after it showed the policy these tokens."""

    def __init__(self, shown):
        self._shown = shown

    async def run_episode(self, task, transcript):
        transcript.give([1])
        await transcript.take()
        if self._shown:
            transcript.branch().give(self._shown)
        return EpisodeReward(1.0, is_truncated=True)


def test_an_episode_that_was_cut_off_keeps_what_it_would_have_gone_on_from():
    async def sample(token_ids, turn, max_tokens):
        return completion((5,))

    def played(shown):
        return ran(
            LocalEpisodeRunner(Unending(shown), lambda *_: sample, 30.0).run_episode(EpisodeRequest(Task("one"), 0, 0))
        )

    episode = played([8, 9])
    assert episode.stopped_in.tolist() == [8, 9] and len(episode.sequences) == 1
    with pytest.raises(EpisodeFailed, match=r"give\(\) the next observation"):
        played([])
