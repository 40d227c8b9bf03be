import asyncio
import random

import pytest
from hypothesis import given, settings, strategies as st

from roost.config.train import RolloutSettings
from roost.procs import user_code as bounded
from roost.rollout.order import TaskOrder
from roost.trainer.feed import LOST_LIMIT, REPLACED_LIMIT, Feed, NothingFinishes, Position
from roost.trainer.watching import FailureFiles, RecordingEpisodeRunner
from tests.rollout.script import Script, for_ever, others_running, ran, settled, who


def feed_of(scenario, max_staleness=0, position=None, version=0, on_progress=None, **settings):
    rollout = RolloutSettings(**{"prompts_per_step": 2, "num_generations": 2, **settings})
    return Feed(scenario, scenario.runner(rollout), rollout, max_staleness, 11, position, version, on_progress)


def numbers(groups):
    return [group.number for group in groups]


async def gives_its_number(number, episode, attempt):
    return float(episode)


def unevenly(seed):
    """Episodes that take a different time each, by chance."""
    chance = random.Random(seed)

    async def plays(number, episode, attempt):
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        return float(episode)

    return plays


@pytest.mark.parametrize("seed", range(4))
def test_without_a_lag_the_order_is_that_of_the_tasks(seed):
    async def collect():
        feed = feed_of(Script(unevenly(seed)), prompts_per_step=3, max_concurrent_episodes=4)
        steps = []
        for version in range(3):
            feed.begin(version)
            steps.append(await feed.take(version))
        return steps

    steps = ran(collect())
    assert [numbers(groups) for groups in steps] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [who(group) for groups in steps for group in groups] == [[0, 1]] * 9
    assert [group.began_at for groups in steps for group in groups] == [0] * 3 + [1] * 3 + [2] * 3
    assert len({group.task.name for groups in steps for group in groups}) == 9


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_with_a_lag_no_group_is_too_old(seed, max_staleness):
    async def collect():
        feed = feed_of(Script(unevenly(seed)), max_staleness, prompts_per_step=3)
        steps = []
        for version in range(8):
            feed.begin(version)
            steps.append(await feed.take(version))
        await feed.close()
        return steps

    steps = ran(collect())
    assert [len(groups) for groups in steps] == [3] * 8
    assert len({number for groups in steps for number in numbers(groups)}) == 24
    for version, groups in enumerate(steps):
        assert all(version - max_staleness <= group.began_at <= version for group in groups)


def test_slow_groups_are_not_overtaken_until_they_are_too_old():
    """With staleness of 2, young groups that finish early must leave room for all the old ones."""

    async def collect():
        slow = asyncio.Event()

        async def plays(number, episode, attempt):
            if number in (1, 2):
                await slow.wait()
            return 1.0

        feed = feed_of(Script(plays), max_staleness=2, prompts_per_step=1)
        feed.begin(0)
        first = await feed.take(0)
        feed.begin(1)
        second = asyncio.create_task(feed.take(1))
        await settled()
        was_waiting = not second.done()
        slow.set()
        found = [first, await second]
        for version in (2, 3):
            feed.begin(version)
            found.append(await feed.take(version))
        await feed.close()
        return was_waiting, [numbers(groups) for groups in found]

    assert ran(collect()) == (True, [[0], [1], [2], [3]])


def test_a_step_taken_in_parts_takes_what_is_over_first():
    async def collect():
        slow = asyncio.Event()

        async def plays(number, episode, attempt):
            if number == 0:
                await slow.wait()
            return 1.0

        feed = feed_of(Script(plays))
        feed.begin(0)
        first = await feed.take(0, 1)
        slow.set()
        return numbers(first), numbers(await feed.take(0, 1))

    assert ran(collect()) == ([1], [0])


# Stragglers and failures --------------------------------------------------------------------------------------------


def test_stragglers_are_cut_off_when_enough_is_there():
    ended = []

    async def collect():
        last = asyncio.Event()

        async def plays(number, episode, attempt):
            if number == 1 and episode > 1:
                try:
                    await for_ever()
                finally:
                    ended.append(episode)
            if (number, episode) == (1, 1):
                await last.wait()
            return 1.0

        feed = feed_of(Script(plays), num_generations=4, rollout_fraction=0.75, group_fraction=0.5)
        feed.begin(0)
        taking = asyncio.create_task(feed.take(0))
        await settled()
        assert not taking.done(), "group 1 has one of the two that it needs"
        last.set()
        groups = await taking
        return groups, feed.pop_tally(), others_running()

    groups, tally, running = ran(collect())
    assert [who(group) for group in groups] == [[0, 1, 2, 3], [0, 1]]
    assert sorted(ended) == [2, 3]
    assert (tally.cancelled, tally.failed) == (2, 0)
    assert not running


