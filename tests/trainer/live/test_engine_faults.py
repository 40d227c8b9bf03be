"""Engines, their workers and the learner that fail while a run needs them: it goes on, and every group counts once.

Starting a run costs far more than its steps, so that each run here gets several faults, one after the other.
"""

import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import pytest

from roost.engines.guarded.roost_key_guard import KEY_VARIABLE
from roost.engines.members import RestartLimit
from roost.engines.worker import WorkerOwner
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.trainer.learners import LearnerSender
from roost.trainer.loop import Loop
from tests.limits import HANG_S
from tests.local_ray import MARK
from tests.trainer.live.jobs import config, learnt_groups, trained, weights_of

pytestmark = pytest.mark.long

LEARNER, ENGINE, WORKER = "LearnerWorker", "roost.torch_engine", "ray::EngineWorker"
KEEPER = "server_keeper.py"
GROUPS, STEPS = 4, 3


def relaunches(reported):
    """The messages of a run that was launched anew."""
    return [text for text in reported if "continuing from step" in text]


def processes_of(name):
    """Processes that this test has started, by what they are called."""
    for process in psutil.process_iter():
        try:
            if name in " ".join(process.cmdline()) and process.environ().get(MARK) == os.environ[MARK]:
                yield process
        except psutil.Error:
            continue


def process_of(name):
    found = next(processes_of(name), None)
    if found is None:
        raise LookupError(f"no process of this run is called {name}")
    return found


def kill(name):
    process_of(name).kill()


class Disturbed(Arithmetic):
    """Inject the faults that a test plans, each once; the step continues afterwards."""

    planned: ClassVar[list] = []  # (episodes played since the launch, coroutine function), in order

    def __init__(self, tokenizer, largest=2):
        super().__init__(tokenizer, largest)
        self._played = 0

    async def run_episode(self, task, transcript):
        self._played += 1
        if Disturbed.planned and self._played > Disturbed.planned[0][0]:
            _, disturb = Disturbed.planned.pop(0)
            async with asyncio.timeout(HANG_S):
                await disturb()
        return await super().run_episode(task, transcript)


EPISODES = 16  # of a step


def episodes(steps):
    """A number of episodes that is reached in the middle of the step that follows so many."""
    return EPISODES * steps + 4


@pytest.fixture(autouse=True)
def nothing_planned():
    Disturbed.planned.clear()
    yield
    assert not Disturbed.planned, "a fault was not injected"


def values_of(model, rollout="1"):
    return config(
        model,
        {"actor": "0", "rollout": rollout},
        task={"_target_": "tests.trainer.live.test_engine_faults.Disturbed"},
        max_steps=STEPS,
        prompts_per_step=GROUPS,
        checkpoint_every=1,
    )


def taken_once(run):
    taken = sorted(number for groups in learnt_groups(run).values() for number in groups)
    return [record["step"] for record in run.steps()] == [1, 2, 3] and taken == list(range(GROUPS * STEPS))


def while_sending(patch, actions):
    """Do something once while the learner sends a version; return the versions at which it was done."""
    done, plain = [], LearnerSender.send

    async def send(self, engines, version):
        sending = asyncio.ensure_future(plain(self, engines, version))
        if version in actions and version not in done:
            done.append(version)
            actions[version]()
        return await sending

    patch.setattr(LearnerSender, "send", send)
    return done


def hang_an_engine():
    process_of(ENGINE).send_signal(signal.SIGSTOP)


def check_hung(notes, version):
    """A hung engine is waited for, killed, and gets the version in another way."""
    waits = [note for note in notes if note.startswith("waiting for rollout-")]
    assert any(f"to load version {version}" in wait for wait in waits), notes
    assert any("is lost: it does not answer; its server is killed" in note for note in notes), notes
    assert any(f" failed to load version {version} by shared memory: " in note for note in notes), notes


def kill_while_starting(patch):
    """Kill the server of one engine and the worker of the other, by whoever looks for them from the start on."""
    victims, killed, plain, lock = [ENGINE, WORKER], {}, WorkerOwner._start, asyncio.Lock()

    async def start(self, folder):
        starting = asyncio.ensure_future(plain(self, folder))
        async with lock:  # one after the other, whoever's start it is
            while victims and not starting.done():
                with contextlib.suppress(LookupError, psutil.Error):
                    process_of(KEEPER)  # a worker is starting its server
                    kill_one(victims[0])
                await asyncio.sleep(0.02)
        return await starting

    def kill_one(name):
        """Not of the engine that was hit already."""
        spared = killed.get(ENGINE, ())
        for process in processes_of(name):
            family = {process.pid, *(one.pid for one in process.parents())}
            if process.pid not in spared:
                process.kill()
                killed[victims.pop(0)] = family
                return

    patch.setattr(WorkerOwner, "_start", start)
    return killed


@dataclass(frozen=True)
class Ended:
    """A run that went through faults, and all that it said."""

    run: Any
    reported: list
    notes: list
    done: Any


