"""Engines, their workers and the learner that fail while a run needs them: it goes on, and every group counts once."""

import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from typing import ClassVar

import psutil
import pytest

from roost.engines.guarded.roost_key_guard import KEY_VARIABLE
from roost.engines.members import RestartLimit
from roost.engines.worker import WorkerOwner
from roost.rollout.arithmetic import Arithmetic, write_arithmetic_model
from roost.trainer.learners import LearnerSender
from roost.trainer.loop import Loop
from tests.limits import HANG_S
from tests.trainer.live.jobs import MARK, config, learnt_groups, trained, weights_of

pytestmark = pytest.mark.long

LEARNER, ENGINE, WORKER = "LearnerWorker", "roost.torch_engine", "ray::EngineWorker"
KEEPER = "server_keeper.py"
GROUPS, STEPS = 4, 3


def relaunches(said):
    """The messages of a run that was launched anew."""
    return [text for text in said if "continuing from step" in text]


def process_of(name):
    """A process that this test has started, by what it is called."""
    for process in psutil.process_iter():
        try:
            if name in " ".join(process.cmdline()) and process.environ().get(MARK) == os.environ[MARK]:
                return process
        except psutil.Error:
            continue
    raise LookupError(f"no process of this run is called {name}")


class Disturbed(Arithmetic):
    """Something is done to the run, once, when so many episodes were played; the step goes on when it is seen."""

    done: ClassVar = []
    is_seen: ClassVar = staticmethod(lambda: True)

    def __init__(self, tokenizer, largest=2, after=0, action="", argument=None):
        super().__init__(tokenizer, largest)
        self._after, self._action, self._argument = after, action, argument
        self._played = 0

    async def run_episode(self, task, transcript):
        self._played += 1
        if self._played > self._after and self._action and not Disturbed.done:
            Disturbed.done.append(self._action)
            await asyncio.to_thread(ACTIONS[self._action], self._argument)
            async with asyncio.timeout(HANG_S):
                while not Disturbed.is_seen():
                    await asyncio.sleep(0.05)
        return await super().run_episode(task, transcript)


def kill(name):
    process_of(name).kill()


