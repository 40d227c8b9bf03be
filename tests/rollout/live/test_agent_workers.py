"""Agents and environments in workers of their own; turns are drawn through the driver."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from roost import NodePlacementStrategy
from roost.config.train import LearnerSettings, TrainSettings
from roost.rollout.env_worker import AgentGroup, AgentWorker, EnvironmentFailed, EnvWorker, RemoteEnvironments
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import EpisodeReward, Task
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest
from roost.rollout.gateway import Gateway
from roost.trainer.targets import class_name_of, load_scenario, load_tokenizer
from tests.limits import HANG_S
from tests.rollout.script import completion

ROOT = Path(__file__).parents[3]


class Counter:
    """Counts up to the number of its task, by as much as it is told."""

    async def reset(self, task, seed=None):
        self._wanted, self._count = task.data["wanted"], 0
        return Observation(0)

    async def step(self, action):
        if action == -2:
            raise SystemExit(0)
        if action < 0:
            raise ValueError("it only counts up")
        self._count += action
        return Observation(self._count, 1.0, self._count >= self._wanted, {"pid": os.getpid()})

    async def score(self):
        return float(self._count == self._wanted)

    async def close(self):
        pass


class Counters:
    def __init__(self, hardware=()):
        assert not hardware

    async def open(self):
        return Counter()


class Robot(Counters):
    """One for all."""

    def __init__(self):
        self._is_free = asyncio.Semaphore(1)
        self.closed = 0

    async def open(self):
        await self._is_free.acquire()
        counter, give_back = Counter(), self._is_free.release

        async def close():
            give_back()

        counter.close = close
        return counter

    async def close(self):
        self.closed += 1


class Declared(Counters):
    """One of which, whichever looks first, is not as it was declared; a file tells that one was let go."""

    def __init__(self, folder):
        self._folder = Path(folder)

    async def prepare(self):
        try:
            (self._folder / "wrong").touch(exist_ok=False)
        except FileExistsError:
            return
        raise OSError("no camera")

    async def close(self):
        (self._folder / f"closed {os.getpid()}").touch()


class Counting:
    """The policy's tokens are what is counted; the answer tells which processes took part."""

    def use_environments(self, environments):
        self._environments = environments

    def size(self, split):
        return 10

    def task(self, split, index):
        return Task(f"count to {index}", {"wanted": index})

    async def run_episode(self, task, transcript):
        environment = await self._environments.open()
        try:
            if task.data.get("exits"):
                await asyncio.gather(self._leave())
            if task.data.get("blocks_until"):
                self._block(Path(task.data["blocks_until"]))
            seen = await environment.reset(task)
            rewards = []
            while not seen.is_over:
                transcript.give([seen.content])
                (reported,) = await transcript.take()
                seen = await environment.step(reported)
                rewards.append(seen.reward)
            if task.data.get("kills"):
                os.kill(os.getpid(), signal.SIGKILL)
            return EpisodeReward(await environment.score(), f"{os.getpid()} {seen.info['pid']}", tuple(rewards))
        finally:
            await environment.close()

    async def _leave(self):
        raise SystemExit(0)

    def _block(self, file):
        while not file.exists():
            time.sleep(0.01)


def counting(task, model):
    return Counting()


class Stage:
    """Two agents' and two environments' workers, and a driver that draws 1 in every turn, or what it is told."""

    def __init__(self, cluster):
        node = NodePlacementStrategy([0, 0])
        self.agents = AgentWorker.create_group(counting, {}, "", HANG_S).launch(cluster, node, "agent", restarts=5)
        target = {"_target_": "tests.rollout.live.test_agent_workers.Counters"}
        self.envs = EnvWorker.create_group(target, [str(ROOT)]).launch(cluster, node, "env", restarts=5)
        self.says, self.drawn, self.cancelled = 1, 0, 0
        self.holds = None

    def open_policy(self, number, episode, attempt):
        async def sample(token_ids, turn, max_tokens):
            self.drawn += 1
            if self.holds is not None:
                try:
                    await self.holds.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            return completion((self.says,))

        return sample

    def run_episode(self, scenario):
        """Run `scenario(agents)` while the gateway serves."""

        async def run():
            gateway = Gateway()
            gateway.serve("group", self.open_policy)
            async with gateway.serving() as contact:
                assert set(await self.envs.prepare()) == {""}
                agents = AgentGroup(self.agents, contact, RemoteEnvironments(self.envs.hosts))
                await agents.prepare()
                return await asyncio.wait_for(scenario(agents.runner("group")), HANG_S)

        return asyncio.run(run())


