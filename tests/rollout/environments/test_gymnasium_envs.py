"""Episodes in gymnasium's vector environments: each as if it were alone."""

import asyncio

import gymnasium
import numpy as np
import pytest

from roost.rollout.environments.gymnasium_envs import GymnasiumEnvironments, fitted, text_of
from roost.rollout.episode import Task
from tests.rollout.script import others_running, ran, settled

TASK = Task("balance")
LONG_S = 1000.0


class Fragile(gymnasium.Env):
    """Breaks on action 1; counts its steps in what it shows."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = (options or {}).get("start", 0)
        return self._shown(), {"extra": {"count": self._count}}

    def step(self, action):
        if action == 1:
            raise ZeroDivisionError("the world broke")
        self._count += 1
        return self._shown(), 1.0, False, False, {}

    def _shown(self):
        return np.array([self._count], np.float32)


class Spelled(gymnasium.Env):
    """Shows parts of every kind, drawn from its seed; what is done is in its info."""

    observation_space = gymnasium.spaces.Dict(
        at=gymnasium.spaces.Box(-1, 1, (2,)),
        door=gymnasium.spaces.Discrete(4),
        note=gymnasium.spaces.Text(9),
        pair=gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2), gymnasium.spaces.MultiBinary(2))),
    )
    action_space = gymnasium.spaces.Dict(go=gymnasium.spaces.Discrete(3), by=gymnasium.spaces.Box(0, 1, (1,)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._shown(), {}

    def step(self, action):
        self._steps += 1
        return self._shown(), 1.0, self._steps == 3, self._steps == 2, {"done": repr(action)}

    def _shown(self):
        drawn = int(self.np_random.integers(4))
        pair = (drawn % 2, np.array([1, drawn // 2], np.int8))
        at = np.array([0.25, -drawn / 4], np.float32)
        return {"at": at, "door": drawn, "note": f"n{drawn}{self._steps}", "pair": pair}


@pytest.fixture(scope="module", autouse=True)
def worlds():
    gymnasium.register("Fragile-v0", Fragile)
    gymnasium.register("Spelled-v0", Spelled)
    yield
    gymnasium.registry.pop("Fragile-v0")
    gymnasium.registry.pop("Spelled-v0")


def alone(seed, actions):
    """Observations and rewards of an environment that shares no vector."""
    environment = gymnasium.make("CartPole-v1")
    shown = [environment.reset(seed=seed)[0]]
    rewards = []
    for action in actions:
        content, reward, terminated, truncated, _ = environment.step(action)
        shown.append(content)
        rewards.append(reward)
        if terminated or truncated:
            break
    return shown, sum(rewards)


async def played(environments, seed, actions):
    environment = await environments.open()
    try:
        seen = [await environment.reset(TASK, seed)]
        for action in actions:
            seen.append(await environment.step(action))
            if seen[-1].is_over:
                break
        return [each.content for each in seen], await environment.score()
    finally:
        await environment.close()


def actions_of(seed, count=60):
    return np.random.default_rng(seed).integers(0, 2, count).tolist()


@pytest.mark.parametrize(
    ("slots", "episodes", "vectorization"),
    [
        pytest.param(1, 3, "sync", id="one after another"),
        pytest.param(4, 4, "sync", id="as many as slots"),
        pytest.param(3, 10, "sync", id="more than slots"),
        pytest.param(8, 2, "sync", id="fewer than slots"),
        pytest.param(2, 3, "async", id="processes"),
    ],
)
def test_each_episode_is_as_if_it_were_alone(slots, episodes, vectorization):
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", slots, vectorization, stall_s=LONG_S)
        try:
            return await asyncio.gather(*(played(environments, seed, actions_of(seed)) for seed in range(episodes)))
        finally:
            await environments.close()

    for seed, (shown, score) in enumerate(ran(run())):
        wanted, wanted_score = alone(seed, actions_of(seed))
        assert len(shown) == len(wanted)
        assert all(np.array_equal(one, other) for one, other in zip(shown, wanted, strict=True))
        assert score == wanted_score


def test_one_that_never_acts_is_not_waited_for_and_nothing_happens_to_it():
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", 2, stall_s=0.01)
        idle = await environments.open()
        first = await idle.reset(TASK, 5)
        others = await played(environments, 3, actions_of(3))
        after = await idle.step(1)
        await idle.close()
        await environments.close()
        return first, after, others

    first, after, (shown, _) = ran(run())
    wanted, _ = alone(5, [1])
    assert np.array_equal(first.content, wanted[0]) and np.array_equal(after.content, wanted[1])
    assert len(shown) == len(alone(3, actions_of(3))[0])


def test_steps_are_made_together():
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", 2, stall_s=LONG_S)
        one, other, unused = await environments.open(), await environments.open(), None
        await one.reset(TASK, 0)
        await other.reset(TASK, 1)
        stepping = asyncio.create_task(one.step(0))
        await settled()
        waited = not stepping.done()
        await other.step(1)
        await stepping
        waiting = asyncio.create_task(environments.open())
        await settled()
        waited_for_slot = not waiting.done()
        await other.close()
        unused = await waiting
        await one.step(0)  # the new one has not begun, and is not waited for
        await one.close()
        await unused.close()
        await environments.close()
        return waited, waited_for_slot, others_running()

    assert ran(run()) == (True, True, set())


def test_an_episode_that_is_cut_off_gives_its_slot_back():
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", 2, stall_s=LONG_S)
        idle = await environments.open()
        await idle.reset(TASK, 0)
        cut = asyncio.create_task(played(environments, 1, [0, 0]))
        await asyncio.sleep(0.05)
        cut.cancel()
        await asyncio.wait([cut])
        closing = asyncio.create_task(idle.step(0))  # would wait for the other if it were still there
        await closing
        shown = await asyncio.gather(played(environments, 2, [0]), idle.step(0))
        await environments.close()
        return cut.cancelled(), len(shown[0][0])

    assert ran(run()) == (True, 2)


def test_a_truncated_episode_says_so():
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", 1, max_episode_steps=2)
        environment = await environments.open()
        await environment.reset(TASK, 0)
        seen = [await environment.step(0), await environment.step(1)]
        with pytest.raises(RuntimeError, match="reset it before the next step"):
            await environment.step(0)
        again = await environment.reset(TASK, 0)
        await environments.close()
        return [(each.is_over, each.is_truncated, each.info["truncated"]) for each in seen], again

    ends, again = ran(run())
    assert ends == [(False, False, False), (True, True, True)]
    assert np.array_equal(again.content, alone(0, [])[0][0])


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # gymnasium tells of it as well
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_world_that_breaks_takes_its_vector_down_but_not_what_comes_after(vectorization):
    async def run():
        environments = GymnasiumEnvironments("Fragile-v0", 2, vectorization, stall_s=LONG_S)
        one, other = await environments.open(), await environments.open()
        await one.reset(TASK)
        await other.reset(TASK)
        errors = await asyncio.gather(one.step(0), other.step(1), return_exceptions=True)
        with pytest.raises(RuntimeError, match="ZeroDivisionError: the world broke"):
            await one.step(0)
        begun = await one.reset(Task("begin at 7", {"options": {"start": 7}}))
        after = await one.step(0)
        await environments.close()
        return [str(error) for error in errors], begun, after

    errors, begun, after = ran(run())
    assert all("the world broke" in error for error in errors)
    assert (begun.info, after.content.tolist()) == ({"extra": {"count": 7}}, [8.0])


@pytest.mark.parametrize(
    ("action", "described"),
    [
        pytest.param(2, "2 is not an action of Discrete", id="out of range"),
        pytest.param("left", "'left' is not an action", id="text"),
        pytest.param([0], "is not an action", id="a list"),
    ],
)
def test_an_action_that_is_none_fails_its_episode_alone(action, described):
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", 2, stall_s=LONG_S)
        one, other = await environments.open(), await environments.open()
        await one.reset(TASK, 0)
        await other.reset(TASK, 0)
        stepping = asyncio.create_task(other.step(1))
        with pytest.raises(ValueError, match=described):
            await one.step(action)
        await one.step(0)
        await stepping
        await environments.close()

    ran(run())


@pytest.mark.parametrize(
    ("keys", "described"),
    [
        pytest.param({"slots": 0}, "slots is 0", id="no slots"),
        pytest.param({"vectorization": "threads"}, "write sync", id="an unknown vectorization"),
    ],
)
def test_wrong_keys_are_told_at_once(keys, described):
    with pytest.raises(ValueError, match=described):
        GymnasiumEnvironments("CartPole-v1", **keys)


def test_closing_ends_what_waits():
    async def run():
        environments = GymnasiumEnvironments("CartPole-v1", 2, stall_s=LONG_S)
        one, other = await environments.open(), await environments.open()
        await one.reset(TASK, 0)
        await other.reset(TASK, 0)
        waiting = [asyncio.create_task(each) for each in (one.step(0), environments.open(), environments.open())]
        await settled()
        await environments.close()
        await environments.close()
        described = await asyncio.gather(*waiting, return_exceptions=True)
        return [str(each) for each in described], others_running()

    described, running = ran(run())
    assert all("were closed" in each for each in described) and running == set()


@pytest.mark.filterwarnings("ignore::UserWarning")  # gymnasium's, that a text is no array
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_whatever_a_space_is_made_of_is_shown_as_the_world_shows_it(vectorization):
    async def run():
        environments = GymnasiumEnvironments("Spelled-v0", 2, vectorization, stall_s=LONG_S)
        try:
            one, same = await environments.open(), await environments.open()
            begun = [await each.reset(TASK, 7) for each in (one, same)]
            stepped = await asyncio.gather(one.step({"go": 2, "by": [0.5]}), same.step('{"go": 2, "by": [0.5]}'))
            again = await one.reset(TASK, 7)
            return [*begun, again], stepped
        finally:
            await environments.close()

    begun, stepped = ran(run())
    world = Spelled()
    first, _ = world.reset(seed=7)
    second, *_ = world.step(None)
    assert [repr(each.content) for each in begun] == [repr(begun[0].content)] * 3, "all episodes of a seed begin alike"
    for seen, wanted in ((begun[0], first), (stepped[0], second), (stepped[1], second)):
        assert (seen.content["note"], seen.content["door"]) == (wanted["note"], wanted["door"])
        assert np.array_equal(seen.content["at"], wanted["at"])
        assert np.array_equal(np.hstack(seen.content["pair"]), np.hstack(wanted["pair"]))
    assert stepped[0].info["done"] == stepped[1].info["done"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_observations_are_told_as_text_where_that_is_asked_for():
    async def run():
        environments = GymnasiumEnvironments("Spelled-v0", 1, as_text=True)
        environment = await environments.open()
        begun, stepped = await environment.reset(TASK, 7), await environment.step('{"go": 0, "by": [0.5]}')
        await environments.close()
        return begun.content, stepped.content

    for text in ran(run()):
        assert text.splitlines()[0].startswith("at: 0.25 ") and text.splitlines()[1].startswith("door: ")


@pytest.mark.parametrize(
    ("space", "action", "done"),
    [
        pytest.param(gymnasium.spaces.Discrete(3), "2", 2, id="a choice"),
        pytest.param(gymnasium.spaces.Discrete(3), " 2\n", 2, id="with spaces"),
        pytest.param(gymnasium.spaces.Discrete(2, start=1), 2, 2, id="a number"),
        pytest.param(gymnasium.spaces.Discrete(3), "3", None, id="a choice that is none"),
        pytest.param(gymnasium.spaces.Discrete(3), "left", None, id="a word"),
        pytest.param(gymnasium.spaces.Discrete(3), "1.5", None, id="half a choice"),
        pytest.param(gymnasium.spaces.Box(-1, 1, (2,)), "0.5, -0.5", [0.5, -0.5], id="numbers"),
        pytest.param(gymnasium.spaces.Box(-1, 1, (2,)), "0.5", None, id="too few"),
        pytest.param(gymnasium.spaces.Box(-1, 1, (2,)), [0.5, 9.0], None, id="beyond the bounds"),
        pytest.param(gymnasium.spaces.MultiDiscrete([2, 3]), "[1, 2]", [1, 2], id="JSON"),
        pytest.param(gymnasium.spaces.Text(9), "12", "12", id="text is text"),
        pytest.param(gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2)), {"b": 1}, None, id="another part"),
        pytest.param(gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2),)), [1], (1,), id="a tuple"),
        pytest.param(gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2),)), 1, None, id="no tuple"),
    ],
)
def test_actions_are_made_to_fit_or_refused(space, action, done):
    if done is None:
        with pytest.raises(ValueError, match="is not an action of"):
            fitted(space, action)
    else:
        found = fitted(space, action)
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == done


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(np.int64(3), "3", id="a choice"),
        pytest.param(np.array([0.5, -2.0, 1 / 3]), "0.5 -2 0.3333", id="a row"),
        pytest.param(np.eye(2), "1 0\n0 1", id="rows"),
        pytest.param({"at": np.array([1]), "note": "go"}, "at: 1\nnote: go", id="a mapping"),
        pytest.param((np.int64(1), "a key"), "1\na key", id="a tuple"),
    ],
)
def test_observations_as_text(content, text):
    assert text_of(content) == text


def test_an_image_is_no_text():
    with pytest.raises(ValueError, match="leave out as_text"):
        text_of(np.zeros((2, 2, 3)))