def test_a_group_that_cannot_have_enough_does_not_hold_up_the_step():
    async def plays(number, episode, attempt):
        if number == 1 and episode:
            raise OSError("broken")
        return 1.0

    async def collect():
        feed = feed_of(Script(plays), num_generations=4, rollout_fraction=0.75, group_fraction=0.5)
        feed.begin(0)
        return await feed.take(0), feed.pop_tally()

    groups, tally = ran(collect())
    assert [who(group) for group in groups] == [[0, 1, 2, 3], [0]]
    assert tally.failed == 3


def test_nobody_is_cut_off_while_others_can_be_taken():
    """With staleness, the step takes the groups that are over; the straggler may still be in time for the next one."""

    async def collect():
        slow = asyncio.Event()

        async def plays(number, episode, attempt):
            if (number, episode) == (0, 3):
                await slow.wait()
            return 1.0

        feed = feed_of(
            Script(plays),
            max_staleness=1,
            prompts_per_step=1,
            num_generations=4,
            rollout_fraction=0.75,
            group_fraction=0.5,
        )
        feed.begin(0)
        await settled()
        first = await feed.take(0)
        slow.set()
        await settled()
        feed.begin(1)
        second = await feed.take(1)
        await feed.close()
        return numbers(first), numbers(second), who(second[0]), feed.pop_tally().cancelled

    assert ran(collect()) == ([1], [0], [0, 1, 2, 3], 0)


def test_redundant_episodes_are_counted_as_cancelled():
    async def plays(number, episode, attempt):
        return await for_ever() if episode == number else 1.0

    async def collect():
        feed = feed_of(Script(plays), extra_generations=1)
        feed.begin(0)
        return await feed.take(0), feed.pop_tally()

    groups, tally = ran(collect())
    assert [who(group) for group in groups] == [[1, 2], [0, 2]]
    assert tally.cancelled == 2


def test_retries_and_failures_are_counted_once():
    async def plays(number, episode, attempt):
        if episode == 1 or attempt < 1:
            raise OSError("broken")
        return 1.0

    async def collect():
        feed = feed_of(Script(plays), episode_attempts=2)
        feed.begin(0)
        await feed.take(0)
        return feed.pop_tally(), feed.pop_tally()

    tally, nothing_since = ran(collect())
    assert (tally.retried, tally.failed, tally.cancelled) == (2, 2, 0)
    assert (nothing_since.retried, nothing_since.failed) == (0, 0)


def test_a_group_that_fails_wholly_is_replaced():
    async def plays(number, episode, attempt):
        if number == 1:
            raise OSError("broken")
        return 1.0

    async def collect():
        feed = feed_of(Script(plays))
        feed.begin(0)
        groups = await feed.take(0)
        return numbers(groups), feed.pop_tally().lost_groups, feed.position

    assert ran(collect()) == ([0, 2], 1, Position(next=3))


@pytest.mark.parametrize("error", [SystemExit(0), LookupError("no such row")], ids=repr)
def test_a_task_that_cannot_be_given_is_a_lost_group_with_a_reason(error, tmp_path):
    class Gappy(Script):
        def task(self, split, index):
            if index == self.missing:
                raise error
            return super().task(split, index)

        def runner(self, settings):
            return RecordingEpisodeRunner(
                super().runner(settings), FailureFiles(tmp_path / "failures", lambda text: None)
            )

    async def collect():
        scenario = Gappy(gives_its_number)
        scenario.missing = TaskOrder(1000, 11).index(1)
        feed = feed_of(scenario)
        feed.begin(0)
        groups = await feed.take(0)
        return numbers(groups), feed.pop_tally().lost_groups, feed.position

    assert ran(collect()) == ([0, 2], 1, Position(next=3))
    [file] = (tmp_path / "failures").glob("*.txt")
    assert type(error).__name__ in file.read_text() and "(test_feed.py:" in file.read_text()


