import ctypes
import os
import sys
from pathlib import Path

import pytest

from roost.sandbox import limits as folder
from roost.sandbox.sandbox import deleted_files


@pytest.mark.parametrize(
    ("files", "most_bytes", "larger"),
    [
        pytest.param({}, 1, False, id="empty"),
        pytest.param({"a": 5000}, 4096, True, id="one too large"),
        pytest.param({"a": 5000}, 1 << 20, False, id="one that fits"),
        pytest.param({f"{number}/a": 5000 for number in range(3)}, 3 * 4096, True, id="together too large"),
        pytest.param({f"{number}": 0 for number in range(10)}, 1 << 20, False, id="as many as allowed"),
        pytest.param({f"{number}": 0 for number in range(11)}, 1 << 20, True, id="too many"),
    ],
)
def test_sizes(files, most_bytes, larger, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_MAX_ENTRIES", 10)
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert folder.is_larger(tmp_path, most_bytes) == larger


NOBODY = 65534


@pytest.fixture
def unprivileged(tmp_path, monkeypatch):
    """A folder of one who is not root, and as whom the test runs."""
    monkeypatch.chdir(tmp_path)  # the way to it may not be open to everybody
    if os.geteuid() != 0:
        yield
        return
    os.chown(tmp_path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def deep():
    start = os.open(".", os.O_RDONLY)
    for _ in range(30):
        Path("d" * 200).mkdir()
        os.chdir("d" * 200)
    os.chdir(start)
    os.close(start)


def not_to_be_entered():
    Path("d").mkdir()
    Path("d/a").write_text("a")
    Path("d").chmod(0o600)


@pytest.mark.parametrize(
    ("make", "larger"),
    [
        pytest.param(lambda: Path("d").mkdir(0o700), False, id="nothing hidden"),
        pytest.param(lambda: Path("d").mkdir(0o300), True, id="not to be listed"),
        pytest.param(not_to_be_entered, True, id="not to be entered"),
        pytest.param(deep, True, id="too deep"),
    ],
)
def test_what_cannot_be_counted_is_too_much(make, larger, unprivileged):
    make()
    assert folder.is_larger(Path(), 1 << 30) == larger


def test_other_files_count(tmp_path):
    (tmp_path / "a").write_bytes(bytes(5000))
    assert not folder.is_larger(tmp_path, 20_000, [0, 4096])
    assert folder.is_larger(tmp_path, 20_000, [0, 16_384])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at as Linux shows them")
def test_what_is_mapped_is_large_where_nobody_says_how_large(unprivileged):
    library = ctypes.CDLL(None)
    library.mmap.restype, library.munmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    size, largest = ctypes.c_size_t(4096), 1 << 40

    def counted():
        return sum(deleted_files(os.getpid(), Path.cwd(), largest)) // largest

    with Path("a b\n").open("wb+") as file:
        file.write(bytes(4096))
        file.flush()
        maps = [library.mmap(None, size, 1, 2, file.fileno(), ctypes.c_long(0)) for _ in range(2)]
        named = counted()
        Path("a b\n").unlink()
        opened = counted()  # its descriptor says how large it is
    closed = counted()
    for place in maps:
        library.munmap(place, size)
    assert (named, opened, closed, counted()) == (0, 0, 1, 0)


def test_removing_follows_no_links(tmp_path):
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    kept.mkdir()
    (kept / "file").write_text("kept")
    (removed / "inner").mkdir(parents=True)
    (removed / "link").symlink_to(kept)
    (removed / "inner" / "link").symlink_to(kept)
    folder.remove(removed)
    assert not removed.exists() and (kept / "file").read_text() == "kept"