@pytest.fixture(scope="module")
def stage(cluster):
    return Stage(cluster)


def asked(wanted, episode=0, **data):
    return EpisodeRequest(Task("", {"wanted": wanted, **data}), 0, episode)


def test_episodes_are_spread_over_agents_and_environments(stage):
    async def scenario(runner):
        return await asyncio.gather(*(runner.run_episode(asked(3, episode)) for episode in range(8)))

    episodes = stage.run_episode(scenario)
    assert [episode.score.reward for episode in episodes] == [1.0] * 8
    assert [episode.score.turn_rewards for episode in episodes] == [(1.0, 1.0, 1.0)] * 8
    assert episodes[0].sequences[0].token_ids.tolist() == [0, 1, 1, 1, 2, 1]
    pids = [episode.score.shown.split() for episode in episodes]
    agents, envs = {agent for agent, _ in pids}, {env for _, env in pids}
    assert len(agents) == len(envs) == 2 and len(agents | envs) == 4 and str(os.getpid()) not in agents | envs


def test_an_environment_that_raises_fails_its_episode_alone(stage):
    async def scenario(runner):
        stage.says = -1
        with pytest.raises(EpisodeFailed, match=r"EnvironmentFailed: ValueError: it only counts up"):
            await runner.run_episode(asked(3))
        stage.says = 1
        return await runner.run_episode(asked(2))

    assert stage.run_episode(scenario).score.reward == 1.0


def test_an_agent_or_an_environment_that_exits_fails_its_episode_alone(stage):
    async def scenario(runner):
        first = await runner.run_episode(asked(1))
        with pytest.raises(
            EpisodeFailed, match=r"ExitRaised: the code raised SystemExit\(0\) \(test_agent_workers.py:"
        ):
            await runner.run_episode(asked(3, exits=True))
        stage.says = -2
        with pytest.raises(EpisodeFailed, match=r"EnvironmentFailed: ExitRaised: the code raised SystemExit\(0\)"):
            await runner.run_episode(asked(3))
        stage.says = 1
        played = await asyncio.gather(*(runner.run_episode(asked(2, episode)) for episode in range(4)))
        return first.score.shown.split(), [one.score.shown.split() for one in played]

    (agent, env), after = stage.run_episode(scenario)
    assert agent in [pids[0] for pids in after] and env in [pids[1] for pids in after], "the same processes go on"


def test_an_agent_that_blocks_its_event_loop_is_named(stage, cluster, tmp_path):
    async def scenario(runner):
        notes = asyncio.Queue()
        following = asyncio.create_task(cluster.follow_notes(notes.put_nowait))
        playing = asyncio.create_task(runner.run_episode(asked(1, blocks_until=str(tmp_path / "go on"))))
        while "_block" not in (blocked := await notes.get()):
            pass  # of another worker, on a machine that is busy with other things
        (tmp_path / "go on").touch()
        while not (again := await notes.get()).startswith(f"{blocked.split(': ')[0]}: the event loop runs again"):
            pass
        following.cancel()
        return blocked, again, (await playing).score.reward

    blocked, again, reward = stage.run_episode(scenario)
    assert re.match(
        r"agent:\d: the event loop has not run for \d+ s: Counting._block \(.*test_agent_workers.py:", blocked
    )
    assert re.match(r"agent:\d: the event loop runs again after \d+ s", again) and reward == 1.0


