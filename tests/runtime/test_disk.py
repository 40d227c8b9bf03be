"""Full disks by their names."""

import errno
import pickle
from pathlib import Path

import pytest

from roost.runtime.disk import DiskFull, FileSystem, check_room, disk_full, is_disk_full
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
        pytest.param(ValueError("IoError: No space left on device (os error 28)"), True, id="safetensors"),
        pytest.param(caused(RuntimeError("a worker failed"), DiskFull("disk full")), True, id="worker"),
        pytest.param(RuntimeError("unexpected pos 704 vs 598"), False, id="unknown"),
    ],
)
def test_a_full_disk_is_known_by_its_cause(error, is_full):
    assert is_disk_full(error) is is_full


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
