"""Full disks by their names."""

import errno
import pickle
from pathlib import Path

import pytest

from roost.procs.files import DiskFull, FileSystem, check_room, disk_full, full_shared_memory, is_disk_full
from tests.small_disk import small_disk

ENOSPC, EDQUOT = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "Disk quota exceeded")


def caused(error, cause, context=None):
    error.__cause__, error.__context__ = cause, context
    return error


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        pytest.param(ENOSPC, True, id="full"),
        pytest.param(EDQUOT, True, id="quota"),
        pytest.param(OSError(errno.EIO, "I/O error"), False, id="other"),
        pytest.param(caused(RuntimeError("unexpected pos 704 vs 598"), None, ENOSPC), True, id="torch"),
        pytest.param(caused(RuntimeError("a worker failed"), DiskFull("disk full")), True, id="worker"),
        pytest.param(RuntimeError("unexpected pos 704 vs 598"), False, id="unknown"),
    ],
)
def test_a_full_disk_is_known_by_its_cause(error, is_full):
    assert is_disk_full(error) is is_full


SAFETENSORS = ValueError("IoError: No space left on device (os error 28)")
NCCL = RuntimeError("NCCL WARN Error: failed to extend /dev/shm/nccl-Xy to 9637892 bytes: No space left on device")


def test_words_count_only_for_a_disk_that_is_nearly_full(tmp_path):
    with small_disk(tmp_path / "full", 4 << 20) as full, small_disk(tmp_path / "free", 1 << 30) as free:
        for error in (SAFETENSORS, NCCL):
            assert is_disk_full(error, full) and not is_disk_full(error, free) and not is_disk_full(error)
            assert full_shared_memory(error, free) is None
        assert is_disk_full(ValueError("Disk quota exceeded"), free), "which free bytes do not show"
        assert full_shared_memory(OSError(errno.EIO, "I/O error"), full) is None
        assert f"{full} (tmpfs) has 4.2 MB free of 4.2 MB; enlarge it" in full_shared_memory(NCCL, full)


def test_a_disk_without_inodes_is_full(tmp_path):
    with small_disk(tmp_path / "disk", "1g,nr_inodes=2") as disk:
        assert not is_disk_full(SAFETENSORS, disk)
        (disk / "last").touch()
        assert is_disk_full(SAFETENSORS, disk)


def test_the_file_system_and_the_bytes_are_named(tmp_path):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        check_room(disk / "not" / "there", 2 << 20, "a checkpoint")
        with pytest.raises(
            DiskFull, match=rf"write a checkpoint to {disk}/run: {disk} \(tmpfs\) has 4.2 MB free of 4.2"
        ):
            check_room(disk / "run", 8 << 20, "a checkpoint")
        assert FileSystem.of(disk).total == 4 << 20


def test_the_error_travels_between_processes():
    error = disk_full(Path("/"), "metrics", 10)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
