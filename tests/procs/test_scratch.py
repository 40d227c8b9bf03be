"""Scratch folders: those of ended processes are removed, those of live ones never, in whatever PID namespace."""

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from roost.procs import files
from roost.procs.files import DRAFT_S, LOCK_FILE, FolderHeld, FolderLock, NoLocks, ScratchFolder
from tests.limits import HANG_S

HOLDS = """
import sys
from roost.procs.files import ScratchFolder
folder = ScratchFolder("weights", sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""
FORKS = """
import os, sys
from roost.procs.files import FolderLock
lock = FolderLock.take(sys.argv[1])
if os.fork():
    os._exit(1)
print("forked", flush=True)
sys.stdin.read()
"""
IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def holder(folder, *prefix, program=HOLDS):
    command = [*prefix, sys.executable, "-c", program, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


def can_unshare():
    return subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def test_the_folder_of_a_killed_process_is_removed(tmp_path):
    mine = ScratchFolder("weights", tmp_path)
    process = holder(tmp_path)
    theirs = process.stdout.readline().strip()
    kill(process)
    other = ScratchFolder("fleet", tmp_path)
    assert {str(path) for path in tmp_path.iterdir()} == {str(mine.path), theirs, str(other.path)}, "another kind stays"
    again = ScratchFolder("weights", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, other.path, again.path])
    for folder in (mine, other, again):
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_process_in_another_pid_namespace_stays_while_it_lives(tmp_path):
    if not can_unshare():
        pytest.skip("no PID namespaces for this user")
    mine = ScratchFolder("weights", tmp_path)  # whose process id means nothing in the namespace
    process = holder(tmp_path, *IN_A_NAMESPACE)
    theirs = process.stdout.readline().strip()
    ScratchFolder("weights", tmp_path).remove()
    assert sorted(map(str, tmp_path.iterdir())) == sorted([theirs, str(mine.path)])
    process.stdin.close()
    process.wait()
    process.stdout.close()
    again = ScratchFolder("weights", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, again.path])


def test_the_folder_is_private(tmp_path):
    folder = ScratchFolder("weights", tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_held_folder_names_its_holder(tmp_path):
    process = holder(tmp_path)
    theirs = process.stdout.readline().strip()
    with pytest.raises(FolderHeld, match=rf"{theirs} is in use by process {process.pid} on .* since .*: -c"):
        FolderLock.take(theirs)
    kill(process)
    FolderLock.take(theirs).release()


def test_a_process_that_looks_at_a_lock_does_not_keep_others_from_it(tmp_path, monkeypatch):
    FolderLock.take(tmp_path).release()
    with (tmp_path / LOCK_FILE).open("rb") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        with monkeypatch.context() as patch:
            patch.setattr(files, "READERS_S", 0.0)
            with pytest.raises(FolderHeld):
                FolderLock.take(tmp_path)
        monkeypatch.setattr(files, "READERS_S", HANG_S)
        monkeypatch.setattr(files.time, "sleep", lambda _: looks.close())
        with FolderLock.take(tmp_path):
            assert looks.closed, "it waits until nobody looks"
            monkeypatch.setattr(files.time, "sleep", lambda _: pytest.fail("waits for a holder"))
            with pytest.raises(FolderHeld):
                FolderLock.take(tmp_path)


def test_a_lock_is_not_inherited_by_a_fork(tmp_path):
    process = holder(tmp_path, program=FORKS)
    assert process.stdout.readline() == "forked\n"
    process.wait()
    FolderLock.take(tmp_path).release()
    process.stdin.close()
    process.stdout.close()


def without(monkeypatch, number):
    """Have the file system answer a request for a lock with this error."""

    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_has_scratch_folders_that_nobody_else_removes(tmp_path, monkeypatch, number):
    process = holder(tmp_path)
    theirs = process.stdout.readline().strip()
    kill(process)
    with monkeypatch.context() as patch:
        without(patch, number)
        with pytest.raises(NoLocks):
            FolderLock.take(theirs)
        mine = ScratchFolder("weights", tmp_path)
        again = ScratchFolder("weights", tmp_path)
        assert sorted(map(str, tmp_path.iterdir())) == sorted([theirs, str(mine.path), str(again.path)])
        again.remove()
    ScratchFolder("weights", tmp_path).remove()  # of a machine that mounted the same disk with locks
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_where_the_lock_cannot_be_had(tmp_path, monkeypatch):
    without(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        ScratchFolder("weights", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_killed_processes_are_removed_once_they_are_old(tmp_path):
    old, new = tmp_path / ".roost-weights-old", tmp_path / ".roost-weights-new"
    for draft in (old, new):
        draft.mkdir()
    os.utime(old, (0, time.time() - 2 * DRAFT_S))
    ScratchFolder("weights", tmp_path).remove()
    assert list(tmp_path.iterdir()) == [new], "a process may be about to lock it"
