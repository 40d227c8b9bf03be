import pytest

from roost.sandbox.execution import Printed


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param([b"0123456789"], "0123456789", id="as much as fits"),
        pytest.param([b"01234567", b"89abcdef"], "01234\n[6 characters omitted]\nbcdef", id="more"),
        pytest.param([b"0123456789a"], "01234\n[1 characters omitted]\n6789a", id="one more"),
        pytest.param([b"ab\xc3", b"\xa4c"], "abäc", id="cut within a character"),
        pytest.param([b"ab\xc3"], "ab\ufffd", id="ends within a character"),
        pytest.param([b"x" * 1000] * 100 + [b"12345"], "xxxxx\n[99995 characters omitted]\n12345", id="much"),
    ],
)
def test_the_middle_is_left_out(pieces, text):
    printed = Printed(limit=10)
    for piece in pieces:
        printed.add(piece)
    assert printed.text() == text
