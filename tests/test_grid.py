"""One test for many cases runs all of them and names those that fail."""

import inspect

import pytest

from tests.grid import grid


def test_failing_cases_are_named_and_others_run():
    seen = []

    @grid(("left", "right"), [(1, 1), pytest.param(1, 2, id="odd"), (3, 3), (4, 5)])
    def check(left, right):
        seen.append(left)
        assert left == right
        if left == 3:
            pytest.fail("by word")

    with pytest.raises(BaseExceptionGroup, match=r"3 of 4 cases fail: \['odd', '3-3', '4-5'\]") as failed:
        check()
    assert seen == [1, 1, 3, 4]
    assert failed.value.exceptions[0].__notes__ == ["case: odd"]


@grid("size", range(3), ids=lambda size: f"{size} bytes")
@pytest.mark.parametrize("letter", ["a", "b"])
def test_each_case_has_a_folder(size, letter, tmp_path):
    assert not list(tmp_path.iterdir())
    (tmp_path / letter).write_text(letter * size)


def test_fixtures_are_those_of_the_check():
    assert list(inspect.signature(test_each_case_has_a_folder).parameters) == ["letter", "tmp_path"]


def test_cases_with_marks_are_refused():
    with pytest.raises(TypeError, match="parametrize such cases"):
        grid("size", [pytest.param(1, marks=pytest.mark.long)])
