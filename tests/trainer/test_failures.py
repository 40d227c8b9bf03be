import asyncio
import io

import pytest
from rich.console import Console

from roost.rollout.episode import Task
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest, LocalEpisodeRunner
from roost.trainer import watching as failures
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.live_view import print_summary
from roost.trainer.watching import FailureFiles, RecordingEpisodeRunner, file_name

ASKED = EpisodeRequest(Task("count to 3"), 5, 2, 1)


@pytest.fixture
def notes():
    return []


@pytest.fixture
def files(tmp_path, notes):
    return FailureFiles(tmp_path / "failures", notes.append)


def texts(tmp_path):
    return [file.read_text() for file in sorted((tmp_path / "failures").glob("*.txt"))]


class Clumsy:
    async def run_episode(self, task, transcript):
        self._stumble()

    def _stumble(self):
        raise LookupError("the key is under the mat")


def test_a_failure_is_kept_with_what_led_to_it(files, tmp_path, notes):
    runner = RecordingEpisodeRunner(LocalEpisodeRunner(Clumsy(), lambda *numbers: None, 10.0), files)
    with pytest.raises(EpisodeFailed, match="the key is under the mat"):
        asyncio.run(runner.run_episode(ASKED))
    [text] = texts(tmp_path)
    assert text.startswith("LookupError: the key is under the mat (test_failures.py:")
    assert "1 time so far; this is group 5, episode 2, attempt 2 of the task\ncount to 3\n" in text
    assert "in _stumble" in text and "in run_episode" in text
    [note] = notes
    assert note.startswith("an episode failed: LookupError: the key is under the mat") and "failures/LookupErr" in note


@pytest.mark.parametrize(
    ("reasons", "described"),
    [
        pytest.param([f"ValueError: {n} is odd" for n in range(5)], ["4 times"], id="again and again"),
        pytest.param(["A: x (a.py:1)", "A: x (a.py:2)"], ["1 time", "1 time"], id="another line"),
        pytest.param(["A: x", "B: x", "A: x"], ["2 times", "1 time"], id="others"),
        pytest.param(["", "../../x: y"], ["1 time", "1 time"], id="odd ones"),
    ],
)
def test_each_reason_has_a_file(reasons, described, files, tmp_path, notes):
    for reason in reasons:
        files.add(reason, "", ASKED)
    found = texts(tmp_path)
    assert sorted(text.split("\n\n")[1].split(" so far")[0] for text in found) == sorted(described)
    assert len(notes) == len(described), "each is reported once"


def test_there_are_not_too_many(files, tmp_path, notes, monkeypatch):
    monkeypatch.setattr(failures, "MOST_REASONS", 3)
    for letter in "abcdefg":
        files.add(letter, "x" * 10, ASKED)
    assert len(texts(tmp_path)) == len(notes) == 3


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path, notes):
    (tmp_path / "file").write_text("")
    FailureFiles(tmp_path / "file" / "failures", notes.append).add("A: x", "", ASKED)
    assert len(notes) == 1 and "cannot be written" in notes[0]


def test_the_summary_says_where_they_are(tmp_path, notes):
    run = RunFolder.create(tmp_path / "run", config="", plan="{}")
    run.add_step({"step": 1, "reward/mean": 0.5, "samples/failed": 3.0, "time/step": 1.0})
    paper = Console(file=io.StringIO(), width=80)
    print_summary(run, paper)
    assert "failed" not in paper.file.getvalue()
    FailureFiles(run.failures, notes.append).add("A: x", "", ASKED)
    print_summary(run, paper)
    described = f"failed   3 episodes after all attempts; 1 reason, with tracebacks, in {run.failures}"
    assert described in paper.file.getvalue()


def test_one_reason_for_all_tasks():
    """Each group has another task; what is wrong with all of them is told once."""
    first, second, other = ("reward exact: the data of task '1+1' has no 'answer'",
                            'reward exact: the data of task "it\'s 2" has no \'answer\'',
                            "reward exact: the data of task '1+1' has no 'tests'")  # fmt: skip
    assert file_name(first) == file_name(second) != file_name(other)