@pytest.mark.parametrize(("groups", "lost"), [(1, LOST_LIMIT), (2, LOST_LIMIT), (12, 12)])
def test_a_run_in_which_nothing_finishes_ends_with_the_reason(groups, lost):
    async def plays(number, episode, attempt):
        raise OSError("no route to the environment")

    async def collect():
        feed = feed_of(Script(plays), prompts_per_step=groups)
        feed.begin(0)
        try:
            await feed.take(0)
        finally:
            await feed.close()

    with pytest.raises(NothingFinishes, match=f"of {lost} groups .* OSError: no route to the environment"):
        ran(collect())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_in_which_some_groups_are_lost_goes_on(max_staleness):
    """However many they are in a step, or in all: others finish between them."""

    async def plays(number, episode, attempt):
        if number % 3:
            raise OSError("broken")
        return 1.0

    async def collect():
        feed = feed_of(Script(plays), max_staleness, prompts_per_step=4, episode_attempts=1, max_concurrent_episodes=1)
        steps = []
        for version in range(3):
            feed.begin(version)
            steps.append((len(await feed.take(version)), feed.pop_tally().lost_groups))
        await feed.close()
        return steps

    steps = ran(collect())
    assert [count for count, _ in steps] == [4] * 3
    assert max(lost for _, lost in steps) > 4, "more than would end the run if they came in a row"


def test_groups_that_wait_to_be_taken_do_not_hide_that_nothing_finishes_any_more():
    async def plays(number, episode, attempt):
        if number:
            raise OSError("broken since")
        return 1.0

    async def collect():
        feed = feed_of(Script(plays))
        feed.begin(0)
        try:
            await feed.take(0)
        finally:
            await feed.close()

    with pytest.raises(NothingFinishes, match=f"of {LOST_LIMIT} groups in a row .* OSError: broken since"):
        ran(collect())


@pytest.mark.parametrize("left", [0, 1], ids=["none", "fewer than it needs"])
def test_stragglers_are_cut_off_beside_a_group_that_failed(left):
    """Number 0 is over with none of its episodes, or with one of the two that it needs; number 1 has a straggler."""

    async def plays(number, episode, attempt):
        if number == 0 and episode >= left:
            raise OSError("broken")
        return await for_ever() if (number, episode) == (1, 3) else 1.0

    async def collect():
        feed = feed_of(Script(plays), num_generations=4, rollout_fraction=0.75, group_fraction=0.5)
        feed.begin(0)
        return await feed.take(0), feed.pop_tally(), others_running()

    groups, tally, running = ran(collect())
    assert [(group.number, who(group)) for group in groups] == (
        [(0, [0]), (1, [0, 1, 2])] if left else [(1, [0, 1, 2]), (2, [0, 1, 2, 3])]
    )
    assert (tally.cancelled, tally.failed, tally.lost_groups) == (1, 4 - left, 1 - left)
    assert not running


def test_an_episode_that_hangs_fails_at_its_limit():
    async def plays(number, episode, attempt):
        return await for_ever() if (number, episode) == (0, 1) else 1.0

    async def collect():
        feed = feed_of(Script(plays), episode_timeout_s=0.5, episode_attempts=1)
        feed.begin(0)
        return await feed.take(0), feed.pop_tally()

    groups, tally = ran(collect())
    assert [who(group) for group in groups] == [[0], [0, 1]]
    assert tally.failed == 1


@pytest.mark.parametrize("ended_by", ["limit", "cut off", "close"])
def test_a_scenario_that_swallows_its_cancellation_does_not_hold_the_feed(ended_by, monkeypatch):
    monkeypatch.setattr(bounded, "GRACE_S", 0.01)

    async def collect():
        may_end = asyncio.Event()

        async def plays(number, episode, attempt):
            while episode == 1 and not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    continue
            return 1.0

        limit = 0.5 if ended_by == "limit" else 3600
        share = 0.5 if ended_by == "cut off" else 1.0
        feed = feed_of(
            Script(plays), episode_timeout_s=limit, episode_attempts=1, rollout_fraction=share, group_fraction=share
        )
        feed.begin(0)
        await settled()
        try:
            groups = await feed.take(0) if ended_by != "close" else []
            await feed.close()
        finally:
            may_end.set()
            await settled()
        return groups, feed.pop_tally()

    groups, tally = ran(collect())
    if ended_by != "close":
        assert [who(group) for group in groups] == [[0], [0]]
        assert (tally.failed, tally.cancelled) == ((2, 0) if ended_by == "limit" else (0, 2))


