"""Engines that join and leave a run: no group is lost or learnt from twice, and the staleness bound holds."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from roost.cli.runs import request_scaling
from roost.placement.plan import Plan
from roost.procs.files import holder_of
from roost.rollout.arithmetic import Arithmetic
from roost.rollout.episode import Transcript
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.records.scale_requests import Change, ScaleState
from tests.limits import HANG_S
from tests.trainer.live.jobs import config, learnt_groups, trained

pytestmark = pytest.mark.long

CHANGES, GROUPS, GENERATIONS, STALENESS = 20, 2, 2, 1
STEPS = CHANGES + 1


class Paced(Arithmetic):
    """An episode of step n ends when n changes are done; until then the policy talks: requests are in flight."""

    changes = 0

    def __init__(self, tokenizer, largest=2):
        super().__init__(tokenizer, largest)
        self._begun = 0

    async def run_episode(self, task, transcript):
        step, self._begun = self._begun // (GROUPS * GENERATIONS), self._begun + 1
        score = await super().run_episode(task, transcript)
        while Paced.changes < min(step, CHANGES):  # later episodes are of the evaluation
            talk = Transcript(transcript._sample)
            talk.give(self._ids(task.name))
            await talk.take()
            await asyncio.sleep(0.1)  # leaves the engines that start some of the machine
        return score


class Scaling(threading.Thread):
    """Asks for changes at random moments, as `roost scale` does, and notes the answers."""

    def __init__(self, folder, seed):
        super().__init__(daemon=True)
        self._folder, self._random = Path(folder), random.Random(seed)
        self.answers, self.sizes, self.commands = [], [2], []

    def run(self):
        until(lambda: RunFolder(self._folder).has_run and holder_of(self._folder) is not None)
        run = RunFolder(self._folder)
        self.commands += [roost_scale(run, "rollout=+9"), roost_scale(run, "actor=+1"), roost_scale(run, "rollout=3")]
        self.sizes.append(3)
        Paced.changes += 1
        while Paced.changes < CHANGES:
            time.sleep(self._random.uniform(0.0, 0.5))
            size = self._random.choice([count for count in (1, 2, 3) if count != self.sizes[-1]])
            change = Change("rollout", size - self.sizes[-1], is_total=False)
            self.answers.append(request_scaling(run, [change], HANG_S, lambda text: None))
            self.sizes.append(Plan.from_json(run.plan_file.read_text())["rollout"].world_size)
            Paced.changes += 1


def until(is_so):
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def roost_scale(run, change):
    command = [sys.executable, "-m", "roost", "scale", str(run.path), change, "--wait", str(HANG_S)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S)


@pytest.fixture(scope="module")
def scaled_run(model, machine, tmp_path_factory):
    folder, notes, reported = tmp_path_factory.mktemp("scaled") / "run", [], []
    values = config(
        model,
        {"actor": "0", "rollout": "1-2"},
        task={"_target_": "tests.trainer.live.test_scaling.Paced"},
        max_steps=STEPS,
        prompts_per_step=GROUPS,
        num_generations=GENERATIONS,
        max_staleness=STALENESS,
    )
    scaling = Scaling(folder, seed=17)
    scaling.start()
    run = trained(values, folder, notes=notes, reported=reported).run
    scaling.join(HANG_S)
    return run, scaling, notes, reported


def test_every_group_is_learnt_from_once_within_the_staleness_bound(scaled_run):
    run, _, _, reported = scaled_run
    taken = [number for groups in learnt_groups(run).values() for number in groups]
    assert sorted(taken) == list(range(GROUPS * STEPS))
    steps = run.steps()
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1)) and run.finished_at() == STEPS
    assert max(record["staleness/max"] for record in steps) <= STALENESS
    assert sum(record["samples/failed"] for record in steps) == 0
    assert not [text for text in reported if "continuing from step" in text]


def test_all_changes_were_applied_and_the_plan_file_follows(scaled_run):
    run, scaling, notes, _ = scaled_run
    assert [answer.state for answer in scaling.answers] == [ScaleState.APPLIED] * (CHANGES - 1)
    assert len(scaling.sizes) == CHANGES + 1 and set(scaling.sizes) == {1, 2, 3}
    assert Plan.from_json(run.plan_file.read_text())["rollout"].world_size == scaling.sizes[-1]
    assert len([note for note in notes if note.startswith("roost scale; rollout:")]) == CHANGES
    assert not list((run.path / "scale").iterdir())


def test_the_command_says_what_changes_and_why_not(scaled_run):
    _, scaling, _, _ = scaled_run
    full, learner, more = scaling.commands
    assert (full.returncode, learner.returncode, more.returncode) == (1, 1, 0)
    assert "there is no room for 9 more" in full.stderr
    assert "actor is not an engine of" in learner.stderr
    assert "rollout: 2 -> 3 processes" in more.stdout and "rollout-2 has joined" in more.stdout


def test_the_changes_are_in_the_trace(scaled_run):
    run, _, _, _ = scaled_run
    names = {event["name"] for event in json.loads(run.trace_file.read_text())["traceEvents"]}
    assert {"join", "leave"} <= names
