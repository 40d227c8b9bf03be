"""Checkpoints: written whole or not at all."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from roost.engines.protocol import UpdateFailed
from roost.engines.tiny_model import write_tiny_model
from roost.engines.weights.carriers import write_checkpoint
from roost.engines.weights.source import ModuleSource


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def changed(model_folder):
    """The model of the folder, with other weights."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    return model


def state_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("file_bytes", [2**30, 100_000], ids=["one file", "several files"])
def test_what_was_written_is_read_back(tmp_path, model_folder, changed, file_bytes):
    folder = write_checkpoint(ModuleSource(changed), model_folder, tmp_path / "version-1", file_bytes)
    found = state_of(folder)
    assert all(torch.equal(found[name], weight) for name, weight in changed.state_dict().items())
    assert (folder / "tokenizer.json").exists()
    assert len(list(folder.glob("*.safetensors"))) == (1 if file_bytes == 2**30 else 5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["version-1"]


def test_an_old_checkpoint_is_replaced(tmp_path, model_folder, changed):
    write_checkpoint(ModuleSource(AutoModelForCausalLM.from_pretrained(model_folder)), model_folder, tmp_path / "now")
    write_checkpoint(ModuleSource(changed), model_folder, tmp_path / "now")
    assert torch.equal(state_of(tmp_path / "now")["lm_head.weight"], changed.lm_head.weight)
    assert [entry.name for entry in tmp_path.iterdir()] == ["now"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for one checkpoint, but not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", folder]).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", folder], check=True)


class ShrinkingDisk(ModuleSource):
    """While the weights are written, somebody else fills the disk."""

    def __init__(self, module, folder: Path) -> None:
        super().__init__(module)
        self._folder = folder

    def stream(self):
        free = os.statvfs(self._folder).f_bavail * os.statvfs(self._folder).f_frsize
        (self._folder / "other").write_bytes(bytes(free - 8192))
        yield from super().stream()


@pytest.mark.parametrize("is_sudden", [False, True], ids=["seen before", "filled meanwhile"])
def test_a_full_disk_leaves_what_was_there(small_disk, model_folder, changed, is_sudden):
    before = AutoModelForCausalLM.from_pretrained(model_folder)
    write_checkpoint(ModuleSource(before), model_folder, small_disk / "now")
    source = ShrinkingDisk(changed, small_disk) if is_sudden else ModuleSource(changed)
    if not is_sudden:
        (small_disk / "other").write_bytes(bytes(400_000))
    with pytest.raises(UpdateFailed, match=r"is full: a checkpoint needs 0\.00 GiB; nothing was replaced"):
        write_checkpoint(source, model_folder, small_disk / "now")
    assert torch.equal(state_of(small_disk / "now")["lm_head.weight"], before.lm_head.weight)
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["now", "other"]