def test_no_more_are_played_at_a_time_than_the_run_allows():
    running, most = set(), []

    async def plays(number, episode, attempt):
        running.add((number, episode))
        most.append(len(running))
        await asyncio.sleep(0)
        running.discard((number, episode))
        return 1.0

    async def collect():
        feed = feed_of(Script(plays), prompts_per_step=5, num_generations=4, max_concurrent_episodes=3)
        feed.begin(0)
        return await feed.take(0)

    assert len(ran(collect())) == 5
    assert max(most) == 3


@pytest.mark.parametrize(("is_single_turn", "most"), [(True, 1024), (False, 256)])
def test_more_episodes_of_a_single_turn_are_played_at_a_time(is_single_turn, most):
    running = []

    async def plays(number, episode, attempt):
        running.append((number, episode))
        await for_ever()

    async def start():
        scenario = Script(plays)
        scenario.single_turn = is_single_turn
        feed = feed_of(scenario, num_generations=513)  # 1026 in a step
        feed.begin(0)
        await settled()
        await feed.close()

    ran(start())
    assert len(running) == RolloutSettings().concurrency(is_single_turn) == most
    assert RolloutSettings(max_concurrent_episodes=3).concurrency(is_single_turn) == 3


# Groups that teach nothing ------------------------------------------------------------------------------------------


async def even_ones_teach_nothing(number, episode, attempt):
    return 1.0 if number % 2 == 0 else float(episode)


def test_equal_groups_are_replaced():
    async def collect():
        feed = feed_of(Script(even_ones_teach_nothing), dynamic_sampling=True)
        feed.begin(0)
        return numbers(await feed.take(0)), len(feed.pop_tally().equal_groups)

    assert ran(collect()) == ([1, 3], 2)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "equal"])
def test_a_useless_group_is_replaced_while_others_are_still_played(is_lost, max_staleness):
    async def collect():
        slow, begun = asyncio.Event(), set()

        async def plays(number, episode, attempt):
            begun.add(number)
            if number == 1 and is_lost:
                raise OSError("broken")
            if number != 1:
                await slow.wait()
            return 1.0 if number == 1 else float(episode)

        feed = feed_of(Script(plays), max_staleness, dynamic_sampling=True)
        feed.begin(0)
        new = feed.position.next
        taking = asyncio.create_task(feed.take(0))
        await settled()
        began_early = new in begun and not taking.done()
        slow.set()
        taken, tally = numbers(await taking), feed.pop_tally()
        await feed.close()
        return began_early, taken, (tally.lost_groups, len(tally.equal_groups))

    assert ran(collect()) == (True, [0, 2], (1, 0) if is_lost else (0, 1))


@pytest.mark.parametrize("ended_by", ["take", "close"])
def test_a_replaced_group_is_waited_for(ended_by):
    """Its redundant episode still puts its things in order when another has taken its place."""

    async def collect():
        slow, order, ended = asyncio.Event(), asyncio.Event(), []

        async def plays(number, episode, attempt):
            if number == 0 and episode == 2:
                try:
                    await for_ever()
                finally:
                    await order.wait()
            if number:
                await slow.wait()
            return float(episode) if number else 1.0

        scenario = Script(plays)
        settings = RolloutSettings(prompts_per_step=1, num_generations=2, extra_generations=1, dynamic_sampling=True)
        feed = Feed(scenario, scenario.runner(settings), settings, 0, 11, on_end=ended.append)
        feed.begin(0)
        taking = asyncio.create_task(feed.take(0))
        await settled()
        assert feed.position == Position(2, (1,)), "another has taken its place"
        if ended_by == "take":
            slow.set()
        else:
            taking.cancel()
            await settled()
            taking = asyncio.create_task(feed.close())
        await settled()
        was_waiting = not taking.done()
        order.set()
        await taking
        return was_waiting, ended, others_running()

    assert ran(collect()) == (True, [1, 0] if ended_by == "take" else [], set())


def test_equal_groups_are_kept_where_nobody_asked():
    async def collect():
        feed = feed_of(Script(even_ones_teach_nothing))
        feed.begin(0)
        return numbers(await feed.take(0)), len(feed.pop_tally().equal_groups)

    assert ran(collect()) == ([0, 1], 0)