def give_other_weights(folder):
    """As anybody could before engines required a key; here by one who has it."""
    server = process_of(ENGINE)
    port = server.cmdline()[server.cmdline().index("--port") + 1]
    body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": folder}}).encode()
    headers = {"Authorization": f"Bearer {server.environ()[KEY_VARIABLE]}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/collective_rpc", body, headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        assert answer.status == 200


ACTIONS = {"kill": kill, "other weights": give_other_weights}


@pytest.fixture(autouse=True)
def nothing_done(monkeypatch):
    monkeypatch.setattr(Disturbed, "done", [])


def values_of(model, rollout="1", **task):
    task = {"_target_": "tests.trainer.live.test_engine_faults.Disturbed", **task}
    return config(
        model,
        {"actor": "0", "rollout": rollout},
        task=task,
        max_steps=STEPS,
        prompts_per_step=GROUPS,
        checkpoint_every=1,
    )


def taken_once(run):
    taken = sorted(number for groups in learnt_groups(run).values() for number in groups)
    return [record["step"] for record in run.steps()] == [1, 2, 3] and taken == list(range(GROUPS * STEPS))


def test_a_killed_worker_of_an_engine_is_replaced_and_the_run_ends_once(model, tmp_path, monkeypatch):
    """It is seen by the watch: an update that finds the engine dead first would start it without a word of its loss."""
    said, notes = [], []
    is_lost = staticmethod(lambda: any(" is lost: its process is gone" in note for note in notes))
    monkeypatch.setattr(Disturbed, "is_seen", is_lost)
    values = values_of(model, "1-2", after=20, action="kill", argument=WORKER)
    run = trained(values, tmp_path / "run", said=said, notes=notes).run
    assert Disturbed.done == ["kill"] and taken_once(run)
    assert not relaunches(said)
    assert len(run.evaluations()) == 1
    assert is_lost(), notes


def test_other_weights_in_an_engine_are_noticed_and_not_learnt_from(model, tmp_path):
    other = write_arithmetic_model(tmp_path / "other", seed=5, hidden_size=64, intermediate_size=128)
    plain = trained(values_of(model), tmp_path / "plain").run
    notes = []
    values = values_of(model, after=20, action="other weights", argument=str(other))
    run = trained(values, tmp_path / "run", notes=notes).run
    assert Disturbed.done == ["other weights"] and taken_once(run)
    told = next(note for note in notes if "is discarded" in note)
    assert told.startswith("step 2 is discarded and generated again: rollout-0: the probe ")
    assert [record["groups/discarded"] for record in run.steps()] == [0, 4, 0]
    before, after = weights_of(plain), weights_of(run)
    assert all(before[name].equal(after[name]) for name in before), "the policy is that of an undisturbed run"


@pytest.mark.parametrize("victim", [ENGINE, WORKER], ids=["server", "worker"])
def test_an_engine_that_is_killed_while_it_starts(model, tmp_path, victim, monkeypatch):
    """By whoever looks for it from the moment on that it is asked to start."""
    killed, said = [], []
    plain = WorkerOwner._start

    async def start(self, folder):
        starting = asyncio.ensure_future(plain(self, folder))
        while not killed:
            with contextlib.suppress(LookupError, psutil.Error):
                process_of(KEEPER)  # the worker is starting the server
                kill(victim)
                killed.append(victim)
            await asyncio.sleep(0.02)
        return await starting

    monkeypatch.setattr(WorkerOwner, "_start", start)
    run = trained(values_of(model), tmp_path / "run", said=said).run
    assert killed == [victim] and taken_once(run)
    assert not relaunches(said)


@pytest.fixture
def at_second_sending(monkeypatch):
    """Do something while the learner sends version 2."""
    done = []

    def install(action):
        plain = LearnerSender.send

        async def send(self, engines, version):
            sending = asyncio.ensure_future(plain(self, engines, version))
            if version == 2 and not done:
                done.append(version)
                action()
            return await sending

        monkeypatch.setattr(LearnerSender, "send", send)
        return done

    return install


def test_a_learner_that_is_killed_while_it_sends_weights(model, tmp_path, at_second_sending):
    done, said = at_second_sending(lambda: kill(LEARNER)), []
    run = trained(values_of(model), tmp_path / "run", said=said).run
    assert done == [2] and taken_once(run)
    assert [text.splitlines()[-1] for text in said if "continuing from step" in text] == ["continuing from step 1"]


@pytest.mark.parametrize("rollout", ["1", "1-2"], ids=["one-engine", "two-engines"])
def test_an_engine_that_hangs_while_it_takes_weights(model, tmp_path, rollout, at_second_sending):
    done, said, notes = at_second_sending(lambda: process_of(ENGINE).send_signal(signal.SIGSTOP)), [], []
    run = trained(values_of(model, rollout), tmp_path / "run", said=said, notes=notes).run
    assert done == [2] and taken_once(run)
    assert not relaunches(said)
    assert any(note.startswith("waiting for rollout-") and "to load version 2" in note for note in notes), notes
    assert any("is lost: it does not answer; its server is killed" in note for note in notes), notes
    assert any(" failed to load version 2 by shared memory: " in note for note in notes), notes


def test_a_run_whose_only_engine_is_given_up_is_launched_anew(model, tmp_path, monkeypatch):
    monkeypatch.setattr(RestartLimit, "allows", lambda self, earlier, now: False)
    said = []
    run = trained(values_of(model, after=20, action="kill", argument=ENGINE), tmp_path / "run", said=said).run
    assert Disturbed.done == ["kill"] and taken_once(run)
    (relaunch,) = relaunches(said)
    assert relaunch.startswith("every engine has failed: rollout-0 is failed (lost 1 time within ")
    assert relaunch.endswith("continuing from step 1")


def test_a_run_whose_only_engine_dies_in_a_streamed_step_is_launched_anew(model, tmp_path, monkeypatch):
    """The learner's weights have moved, and nobody else has those of the version: the step cannot be completed."""
    killed, said, plain = [], [], Loop._learn

    async def learn(self, batch, cut_into, part):
        if (self.state.step, part) == (1, 0) and not killed:
            killed.append(part)
            kill(ENGINE)
        return await plain(self, batch, cut_into, part)

    monkeypatch.setattr(Loop, "_learn", learn)
    values = values_of(model)
    # One group at a time: those of the last minibatches need an engine after the first one was learnt from.
    values["train"] |= {"minibatch_size": 4, "old_logprobs": "rollout", "max_concurrent_episodes": 4}
    run = trained(values, tmp_path / "run", said=said).run
    assert killed == [0] and taken_once(run)
    (relaunch,) = relaunches(said)
    assert relaunch.startswith("no engine has the current weights, and none can get them: rollout-0 is behind")
    assert relaunch.endswith("continuing from step 1")