@pytest.fixture(scope="module")
def two_engines(model, machine, tmp_path_factory):
    """A run of two engines.

    While they start, the server of one and the worker of the other are killed; one hangs while it takes version 2; a
    worker is killed in step 3; the learner is killed while it sends version 3.
    """
    reported, notes = [], []

    async def kill_a_worker():
        """Seen by the watch: an update that finds the engine dead first would start it without a word of its loss."""
        await described(notes, "is back, on version 2")
        seen = len(notes)
        kill(WORKER)
        await described(notes, " is lost: its process is gone", seen)
        await described(notes, "is back, on version 2", seen)

    with pytest.MonkeyPatch.context() as patch:
        killed = kill_while_starting(patch)
        sent = while_sending(patch, {2: hang_an_engine, 3: lambda: kill(LEARNER)})
        Disturbed.planned[:] = [(episodes(2), kill_a_worker)]
        run = trained(
            values_of(model, "1-2"), tmp_path_factory.mktemp("two") / "run", reported=reported, notes=notes
        ).run
    assert not Disturbed.planned, "no worker was killed"
    return Ended(run, reported, notes, (killed, sent))


async def described(notes, text, since=0):
    while not any(text in note for note in notes[since:]):
        await asyncio.sleep(0.05)


def test_every_group_counts_once(two_engines):
    killed, sent = two_engines.done
    assert set(killed) == {ENGINE, WORKER} and sent == [2, 3]
    assert taken_once(two_engines.run)
    assert len(two_engines.run.evaluations()) == 1


def test_only_the_end_of_a_learner_is_the_end_of_a_launch(two_engines):
    """Killed and hung engines are replaced; a learner that dies while it sends weights is not."""
    assert [text.splitlines()[-1] for text in relaunches(two_engines.reported)] == ["continuing from step 2"]


def test_an_engine_that_hangs_while_it_takes_weights(two_engines):
    check_hung(two_engines.notes, 2)


def give_other_weights(folder):
    """As anybody could before engines required a key; here by one who has it."""
    server = process_of(ENGINE)
    port = server.cmdline()[server.cmdline().index("--port") + 1]
    body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": folder}}).encode()
    headers = {"Authorization": f"Bearer {server.environ()[KEY_VARIABLE]}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/collective_rpc", body, headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        assert answer.status == 200


def test_the_only_engine_gets_other_weights_and_hangs_and_is_given_up(model, two_engines, tmp_path, monkeypatch):
    """Other weights in step 2, a hang while it takes version 2, and in step 3 it is killed and may not come back."""
    other = write_arithmetic_model(tmp_path / "other", seed=5, hidden_size=64, intermediate_size=128)
    reported, notes = [], []

    async def give():
        await asyncio.to_thread(give_other_weights, str(other))

    async def kill_for_good():
        monkeypatch.setattr(RestartLimit, "allows", lambda self, earlier, now: False)
        kill(ENGINE)

    sent = while_sending(monkeypatch, {2: hang_an_engine})
    # The episodes of step 2 are played twice.
    Disturbed.planned[:] = [(episodes(1), give), (episodes(3), kill_for_good)]
    run = trained(values_of(model), tmp_path / "run", reported=reported, notes=notes).run
    assert sent == [2] and taken_once(run)

    discarded = next(note for note in notes if "is discarded" in note)
    assert discarded.startswith("step 2 is discarded and generated again: rollout-0: the probe ")
    assert [record["groups/discarded"] for record in run.steps()] == [0, 4, 0]
    check_hung(notes, 2)
    (relaunch,) = relaunches(reported)
    assert relaunch.startswith("every engine has failed: rollout-0 is failed (lost ")
    assert relaunch.endswith("continuing from step 2")
    ours, theirs = weights_of(run), weights_of(two_engines.run)
    assert all(ours[name].equal(theirs[name]) for name in theirs), "the policy is that of a run without other weights"


def test_a_run_whose_only_engine_dies_in_a_streamed_step_is_launched_anew(model, tmp_path, monkeypatch):
    """The learner's weights have moved, and nobody else has those of the version: the step cannot be completed."""
    killed, reported, plain = [], [], Loop._learn

    async def learn(self, batch, cut_into, part):
        if (self.state.step, part) == (1, 0) and not killed:
            killed.append(part)
            kill(ENGINE)
        return await plain(self, batch, cut_into, part)

    monkeypatch.setattr(Loop, "_learn", learn)
    values = values_of(model)
    # One group at a time: those of the last minibatches need an engine after the first one was learnt from.
    values["train"] |= {"minibatch_size": 4, "old_logprobs": "rollout", "max_concurrent_episodes": 4}
    run = trained(values, tmp_path / "run", reported=reported).run
    assert killed == [0] and taken_once(run)
    (relaunch,) = relaunches(reported)
    assert relaunch.startswith("no engine has the current weights, and none can get them: rollout-0 is behind")
    assert relaunch.endswith("continuing from step 1")
