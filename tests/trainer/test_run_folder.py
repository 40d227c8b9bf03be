"""The folder of a run: what is written is read back, whatever a crash left behind, and no run is lost to another."""

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest

from roost.config.train import LearnerSettings, TrainSettings
from roost.procs.files import DiskFull
from roost.trace.spans import SpanRecorder
from roost.trainer.guards import SkippedSteps
from roost.trainer.records.checkpoints import Saver, TrainerState, describe_policy, export_policy
from roost.trainer.records.run_folder import RunFolder
from tests.small_disk import small_disk


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "first", config="steps: 3\n", plan='{"mode": "collocated"}')


def written(lines):
    return [json.loads(line, parse_constant=pytest.fail) for line in lines.path.read_bytes().splitlines()]


def test_a_new_folder_holds_config_and_plan(run):
    assert run.name == "first"
    assert run.config_file.read_text() == "steps: 3\n"
    assert json.loads(run.plan_file.read_text()) == {"mode": "collocated"}
    assert run.steps() == run.evaluations() == list(run.sample_lines) == []
    assert {file.name for file in run.path.iterdir()} == {"config.yaml", "plan.json"}, "nothing unfinished is left"


def test_a_folder_with_a_run_is_left_alone(run):
    run.add_step({"step": 7})
    with pytest.raises(FileExistsError, match=r"1 step up to step 7; give .* another name, .* --resume"):
        RunFolder.create(run.path, config="other", plan="{}")
    assert run.config_file.read_text() == "steps: 3\n"


def test_an_empty_folder_may_be_there(tmp_path):
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", config="", plan="{}").has_run


@pytest.mark.parametrize("inside", [pytest.param("", id="itself"), pytest.param("runs/deep", id="in-its-way")])
def test_a_file_is_no_folder(tmp_path, inside):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="another name"):
        RunFolder.create(tmp_path / "file" / inside, config="", plan="{}")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param("frist", "does not exist; .*first", id="misspelt-names-its-neighbours"),
        pytest.param(".", "holds no run; .*first", id="parent-names-what-is-in-it"),
        pytest.param("first/config.yaml", "is a file", id="file"),
    ],
)
def test_what_is_no_run_is_told_with_the_fix(run, wrong, words):
    with pytest.raises(FileNotFoundError, match=words):
        RunFolder.open(run.path.parent / wrong)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        pytest.param(0.5, 0.5, id="float"),
        pytest.param(math.nan, None, id="nan"),
        pytest.param(-math.inf, None, id="infinite"),
        pytest.param(np.float32(0.25), 0.25, id="numpy"),
        pytest.param(np.float64("nan"), None, id="numpy-nan"),
        pytest.param(12, 12, id="integer"),
        pytest.param(True, True, id="boolean"),
        pytest.param("<b>\n\u2028\ud800", "<b>\n\u2028\ud800", id="odd-text"),
        pytest.param([1.0, math.nan, {"a": math.inf}], [1.0, None, {"a": None}], id="nested"),
    ],
)
def test_every_line_is_json(run, value, read):
    run.add_samples([{"step": 1, "value": value}, {"step": 1, "value": "next"}])
    assert written(run.sample_lines) == [{"step": 1, "value": read}, {"step": 1, "value": "next"}]


def test_a_line_is_there_at_once(run):
    for step in range(1, 4):
        run.add_step({"step": step})
        assert len(written(run.metrics)) == step


BROKEN = b'{"step":4,"reward/me'


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(BROKEN, id="broken-off"),
        pytest.param(b"\n\n", id="empty-lines"),
        pytest.param(b"[1]\n3\nnull\n", id="no-records"),
        pytest.param(b'{"version":1}\n{"step":null}\n', id="of-no-step"),
        pytest.param(b"\xff\x00\n", id="no-text"),
    ],
)
def test_odd_lines_are_passed_over(run, odd):
    run.add_step({"step": 1})
    with run.metrics.path.open("ab") as file:
        file.write(odd)
    run.add_step({"step": 2})
    assert run.steps() == [{"step": 1}, {"step": 2}]


def test_of_a_step_done_twice_the_second_counts(run):
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        run.add_step({"step": step, "reward/mean": reward})
    assert [record["reward/mean"] for record in run.steps()] == [0.1, 0.25, 0.3]


