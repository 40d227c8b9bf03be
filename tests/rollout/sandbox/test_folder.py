import pytest

from roost.rollout.sandbox import folder


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
    monkeypatch.setattr(folder, "_MOST_ENTRIES", 10)
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    assert folder.is_larger(tmp_path, most_bytes) == larger


def test_removing_follows_no_links(tmp_path):
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    kept.mkdir()
    (kept / "file").write_text("kept")
    (removed / "inner").mkdir(parents=True)
    (removed / "link").symlink_to(kept)
    (removed / "inner" / "link").symlink_to(kept)
    folder.remove(removed)
    assert not removed.exists() and (kept / "file").read_text() == "kept"
