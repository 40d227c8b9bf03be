"""Damage under a run: locked folders, full disks, damaged checkpoints, numbers that are not finite."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from roost.procs.files import DiskFull, FolderLock
from roost.rollout.arithmetic import Arithmetic
from roost.trainer.guards import Diverged
from roost.trainer.records.checkpoints import Checkpoints
from roost.trainer.records.resuming import RunInUse
from roost.trainer.records.run_folder import RunFolder
from tests.small_disk import small_disk
from tests.trainer.live.jobs import config, learnt_groups, trained, weights_of
from tests.trainer.live.test_faults import LEARNER, kill

SPLIT = {"actor": "0", "rollout": "1"}
STEPS = 3


def values(model, **train_keys):
    return config(model, SPLIT, **{"max_steps": STEPS, "checkpoint_every": 1, "eval_every": 2, **train_keys})


def evaluated(run):
    return [json.loads(line)["step"] for line in run.evaluation_lines.path.read_text().splitlines()]


def saved(run):
    return [one.step for one in Checkpoints(run.checkpoints, 1).found()]


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run to its end, to be copied."""
    return trained(values(model), tmp_path_factory.mktemp("durable") / "finished").run


@pytest.fixture
def copied(finished, tmp_path):
    return RunFolder(shutil.copytree(finished.path, tmp_path / "copied"))


def flip(file, offset):
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 0x10]))


def test_a_finished_run_that_is_resumed_says_so_and_does_nothing(model, copied):
    before = {file: file.read_bytes() for file in copied.path.glob("*.jsonl")}
    reported = []
    outcome = trained(values(model), copied.path, resumes=True, reported=reported)
    assert outcome.state.step == STEPS and not outcome.was_stopped
    assert any("is finished: 3 steps done" in text for text in reported)
    assert {file: file.read_bytes() for file in copied.path.glob("*.jsonl")} == before
    assert evaluated(copied) == [0, 2, 3]


def test_a_folder_in_use_is_refused_and_its_holder_named(model, copied):
    with FolderLock.take(copied.path), pytest.raises(RunInUse, match=rf"in use by process {os.getpid()} on \S+ since"):
        trained(values(model), copied.path, resumes=True)


def test_a_damaged_newest_checkpoint_is_passed_over_bit_for_bit(model, finished, copied):
    """Bit flips in the newest, a step of another timeline after that: the result is that of the undisturbed run."""
    newest = Checkpoints(copied.checkpoints, 1).newest()
    data = max(newest.learner.glob("*.distcp"), key=lambda file: file.stat().st_size)
    flip(data, data.stat().st_size // 2)
    reported = []
    run = trained(values(model), copied.path, resumes=True, reported=reported).run
    assert any("step-000003/learner is damaged: __0_0.distcp changed; using an earlier" in text for text in reported), (
        reported
    )
    assert "continuing from step 2" in reported
    assert (run.checkpoints / "step-000003.aside").is_dir()
    ours, theirs = weights_of(run), weights_of(finished)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert learnt_groups(run) == learnt_groups(finished)
    assert evaluated(run) == [0, 2, 3]


@pytest.mark.long
def test_a_run_goes_on_from_the_step_that_is_asked_for(model, copied):
    reported = []
    run = trained(values(model, max_steps=2), copied.path, reported=reported, resumes=True, from_step=1).run
    assert "continuing from step 1" in reported and any(
        "step-000002.aside, step-000003.aside" in text for text in reported
    )
    assert [record["step"] for record in run.steps()] == [1, 2] and evaluated(run) == [0, 2]
    assert saved(run) == [1, 2]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 7; there are: 1, 2"):
        trained(values(model), copied.path, resumes=True, from_step=7)


class KillingAtStart(Arithmetic):
    """Kills a learner before the first step, once."""

    def __init__(self, tokenizer, largest=2, mark=""):
        super().__init__(tokenizer, largest)
        self._mark = Path(mark)

    async def run_episode(self, task, transcript):
        if not self._mark.exists():
            self._mark.touch()
            kill(LEARNER)
        return await super().run_episode(task, transcript)


@pytest.mark.long
def test_a_learner_that_is_killed_before_the_first_step_comes_back(model, finished, tmp_path):
    task = {"_target_": f"{__name__}.KillingAtStart", "mark": str(tmp_path / "killed")}
    reported = []
    run = trained(values(model, task=task), tmp_path / "run", reported=reported).run
    assert any("continuing from step 0" in text for text in reported)
    assert evaluated(run) == [0, 2, 3]
    ours, theirs = weights_of(run), weights_of(finished)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert learnt_groups(run) == learnt_groups(finished)


def size_of(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Filling(Arithmetic):
    """Fills a disk when so many episodes were played."""

    def __init__(self, tokenizer, largest=2, disk="", after=0):
        super().__init__(tokenizer, largest)
        self._disk, self._left = disk, after

    async def run_episode(self, task, transcript):
        self._left -= 1
        if not self._left:
            with contextlib.suppress(OSError), Path(self._disk, "filler").open("wb", buffering=0) as file:
                while file.write(bytes(1 << 12)):
                    pass
        return await super().run_episode(task, transcript)


@pytest.mark.long
def test_a_full_disk_ends_the_run_by_its_name_and_no_checkpoint_is_begun_without_room(model, finished, tmp_path):
    """First metrics and samples of a step cannot be written; when there is room, it does for one more checkpoint."""
    one = size_of(Checkpoints(finished.checkpoints, 1).newest().folder)
    with small_disk(tmp_path / "disk", int(2.5 * one) + (1 << 20)) as disk:
        task = {"_target_": f"{__name__}.Filling", "disk": str(disk), "after": 30}  # of 16 each step
        reported = []
        with pytest.raises(DiskFull, match=rf"{disk} \(tmpfs\) has .* the newest checkpoint is of step 1"):
            trained(values(model, task=task, eval_every=0), disk / "run", reported=reported)
        assert not any("continuing from" in text for text in reported), "it would end in the same way"
        (disk / "filler").unlink()
        where = rf"cannot write the checkpoint of step 3 to \S+: {disk} \(tmpfs\) has .* free of .* needed; "
        with pytest.raises(DiskFull, match=f"{where}the newest checkpoint is of step 2"):
            trained(values(model, eval_every=0), disk / "run", reported=reported, resumes=True)
        assert [text for text in reported if "continuing from" in text] == ["continuing from step 1"]
        run, undisturbed = RunFolder(disk / "run"), learnt_groups(finished)
        assert saved(run) == [1, 2]
        assert Checkpoints(run.checkpoints, 1).newest_verified().problems == ()
        assert [record["step"] for record in run.steps()][:2] == [1, 2]
        assert [learnt_groups(run)[step] for step in (1, 2)] == [undisturbed[step] for step in (1, 2)]


@pytest.mark.long
def test_a_learning_rate_that_breaks_the_policy_stops_the_run(model, tmp_path):
    with pytest.raises(Diverged, match=r"training diverged in step \d+ .*learning_rate is 1e\+10"):
        trained(values(model, learning_rate=1e10, max_steps=8), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert not run.policy.exists() and run.finished_at() is None
    assert 0 < len(run.steps()) < 8
