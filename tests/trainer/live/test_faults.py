"""Faults during a run: it continues, and every group counts once."""

import os
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from roost.rollout.arithmetic import Arithmetic
from tests.local_ray import MARK
from tests.trainer.live.jobs import OFFLOADS, config, learnt_groups, trained

LEARNER, ENGINE = "LearnerWorker", "roost.torch_engine"


class Killing(Arithmetic):
    """Kills processes of this run, each once, when so many episodes were played."""

    killed: ClassVar = []

    def __init__(self, tokenizer, largest=2, victims=()):
        super().__init__(tokenizer, largest)
        self._victims = list(victims)
        self._played = 0

    async def run_episode(self, task, transcript):
        self._played += 1
        if self._victims and self._played > self._victims[0][1]:
            victim, _ = self._victims.pop(0)
            kill(victim)
            Killing.killed.append(victim)
        return await super().run_episode(task, transcript)


def kill(victim):
    """End a process that was started by this test, by what it is called."""
    own = os.environ[MARK]
    for process in psutil.process_iter():
        try:
            if victim in " ".join(process.cmdline()) and process.environ().get(MARK) == own:
                process.kill()
                return
        except psutil.Error:
            continue
    raise LookupError(f"no process of this run is called {victim}")


@pytest.fixture(autouse=True)
def none_killed(monkeypatch):
    monkeypatch.setattr(Killing, "killed", [])


STEPS = 5


@pytest.mark.long
def test_an_engine_and_a_learner_that_are_killed_come_back(model, tmp_path):
    victims = [[ENGINE, 24], [LEARNER, 56]]  # while steps of 16 episodes each are under way
    task = {"_target_": "tests.trainer.live.test_faults.Killing", "victims": victims}
    values = config(
        model, {"actor": "0", "rollout": "1"}, task=task, max_steps=STEPS, checkpoint_every=1, max_staleness=1
    )
    reported = []
    run = trained(values, tmp_path / "run", reported=reported).run
    assert Killing.killed == [ENGINE, LEARNER]
    assert [record["step"] for record in run.steps()] == list(range(1, STEPS + 1))
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert len(taken) == len(set(taken)) == 4 * STEPS, "each group is learnt from once"
    assert all(record["staleness/max"] <= 1 for record in run.steps())
    assert len([text for text in reported if "continuing from step" in text]) == 1, (
        "an engine's end is no end of the run"
    )


@pytest.mark.long
def test_an_engine_that_is_killed_while_the_learner_is_on_the_host_comes_back(model, tmp_path):
    """Its weights are the learner's, which are moved to the device and back once more."""
    task = {"_target_": "tests.trainer.live.test_faults.Killing", "victims": [[ENGINE, 20]]}
    values = config(model, {"actor,rollout": "0"}, task=task, actor=OFFLOADS, max_steps=3)
    run = trained(values, tmp_path / "run").run
    assert Killing.killed == [ENGINE]
    assert sorted(number for groups in learnt_groups(run).values() for number in groups) == list(range(12))
    assert all(record["mismatch/logprob_max"] < 1e-3 for record in run.steps())


@pytest.mark.long
def test_an_environment_that_raises_or_hangs_is_counted_and_replaced(model, tmp_path):
    task = {
        "_target_": "tests.trainer.live.scenarios.Faulty",
        "raises": ["0+0="],
        "raises_once": ["1+1="],
        "hangs": ["2+2="],
        "exits": ["0+1="],
    }
    values = config(
        model,
        {"actor": "0", "rollout": "1"},
        task=task,
        max_steps=3,
        episode_attempts=2,
        episode_timeout_s=5.0,
        num_generations=2,
    )
    run = trained(values, tmp_path / "run").run
    records = run.steps()
    assert len(records) == 3 and all(record["samples/finished"] == 8 for record in records)
    assert sum(record["groups/lost"] for record in records) >= 2
    assert sum(record["samples/failed"] for record in records) >= 4
    assert sum(record["samples/retried"] for record in records) >= 1
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert len(taken) == len(set(taken)) == 12
    kept = [file.read_text() for file in run.failures.glob("*.txt")]
    raised = ("cannot be played (scenarios.py:", "cannot be played just now (scenarios.py:")
    for reason in (*raised, "timed out after 5 s", "the code raised SystemExit() (scenarios.py:"):
        assert any(reason in text.splitlines()[0] and "Traceback" in text for text in kept), (reason, kept)


@pytest.mark.long
def test_workers_of_agents_environments_and_rewards_that_are_killed_in_episodes_come_back(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))  # workers import the scenario, too
    here, marks = "tests.trainer.live.scenarios", tmp_path / "marks"
    marks.mkdir()
    environment = {"_target_": f"{here}.Handles", "folder": str(marks)}
    task = {"_target_": f"{here}.Handled", "environment": environment, "folder": str(marks)}
    of_node = {"node_group": "node", "placement": "0:0-1"}
    placement = {"actor": "0", "rollout": "1", "agent": of_node, "env": of_node, "reward": of_node}
    rewards = {"exact": {"_target_": f"{here}.Fatal", "folder": str(marks)}}
    values = config(model, placement, task=task, max_steps=2, rewards=rewards, episode_attempts=6, num_generations=2)
    reported = []
    run = trained(values, tmp_path / "run", reported=reported).run
    assert sorted(mark.name for mark in marks.iterdir()) == ["agent", "env", "reward"], "each was killed once"
    assert learnt_groups(run) == {1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}
    assert [record["samples/finished"] for record in run.steps()] == [8.0, 8.0]
    assert sum(record["samples/retried"] for record in run.steps()) >= 2
    assert not [text for text in reported if "continuing from step" in text], "none of them is the end of the run"
    kept = "".join(file.read_text() for file in run.failures.glob("*.txt"))
    assert " was lost: " in kept and "the environment's process is gone" in kept
