"""Device lists: what is read, and what is refused."""

import pytest
from hypothesis import given, strategies as st

from roost.config.interpolation import MAX_DEVICES, ExpressionError, parse_devices


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        pytest.param("list(range(0,4))", [0, 1, 2, 3], id="list-of-range"),
        pytest.param("list(range(0, 8, 2))", [0, 2, 4, 6], id="step"),
        pytest.param("list(range(3,-1,-1))", [3, 2, 1, 0], id="backwards"),
        pytest.param("range(2)", [0, 1], id="range"),
        pytest.param("list([6,7])", [6, 7], id="list-of-list"),
        pytest.param("[3, 1, 2]", [3, 1, 2], id="literal-keeps-its-order"),
        pytest.param("(0, 1)", [0, 1], id="tuple"),
        pytest.param("list(range(0,2))+list(range(14,16))", [0, 1, 14, 15], id="sum"),
        pytest.param("[*range(2), 5]", [0, 1, 5], id="starred"),
        pytest.param("[0] + [1] + [2]", [0, 1, 2], id="longer-sum"),
        pytest.param("range(1 + 1)", [0, 1], id="sum-of-numbers"),
        pytest.param("0,1,2", [0, 1, 2], id="bare-list"),
        pytest.param("0-3", [0, 1, 2, 3], id="rank-range"),
        pytest.param("0-1,8-9", [0, 1, 8, 9], id="rank-ranges"),
        pytest.param("5", [5], id="number-as-text"),
        pytest.param(5, [5], id="number"),
        pytest.param([0, 2], [0, 2], id="native-list"),
        pytest.param("[]", [], id="empty"),
        pytest.param("list()", [], id="empty-call"),
    ],
)
def test_read(written, devices):
    assert list(parse_devices(written)) == devices


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("__import__('os').system('true')", id="import"),
        pytest.param("[i for i in range(4)]", id="comprehension"),
        pytest.param("(lambda: 0)()", id="lambda"),
        pytest.param("self", id="name"),
        pytest.param("list(range(4))[0]", id="index"),
        pytest.param("range(4).start", id="attribute"),
        pytest.param("list(range(10**9))", id="power"),
        pytest.param("[0] * 100", id="product"),
        pytest.param("range(100000000)", id="too-many"),
        pytest.param("range(" + "9" * 30 + ")", id="huge-number"),
        pytest.param("range(0, 4, 0)", id="step-0"),
        pytest.param("range()", id="no-argument"),
        pytest.param("[*3]", id="starred-number"),
        pytest.param("list(3)", id="list-of-number"),
        pytest.param("range(stop=4)", id="keyword"),
        pytest.param("[0] + 1", id="list-plus-number"),
        pytest.param("[0.5]", id="fraction"),
        pytest.param("['0']", id="text-in-list"),
        pytest.param("[True]", id="flag-in-list"),
        pytest.param("[[0]]", id="list-in-list"),
        pytest.param("[-1]", id="negative"),
        pytest.param("range(-1, 2)", id="negative-range"),
        pytest.param("[0", id="open-bracket"),
        pytest.param("[" * 9000, id="deep"),
        pytest.param("[" + "-" * 9000 + "1]", id="deep-signs"),
        pytest.param("+".join(["[0]"] * 6000), id="long-sum"),
        pytest.param("[" + "0," * 5_000_000 + "]", id="ten-megabytes"),
        pytest.param("all", id="all"),
        pytest.param("3-1", id="backwards-range"),
        pytest.param(None, id="nothing"),
        pytest.param(True, id="flag"),
        pytest.param(1.5, id="number-with-fraction"),
        pytest.param(["0"], id="text-in-native-list"),
        pytest.param({"a": 1}, id="mapping"),
    ],
)
def test_refused(written):
    with pytest.raises(ExpressionError):
        parse_devices(written)


@given(st.lists(st.lists(st.integers(0, 1000), max_size=5), min_size=1, max_size=5))
def test_sums_of_lists_agree_with_python(parts):
    assert list(parse_devices(" + ".join(map(str, parts)))) == [device for part in parts for device in part]


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 10))
def test_ranges_agree_with_python(start, stop, step):
    assert list(parse_devices(f"list(range({start},{stop},{step}))")) == list(range(start, stop, step))


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        devices = parse_devices(text)
    except ExpressionError:
        return
    assert len(devices) <= MAX_DEVICES
    assert all(isinstance(device, int) and device >= 0 for device in devices)


@pytest.mark.parametrize(
    ("text", "devices"),
    [("list(range(0,2*4))", list(range(8))), ("[+3]", [3]), ("list(range(8//2, 10-4))", [4, 5]), ("[2*3, +1]", [6, 1])],
)
def test_arithmetic_of_numbers(text, devices):
    assert list(parse_devices(text)) == devices


def test_a_division_by_zero_is_refused():
    with pytest.raises(ExpressionError, match="divided by 0"):
        parse_devices("[8//0]")
