"""Checkpoints on one rank: bit for bit, and whole or not there."""

import os

import pytest
import torch

from roost.config.train import AdapterSettings
from roost.learner.checksums import SUMS, check_sums
from roost.learner.learner import Learner
from roost.procs.files import UNFINISHED, DiskFull
from tests.learner.random_samples import CPU, assert_equal, random_samples, settings_of, totals_of, trained
from tests.small_disk import small_disk

BATCHES = [random_samples(12, 9, seed=1), random_samples(20, 5, seed=2), random_samples(7, 30, seed=3)]


@pytest.mark.parametrize("adapter", [None, AdapterSettings(lora_rank=4)], ids=["all weights", "adapter"])
@pytest.mark.parametrize("done", [0, 2], ids=["before the first step", "later"])
def test_a_restored_run_is_the_uninterrupted_one(learner, tmp_path, adapter, done):
    expected, described = trained(learner(adapter=adapter), *BATCHES)
    first = learner(adapter=adapter)
    for samples in BATCHES[:done]:
        first.learn(samples, totals_of(samples))
    first.save(tmp_path / "step")
    first.learn(BATCHES[0], totals_of(BATCHES[0]))  # while it is being written
    first.wait_saved()
    second = learner(adapter=adapter, seed=5)
    second.restore(tmp_path / "step")
    assert second.step == done
    weights, told_too = trained(second, *BATCHES[done:])
    assert_equal(weights, expected)
    assert told_too == described


def test_a_reference_that_has_moved_is_restored(learner, models, tmp_path):
    policy = learner()
    policy.learn(BATCHES[0], totals_of(BATCHES[0]))
    first, second = (Learner(settings_of(models()), CPU, learns=False) for _ in range(2))
    first.take(policy.weights())
    first.save(tmp_path / "reference")
    first.wait_saved()
    second.restore(tmp_path / "reference")
    assert_equal(dict(second.weights()), dict(policy.weights()))
    assert first.checkpoint_bytes() < policy.checkpoint_bytes() / 2  # it has no moments


def test_a_checkpoint_of_an_adapter_is_small(learner, tmp_path):
    def size(name, **changes):
        one = learner(**changes)
        one.save(tmp_path / name)
        one.wait_saved()
        return sum(file.stat().st_size for file in (tmp_path / name).iterdir())

    assert size("adapter", adapter=AdapterSettings(lora_rank=1)) < size("all") / 5


def test_random_numbers_go_on(learner, tmp_path):
    one = learner()
    one.save(tmp_path / "step")
    one.wait_saved()
    expected = torch.rand(3)
    one.restore(tmp_path / "step")
    assert torch.equal(torch.rand(3), expected)


def test_a_newer_checkpoint_takes_the_place_of_one_with_its_name(learner, tmp_path):
    one = learner()
    one.save(tmp_path / "last")
    one.learn(BATCHES[0], totals_of(BATCHES[0]))
    one.save(tmp_path / "last")
    one.wait_saved()
    two = learner()
    two.restore(tmp_path / "last")
    assert two.step == 1
    assert [folder.name for folder in tmp_path.iterdir()] == ["last"]


def cut_off_data(folder):
    file = max(folder.glob("*.distcp"), key=lambda each: each.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda folder: (folder / ".metadata").unlink(), "not finished", id="no index"),
        pytest.param(cut_off_data, "was cut off", id="data cut off"),
        pytest.param(lambda folder: folder.rename(f"{folder}{UNFINISHED}"), "no checkpoint", id="not there"),
    ],
)
def test_what_was_cut_off_is_not_taken(learner, tmp_path, damage, message):
    one = learner()
    one.save(tmp_path / "step")
    one.wait_saved()
    damage(tmp_path / "step")
    before = {name: weight.clone() for name, weight in one.weights()}
    with pytest.raises(ValueError, match=message):
        one.restore(tmp_path / "step")
    assert_equal(dict(one.weights()), before)


def test_a_checkpoint_of_something_else_is_refused(learner, tmp_path):
    one = learner()
    one.save(tmp_path / "step")
    one.wait_saved()
    with pytest.raises(ValueError, match=r"does not fit this learner: .*lora_A"):
        learner(adapter=AdapterSettings()).restore(tmp_path / "step")


def test_what_could_not_be_written_is_told(learner, tmp_path):
    one = learner()
    (tmp_path / "file").write_text("in the way")
    one.save(tmp_path / "file" / "step")
    with pytest.raises(RuntimeError, match="not written"):
        one.wait_saved()
    one.save(tmp_path / "step")
    one.wait_saved()
    assert (tmp_path / "step" / ".metadata").is_file()


def test_all_files_of_a_checkpoint_have_sums(learner, tmp_path):
    one = learner()
    one.save(tmp_path / "step")
    one.wait_saved()
    assert one.is_saved()
    assert check_sums(tmp_path / "step")
    listed = (tmp_path / "step" / SUMS).read_text().splitlines()
    assert {line.split()[1] for line in listed} == {file.name for file in (tmp_path / "step").iterdir()} - {SUMS}
    written = sum(file.stat().st_size for file in (tmp_path / "step").iterdir())
    assert 0.5 * written < one.checkpoint_bytes() < written


def test_a_full_disk_is_named(learner, tmp_path):
    """Torch itself says "unexpected pos" of a file. The checkpoint before stays whole."""
    one = learner()
    with small_disk(tmp_path / "disk", int(1.5 * one.checkpoint_bytes())) as disk:
        one.save(disk / "first")
        one.wait_saved()
        one.save(disk / "second")
        with pytest.raises(DiskFull, match=rf"cannot write a checkpoint to {disk}: {disk} \(tmpfs\) has .* needed"):
            one.wait_saved()
        assert [folder.name for folder in disk.iterdir()] == ["first"], "nothing unfinished takes up what is left"
        assert check_sums(disk / "first")
