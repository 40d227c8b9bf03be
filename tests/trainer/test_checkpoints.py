import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from roost.config.train import AdvantageEstimator, AdvantageSettings, LearnerSettings, LossSettings, TrainSettings
from roost.learner.checksums import Damaged, sums_of, write_sums
from roost.trainer.feed import Position
from roost.trainer.records.checkpoints import (
    CRITIC,
    REFERENCE,
    Checkpoint,
    Checkpoints,
    TrainerState,
    Unreadable,
    saved_beside,
)

KL = LearnerSettings("m", loss=LossSettings(kl_coef=0.1))
GAE = AdvantageSettings(AdvantageEstimator.GAE)


def write(folder, step, *parts, state=None):
    """A checkpoint of which these parts are there."""
    checkpoint = Checkpoints(folder, keep=1).at(step)
    checkpoint.begin()
    if "state" in parts:
        checkpoint.write_state(state or TrainerState(step, step))
    for name in set(parts) - {"state"}:
        (checkpoint.folder / name).mkdir(parents=True)
        (checkpoint.folder / name / "weights").write_text(f"of step {step}")
    return checkpoint


def steps(found):
    return [one.step for one in found]


def there(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("parts", "others", "whole"),
    [
        pytest.param(("state", "learner"), (), True, id="all of it"),
        pytest.param(("state", "learner.unfinished"), (), False, id="the learner is still being written"),
        pytest.param(("state",), (), False, id="only the trainer's"),
        pytest.param(("learner",), (), False, id="only the learner's"),
        pytest.param(("state", "learner"), (CRITIC,), False, id="the critic is missing"),
        pytest.param(("state", "learner", "critic.unfinished"), (CRITIC,), False, id="the critic is being written"),
        pytest.param(("state", "learner", "critic"), (CRITIC,), True, id="with a critic"),
        pytest.param(("state", "learner", "critic"), (CRITIC, REFERENCE), True, id="the reference has not moved yet"),
        pytest.param(("state", "learner", "critic", "reference"), (CRITIC, REFERENCE), True, id="with a reference"),
    ],
)
def test_a_checkpoint_is_whole_or_it_is_not_taken(tmp_path, parts, others, whole):
    write(tmp_path, 3, *parts)
    checkpoints = Checkpoints(tmp_path, keep=2, others=others)
    assert steps(checkpoints.found()) == ([3] if whole else [])
    assert (checkpoints.newest() is not None) == whole


@pytest.mark.parametrize("other", [CRITIC, REFERENCE])
def test_a_checkpoint_that_lacks_a_learner_is_not_offered_to_resume_from(tmp_path, other):
    """Reports list checkpoints without knowing the settings of the run."""
    for step in (3, 4):
        parts = [other, "learner"] if step == 3 else ["learner"]
        write(tmp_path, step, *parts).write_state(TrainerState(step, step), (other,))
    assert steps(Checkpoints(tmp_path, keep=1).found()) == [3]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"reference_sync_steps": 5}, ()),  # there is no reference
        ({"reference_sync_steps": 5, "learner": KL}, (REFERENCE,)),
        ({"learner": KL}, ()),  # it stays as it was
        ({"reference_sync_steps": 5, "learner": KL, "advantage": GAE}, (CRITIC, REFERENCE)),
    ],
)
def test_what_a_checkpoint_holds_beside_the_policy(changes, expected):
    settings = TrainSettings(LearnerSettings("m"))
    assert saved_beside(replace(settings, **changes)) == expected


def test_where_a_run_was_is_read_as_it_was_written(tmp_path):
    state = TrainerState(step=7, version=9, position=Position(next=40, waiting=(31, 33)))
    write(tmp_path, 7, "state", "learner", state=state)
    assert Checkpoints(tmp_path, keep=1).newest().read_state() == state


def test_the_newest_is_that_of_the_most_steps(tmp_path):
    for step in (5, 1_000_000, 20, 999_999):  # the names of the longest numbers do not sort by length
        write(tmp_path, step, "state", "learner")
    write(tmp_path, 2_000_000, "state", "learner.unfinished")
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-000030.old").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert steps(checkpoints.found()) == [5, 20, 999_999, 1_000_000]
    assert checkpoints.newest().step == 1_000_000


def test_a_run_without_checkpoints_has_no_newest(tmp_path):
    assert Checkpoints(tmp_path / "none", keep=1).newest() is None
    Checkpoints(tmp_path / "none", keep=1).prune()


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
def test_as_many_are_kept_as_were_asked_for(tmp_path, keep, left):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, "state", "learner")
    checkpoints = Checkpoints(tmp_path, keep)
    checkpoints.prune()
    assert steps(checkpoints.found()) == left
    assert there(tmp_path) == [f"step-{step:06d}" for step in left]


