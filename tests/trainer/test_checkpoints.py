import pytest

from roost.trainer.checkpoints import Checkpoint, Checkpoints, TrainerState
from roost.trainer.feed import Position


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
    ("parts", "has_critic", "whole"),
    [
        pytest.param(("state", "learner"), False, True, id="all of it"),
        pytest.param(("state", "learner.unfinished"), False, False, id="the learner is still being written"),
        pytest.param(("state",), False, False, id="only the trainer's"),
        pytest.param(("learner",), False, False, id="only the learner's"),
        pytest.param(("state", "learner"), True, False, id="the critic is missing"),
        pytest.param(("state", "learner", "critic.unfinished"), True, False, id="the critic is being written"),
        pytest.param(("state", "learner", "critic"), True, True, id="with a critic"),
    ],
)
def test_a_checkpoint_is_whole_or_it_is_not_taken(tmp_path, parts, has_critic, whole):
    write(tmp_path, 3, *parts)
    checkpoints = Checkpoints(tmp_path, keep=2, has_critic=has_critic)
    assert steps(checkpoints.found()) == ([3] if whole else [])
    assert (checkpoints.newest() is not None) == whole


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
    assert there(broken.folder) == ["trainer.json"]
    assert not broken.is_whole()


def test_a_folder_of_another_name_has_no_step(tmp_path):
    assert Checkpoint(tmp_path / "best").step == -1