def test_an_episode_that_is_cancelled_ends_where_it_is_played(stage):
    async def scenario(runner):
        stage.holds, before = asyncio.Event(), stage.drawn
        playing = asyncio.create_task(runner.run_episode(asked(3)))
        while stage.drawn == before:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        while not stage.cancelled:  # the turn ends with the episode, wherever that is played
            await asyncio.sleep(0.01)
        stage.holds = None
        after = await runner.run_episode(asked(1))
        return playing.cancelled(), stage.drawn - before, after.score.reward

    assert stage.run_episode(scenario) == (True, 2, 1.0)


def test_an_agent_that_dies_takes_its_episodes_with_it_and_comes_back(stage):
    async def scenario(runner):
        with pytest.raises(EpisodeFailed, match="its worker agent:0 was lost: "):
            await runner.run_episode(asked(1, kills=True))
        played = [(await runner.run_episode(asked(2, episode))).score.shown.split()[0] for episode in range(4)]
        assert len(set(played)) == 1, "the other one plays while it is started again"
        while len(set(played)) == 1:
            ended = await asyncio.gather(
                *(runner.run_episode(asked(2, episode)) for episode in range(4)), return_exceptions=True
            )
            played += [one.score.shown.split()[0] for one in ended if not isinstance(one, EpisodeFailed)]
        return set(played)

    assert len(stage.run_episode(scenario)) == 2


def test_an_environment_s_process_that_dies_fails_its_episodes_and_comes_back(stage):
    async def scenario(runner):
        first = await runner.run_episode(asked(1))
        stage.holds, before = asyncio.Event(), stage.drawn
        playing = [asyncio.create_task(runner.run_episode(asked(2, episode))) for episode in range(4)]
        while stage.drawn < before + 4:
            await asyncio.sleep(0.01)
        os.kill(int(first.score.shown.split()[1]), signal.SIGKILL)
        stage.holds.set()
        ended = await asyncio.gather(*playing, return_exceptions=True)
        stage.holds = None
        failed = [error for error in ended if isinstance(error, EpisodeFailed)]
        assert failed and all("the environment's process is gone" in str(error) for error in failed)
        return [await runner.run_episode(asked(2, episode)) for episode in range(4)]

    assert [episode.score.reward for episode in stage.run_episode(scenario)] == [1.0] * 4


class Holding:
    """Holds a process for as long as it is open, as one that has servers does."""

    def __init__(self):
        self._held = subprocess.Popen(["sleep", "1000"])

    async def run_episode(self, task, transcript):
        if task.data.get("stumbles"):
            self._stumble()
        transcript.give([0])
        await transcript.take()
        return EpisodeReward(0.0, str(self._held.pid))

    def _stumble(self):
        raise LookupError("the key is under the mat")

    async def close(self):
        self._held.kill()
        self._held.wait()


def holding(task, model):
    return Holding()