def test_what_is_being_written_is_neither_removed_nor_counted(tmp_path):
    for step in (1, 2):
        write(tmp_path, step, "state", "learner")
    write(tmp_path, 3, "state", "learner.unfinished")
    Checkpoints(tmp_path, keep=2).prune()
    assert there(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    assert (tmp_path / "step-000003" / "learner.unfinished" / "weights").exists()


def test_without_a_whole_one_nothing_is_removed(tmp_path):
    for step in (1, 2):
        write(tmp_path, step, "state", "learner.unfinished")
    Checkpoints(tmp_path, keep=1).prune()
    assert there(tmp_path) == ["step-000001", "step-000002"]


def test_what_broke_off_before_the_newest_is_removed(tmp_path):
    write(tmp_path, 1, "state", "learner.unfinished")
    for step in (2, 3):
        write(tmp_path, step, "state", "learner")
    (tmp_path / "notes").mkdir()
    Checkpoints(tmp_path, keep=5).prune()
    assert there(tmp_path) == ["notes", "step-000002", "step-000003"]


def test_a_step_that_is_written_again_has_nothing_of_the_first_attempt(tmp_path):
    """The learner's part was done, the critic's was not: together with a new critic it would pass for whole."""
    broken = write(tmp_path, 3, "state", "learner", "critic.unfinished")
    broken.begin()
    broken.write_state(TrainerState(3, 3))
    assert there(broken.folder) == ["SHA256SUMS", "trainer.json"]
    assert not broken.is_complete()


def test_a_folder_of_another_name_has_no_step(tmp_path):
    assert Checkpoint(tmp_path / "best").step == -1


def test_the_newest_that_was_confirmed_is_kept_beside_newer_ones(tmp_path):
    """Weights after which no loss was finite may be broken, so what they came from must not go for them."""
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step, "state", "learner")
    Checkpoints(tmp_path, keep=2).prune(confirmed=3)
    assert there(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    Checkpoints(tmp_path, keep=2).prune(confirmed=4)
    assert there(tmp_path) == ["step-000004", "step-000005"]


def learner_folder(checkpoint):
    """A learner's part with sums, as a writer leaves it."""
    checkpoint.begin()
    checkpoint.learner.mkdir()
    (checkpoint.learner / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    (checkpoint.learner / ".metadata").write_bytes(b"index")
    write_sums(checkpoint.learner, sums_of(checkpoint.learner.iterdir()))
    checkpoint.write_state(TrainerState(checkpoint.step, checkpoint.step, Position(9, (5, 7))))
    return checkpoint


def flip(file, offset, bit):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1 << bit
    file.write_bytes(content)


def test_every_flipped_bit_is_found(tmp_path):
    """In each file of a checkpoint: at its first, last and some bytes between."""
    checkpoint = learner_folder(Checkpoints(tmp_path, 1).at(3))
    checkpoint.verify()
    for file in [one for one in checkpoint.folder.rglob("*") if one.is_file()]:
        size = file.stat().st_size
        for place, offset in enumerate(sorted({0, 1, size // 3, size // 2, size - 2, size - 1})):
            flip(file, offset, place)
            with pytest.raises(Damaged):
                checkpoint.verify()
            flip(file, offset, place)
            checkpoint.verify()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(lambda one: (one.learner / "__0_0.distcp").unlink(), "'__0_0.distcp' missing", id="missing"),
        pytest.param(lambda one: os.truncate(one.learner / "__0_0.distcp", 99), "__0_0.distcp changed", id="cut"),
        pytest.param(lambda one: os.truncate(one.learner / "SHA256SUMS", 80), "SHA256SUMS", id="sums"),
        pytest.param(lambda one: os.truncate(one.learner / "SHA256SUMS", 0), "SHA256SUMS itself changed", id="no sums"),
        pytest.param(lambda one: (one.folder / "trainer.json").write_text("{}"), "trainer.json changed", id="state"),
    ],
)
def test_what_was_changed_is_named_and_an_older_one_is_taken(tmp_path, damage, words):
    checkpoints = Checkpoints(tmp_path, keep=3)
    older, newest = (learner_folder(checkpoints.at(step)) for step in (2, 4))
    damage(newest)
    found = checkpoints.newest_verified()
    assert found.checkpoint == older and [words in str(problem) for problem in found.problems] == [True], found
    with pytest.raises(Damaged, match=r"; continue from another checkpoint \(2\): --resume STEP"):
        checkpoints.verified_at(4)
    assert checkpoints.verified_at(2) == older
    shutil.rmtree(older.folder)
    with pytest.raises(Damaged, match="; train under another --name, or start this run over"):
        checkpoints.verified_at(4)


def test_files_that_others_add_are_no_damage(tmp_path):
    checkpoint = learner_folder(Checkpoints(tmp_path, 1).at(3))
    for folder in (checkpoint.folder, checkpoint.learner):
        for name in ("NOTES.md", ".nfs0000000012345", "__0_0.distcp.part"):
            (folder / name).write_text("of somebody else")
    checkpoint.verify()


def test_without_a_whole_one_there_is_none_to_verify(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    damaged = learner_folder(checkpoints.at(1))
    flip(damaged.learner / ".metadata", 2, 2)
    assert checkpoints.newest_verified().checkpoint is None
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 5; there are: 1"):
        checkpoints.verified_at(5)


@pytest.mark.parametrize("part", ["", "learner"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch, part):
    """On a network disk that has failed for a while, an earlier checkpoint would undo good steps."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4):
        learner_folder(checkpoints.at(step))
    unreadable, really = checkpoints.at(4).folder / part, Path.read_bytes

    def read(path):
        if path.parent == unreadable:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return really(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(Unreadable, match=r"cannot be read.*Stale file handle.*--resume STEP"):
        checkpoints.newest_verified()
    assert checkpoints.verified_at(2).step == 2


def test_checkpoints_of_later_steps_are_set_aside(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        learner_folder(checkpoints.at(step))
    write(tmp_path, 4, "state", "learner.unfinished")
    assert checkpoints.set_aside(1) == ["step-000002.aside", "step-000003.aside"]
    assert steps(checkpoints.found()) == [1]
    assert checkpoints.set_aside(1) == []
    for again in ("step-000002.aside-2", "step-000002.aside-3"):
        learner_folder(checkpoints.at(2))
        assert checkpoints.set_aside(1) == [again], "beside the earlier one"
    assert (tmp_path / "step-000002.aside" / "learner").is_dir()
