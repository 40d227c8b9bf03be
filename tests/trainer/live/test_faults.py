"""What breaks under a run: it goes on, and every group counts once."""

import os
import uuid
from pathlib import Path

import psutil
import pytest

from roost.rollout.arithmetic import Arithmetic
from tests.trainer.live.jobs import config, learnt_groups, trained

MARK = "ROOST_TEST_MARK"
LEARNER, ENGINE = "LearnerWorker", "roost.engines.torch_engine"


class Killing(Arithmetic):
    """Kills a process of this run once, when so many episodes were played."""

    def __init__(self, tokenizer, largest=2, victim="", after=0, flag=""):
        super().__init__(tokenizer, largest)
        self._victim, self._after, self._flag = victim, after, Path(flag)
        self._played = 0

    async def play(self, task, transcript):
        self._played += 1
        if self._played > self._after and not self._flag.exists():
            self._flag.touch()
            kill(self._victim)
        return await super().play(task, transcript)


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
def mark(monkeypatch):
    monkeypatch.setenv(MARK, uuid.uuid4().hex)


STEPS = 4


@pytest.mark.parametrize("victim", [LEARNER, ENGINE], ids=["learner", "engine"])
def test_what_is_killed_comes_back(model, tmp_path, victim):
    flag = tmp_path / "killed"
    task = {"_target_": "tests.trainer.live.test_faults.Killing", "victim": victim, "after": 40, "flag": str(flag)}
    values = config(model, {"actor": "0", "rollout": "1"}, task=task, steps=STEPS, checkpoint_every=1, max_policy_lag=1)
    said = []
    run = trained(values, tmp_path / "run", said=said).run
    assert flag.exists()
    assert [record["step"] for record in run.steps()] == list(range(1, STEPS + 1))
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert len(taken) == len(set(taken)) == 4 * STEPS, "each group is learnt from once"
    assert all(record["lag/max"] <= 1 for record in run.steps())
    assert any("going on from step" in text for text in said) is (victim == LEARNER)


def test_an_environment_that_raises_or_hangs_is_counted_and_replaced(model, tmp_path):
    task = {
        "_target_": "tests.trainer.live.scenarios.Faulty",
        "raises": ["0+0="],
        "raises_once": ["1+1="],
        "hangs": ["2+2="],
    }
    values = config(
        model, {"actor": "0", "rollout": "1"}, task=task, steps=3, attempts=2, episode_limit_s=2.0, group_size=2
    )
    run = trained(values, tmp_path / "run").run
    records = run.steps()
    assert len(records) == 3 and all(record["samples/finished"] == 8 for record in records)
    assert sum(record["groups/lost"] for record in records) >= 2
    assert sum(record["samples/failed"] for record in records) >= 4
    assert sum(record["samples/retried"] for record in records) >= 1
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert len(taken) == len(set(taken)) == 12