def test_replacing_stops_at_its_limit_in_every_step():
    async def plays(number, episode, attempt):
        return 1.0

    async def collect():
        feed = feed_of(Script(plays), dynamic_sampling=True)
        steps = []
        for version in range(2):
            feed.begin(version)
            steps.append((numbers(await feed.take(version)), len(feed.pop_tally().equal_groups)))
        return steps

    limit = REPLACED_LIMIT * 2
    assert ran(collect()) == [([limit, limit + 1], limit), ([2 * limit + 2, 2 * limit + 3], limit)]


# Where a run is -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    max_staleness=st.integers(0, 2),
    groups=st.integers(1, 3),
    lives=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    lost=st.sets(st.integers(0, 30), max_size=2),
    equal=st.sets(st.integers(0, 30), max_size=5),
    seed=st.integers(0, 1000),
)
def test_a_run_that_is_resumed_learns_from_every_task_once(max_staleness, groups, lives, lost, equal, seed):
    """`lives` are the steps that the run does before it is ended, each time."""
    uneven = unevenly(seed)

    async def plays(number, episode, attempt):
        reward = await uneven(number, episode, attempt)
        if number in lost:
            raise OSError("broken")
        return 1.0 if number in equal else reward

    taken, version, position = [], 0, Position()

    async def live(steps):
        nonlocal version, position
        feed = feed_of(Script(plays), max_staleness, position, version, prompts_per_step=groups, dynamic_sampling=True)
        for _ in range(steps):
            feed.begin(version)
            taken.extend(numbers(await feed.take(version)))
            feed.pop_tally()
            version, position = version + 1, feed.position
        feed.begin(version)
        await feed.close()

    for steps in lives:
        ran(live(steps))
        assert len(taken) == len(set(taken)) == version * groups
        assert not set(taken) & set(position.waiting)
        left_out = set(range(position.next)) - set(taken) - set(position.waiting)
        assert left_out <= lost | equal


def test_what_waited_is_played_first_and_as_it_was():
    async def collect():
        feed = feed_of(Script(gives_its_number), position=Position(next=9, waiting=(7, 4)), version=3)
        feed.begin(3)
        first = await feed.take(3)
        feed.begin(4)
        return first, await feed.take(4)

    async def anew():
        feed = feed_of(Script(gives_its_number), prompts_per_step=8)
        feed.begin(0)
        return await feed.take(0)

    first, second = ran(collect())
    assert (numbers(first), numbers(second)) == ([4, 7], [9, 10])
    tasks = {group.number: group.task for group in ran(anew())}
    assert [group.task for group in first] == [tasks[4], tasks[7]]


def test_what_waited_and_still_waits_is_not_forgotten():
    """A run may be resumed with fewer groups or a smaller staleness than it had."""

    async def collect():
        feed = feed_of(Script(gives_its_number), position=Position(next=9, waiting=(3, 4, 5, 6)), version=3)
        before = feed.position
        feed.begin(3)
        await feed.take(3)
        return before, feed.position

    assert ran(collect()) == (Position(9, (3, 4, 5, 6)), Position(9, (5, 6)))


@pytest.mark.parametrize("concurrency", [1, 100])
def test_closing_ends_everything(concurrency):
    ended = []

    async def plays(number, episode, attempt):
        try:
            await for_ever()
        finally:
            ended.append((number, episode))

    async def collect():
        feed = feed_of(Script(plays), max_staleness=1, max_concurrent_episodes=concurrency)
        feed.begin(0)
        await settled()
        await feed.close()
        assert not others_running()
        await feed.close()
        return feed.position

    assert ran(collect()) == Position(next=4, waiting=(0, 1, 2, 3))
    assert len(ended) == min(concurrency, 8)


def test_progress_ends_at_all_of_it():
    seen = []

    async def collect():
        feed = feed_of(Script(unevenly(3)), on_progress=lambda done, total: seen.append((done, total)))
        feed.begin(0)
        await feed.take(0)

    ran(collect())
    assert seen[-1] == (4, 4)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_no_group_is_begun_for_steps_that_will_not_be():
    async def collect():
        scenario, ended = Script(gives_its_number), []
        rollout = RolloutSettings(prompts_per_step=2, num_generations=2)
        feed = Feed(scenario, scenario.runner(rollout), rollout, 3, 11, on_end=ended.append, steps=2)
        taken = []
        for version in range(2):
            feed.begin(version)
            taken += numbers(await feed.take(version))
        return taken, ended, feed.position

    assert ran(collect()) == ([0, 1, 2, 3], [0, 1, 2, 3], Position(4, ()))