@pytest.mark.parametrize("step", [0, 2, 3, 9])
def test_resuming_cuts_back(run, step):
    for done in range(1, 4):
        run.add_step({"step": done})
        run.add_samples([{"step": done, "task": name} for name in "ab"])
        run.add_tokens([{"step": done, "ratio": 2.0}])
    run.add_evaluation({"step": 2, "reward/mean": 0.5})
    with run.metrics.path.open("ab") as file:
        file.write(BROKEN)
    again = RunFolder.resume(run.path, step)
    kept = list(range(1, min(step, 3) + 1))
    assert [record["step"] for record in written(again.metrics)] == kept
    assert [record["step"] for record in written(again.token_lines)] == kept
    assert [record["step"] for record in written(again.sample_lines)] == [done for done in kept for _ in "ab"]
    assert [record["step"] for record in written(again.evaluation_lines)] == [2][: step // 2]
    again.add_step({"step": step + 1})
    assert [record["step"] for record in again.steps()] == [*kept, step + 1]


def test_a_cut_that_fails_leaves_the_file_as_it_was(run, monkeypatch):
    run.add_step({"step": 1})
    run.add_step({"step": 2})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        RunFolder.resume(run.path, 1)
    assert [record["step"] for record in run.steps()] == [1, 2]
    assert {file.name for file in run.path.iterdir()} == {"config.yaml", "plan.json", "metrics.jsonl"}


def test_a_run_is_finished_until_it_is_resumed(run):
    assert run.finished_at() is None
    run.finish(4)
    assert RunFolder(run.path).finished_at() == 4
    RunFolder.resume(run.path, 4)
    assert run.finished_at() is None


def test_an_evaluation_is_known_by_its_step(run):
    run.add_evaluation({"step": 2, "reward/mean": 0.5})
    assert [run.has_evaluation(step) for step in (0, 2, 4)] == [False, True, False]


class Exporting:
    """Learners that export one file whose text is their step; `size` is of the merged model and of a checkpoint."""

    def __init__(self, step, size=0, fails_at=None):
        self._step, self._size, self._fails_at = step, size, fails_at

    async def all(self, name, folder=None):
        if name == self._fails_at:
            raise RuntimeError("killed")
        if name in ("whole_bytes", "checkpoint_bytes"):
            return [self._size]
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / ("adapter.safetensors" if name == "export" else "model.safetensors")).write_text(
            str(self._step)
        )
        return [None]

    def to(self, folder, note=pytest.fail, has_adapter=True):
        asyncio.run(export_policy(self, folder, TrainerState(self._step), 30, has_adapter, note))


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.safetensors")}


def test_a_policy_is_of_one_step_whatever_was_there_before(tmp_path):
    with small_disk(tmp_path / "disk", 512 << 20) as disk:
        policy, notes = disk / "policy", []
        Exporting(10).to(policy)
        assert files_in(disk) == {"policy/adapter/adapter.safetensors": "10", "policy/model.safetensors": "10"}
        for part in ("export", "export_whole"):
            with pytest.raises(RuntimeError):
                Exporting(15, fails_at=part).to(policy)
            assert files_in(policy) == {"adapter/adapter.safetensors": "10", "model.safetensors": "10"}
            assert describe_policy(policy).startswith("step 10 of 30; the model")
        Exporting(20, size=1 << 30).to(policy, notes.append)
        assert files_in(disk) == {"policy/adapter/adapter.safetensors": "20"}
        assert describe_policy(policy).startswith("step 20 of 30; a LoRA adapter")
        assert f"{disk} (tmpfs) has" in notes[0] and notes[0].endswith("only the adapter is written")


def test_a_whole_policy_is_written_only_where_it_has_room(tmp_path):
    with small_disk(tmp_path / "disk", 512 << 20) as disk:
        with pytest.raises(DiskFull, match=r"cannot write the policy to .* 1.1 GB needed"):
            Exporting(10, size=1 << 30).to(disk / "policy", has_adapter=False)
        assert not files_in(disk)
        Exporting(10).to(disk / "policy", has_adapter=False)
        assert describe_policy(disk / "policy") == "step 10 of 30; the whole model"


def test_the_first_step_says_if_the_disk_has_no_room_for_checkpoints(tmp_path):
    """Hours before one is due."""
    settings, notes = TrainSettings(LearnerSettings("m")), []
    with small_disk(tmp_path / "disk", 512 << 20) as disk:
        for size, steps in ((1 << 20, 1), (1 << 30, 2)):
            saver = Saver(RunFolder(disk / "run"), settings, (), 0, SpanRecorder())
            for step in range(1, steps + 1):
                learners = [Exporting(step, size=size)]
                asyncio.run(saver.after_learning(learners, TrainerState(step), SkippedSteps(), notes.append))
    [note] = notes
    assert f"cannot write checkpoints to {disk}" in note and "1.1 GB needed" in note