def test_workers_tell_why_an_episode_failed_and_let_go_of_what_they_hold(stage, cluster):
    node = NodePlacementStrategy([0, 0])
    group = AgentWorker.create_group(holding, {}, "", HANG_S).launch(cluster, node, "holding", restarts=1)

    async def run():
        gateway = Gateway()
        gateway.serve("group", stage.open_policy)
        async with gateway.serving() as contact:
            agents = AgentGroup(group, contact)
            await agents.prepare()
            runner = agents.runner("group")
            with pytest.raises(EpisodeFailed, match="the key is under the mat") as failed:
                await runner.run_episode(EpisodeRequest(Task("", {"stumbles": True}), 0, 0))
            assert "on holding:" in failed.value.traceback and "in _stumble" in failed.value.traceback
            played = await asyncio.gather(
                *(runner.run_episode(EpisodeRequest(Task(""), 0, episode)) for episode in range(4))
            )
            held = {int(episode.score.shown) for episode in played}
            assert len(held) == 2 and all(map(is_there, held))
            stage.holds = asyncio.Event()
            late = asyncio.create_task(runner.run_episode(EpisodeRequest(Task(""), 0, 4)))
            before = stage.drawn
            while stage.drawn == before:
                await asyncio.sleep(0.01)
            await agents.finish(HANG_S)
            stage.holds = None
            with pytest.raises(EpisodeFailed, match="it was cancelled"):
                await late
            assert not any(map(is_there, held))
            with pytest.raises(EpisodeFailed, match="the run is over"):
                await runner.run_episode(EpisodeRequest(Task(""), 0, 5))
            await group.prepare(contact, None)
            return await group.run_episode("late", "group", EpisodeRequest(Task(""), 0, 6))

    assert [str(answer) for answer in asyncio.run(run())] == ["the run is over"] * 2


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Modest:
    """Tells which of the large packages its process has imported."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def size(self, split):
        return 1

    def task(self, split, index):
        return Task("")

    async def run_episode(self, task, transcript):
        transcript.give(self._tokenizer("a b", add_special_tokens=False).input_ids)
        await transcript.take()
        return EpisodeReward(0.0, " ".join(name for name in ("torch", "transformers") if name in sys.modules))


def test_a_tokenizer_does_not_bring_torch_along(stage, cluster, tmp_path):
    tokenizer = write_tokenizer(tmp_path)
    make = partial(load_scenario, tokenizer_class=class_name_of(tokenizer))
    target = {"_target_": "tests.rollout.live.test_agent_workers.Modest"}
    group = AgentWorker.create_group(make, target, str(tmp_path), HANG_S, [str(ROOT)]).launch(
        cluster, NodePlacementStrategy([0]), "modest"
    )

    async def run():
        gateway = Gateway()
        gateway.serve("group", stage.open_policy)
        async with gateway.serving() as contact:
            agents = AgentGroup(group, contact)
            await agents.prepare()
            return await asyncio.wait_for(agents.runner("group").run_episode(EpisodeRequest(Task(""), 0, 0)), HANG_S)

    assert asyncio.run(run()).score.shown == "transformers"


def write_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def robots(cluster):
    target = {"_target_": "tests.rollout.live.test_agent_workers.Robot"}
    node = NodePlacementStrategy([0])
    return EnvWorker.create_group(target, [str(ROOT)], idle_s=5.0).launch(cluster, node, "robots", restarts=1)


def test_an_episode_that_gives_up_waiting_keeps_no_robot_from_others(robots):
    async def run():
        environments = RemoteEnvironments(robots.hosts)
        first = await environments.open()
        waiting = asyncio.create_task(environments.open())
        await asyncio.sleep(0.3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await first.close()
        second = await asyncio.wait_for(environments.open(), HANG_S)
        seen = await second.reset(Task("", {"wanted": 1}))
        await second.close()
        return seen.content

    assert asyncio.run(run()) == 0


def test_what_a_player_that_died_left_open_is_closed(robots):
    async def run():
        await RemoteEnvironments(robots.hosts).open()  # and is never heard of again
        again = await asyncio.wait_for(RemoteEnvironments(robots.hosts).open(), HANG_S)
        await again.close()
        await robots.finish()

    asyncio.run(run())


def test_where_one_environment_is_wrong_all_are_let_go(cluster, tmp_path):
    from roost.trainer.rollout_workers import open_stages
    from roost.trainer.watching import FailureFiles  # here, as workers import this module, and these bring torch along

    target = {"_target_": "tests.rollout.live.test_agent_workers.Declared", "folder": str(tmp_path)}
    group = EnvWorker.create_group(target, [str(ROOT)]).launch(cluster, NodePlacementStrategy([0, 0]), "declared")

    async def run():
        settings, failures = TrainSettings(LearnerSettings("model")), FailureFiles(tmp_path / "failures", print)
        async with open_stages({"env": group}, Counting(), None, settings, True, failures):
            raise AssertionError("nobody looked")

    with pytest.raises(EnvironmentFailed, match="the environments cannot be created: OSError: no camera"):
        asyncio.run(asyncio.wait_for(run(), HANG_S))
    assert len(list(tmp_path.glob("closed *"))) == 2
