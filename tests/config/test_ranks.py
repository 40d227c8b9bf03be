"""Rank ranges and placement strings."""

import pytest
from hypothesis import given, strategies as st

from roost.config.ranks import RankSyntaxError, parse_placement, parse_range, parse_rank_list, spell_ranks


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        pytest.param("0", [(range(1), None)], id="rank"),
        pytest.param("0-3", [(range(4), None)], id="range"),
        pytest.param("all", [(None, None)], id="all"),
        pytest.param("ALL:0-3", [(None, range(4))], id="all-in-capitals"),
        pytest.param(" 0 - 3 : 0 - 7 ", [(range(4), range(8))], id="spaces"),
        pytest.param("0-1,,3,", [(range(2), None), (range(3, 4), None)], id="empty-segments"),
        pytest.param("1_0", [(range(10, 11), None)], id="underscore"),
        pytest.param("0:0-4, 1:5-9", [(range(1), range(5)), (range(1, 2), range(5, 10))], id="two-segments"),
    ],
)
def test_placements(text, segments):
    assert [(segment.resources, segment.processes) for segment in parse_placement(text)] == segments


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ",
        "0~1",
        "-1",
        "1.5",
        "0x3",
        "a",
        "3-1",
        "0:all",
        "0:0:0",
        "0-",
        "-",
        ":",
        "0:",
        "٣",
        "9" * 20,
        "0," * 60_000,
    ],
)
def test_refused(text):
    with pytest.raises(RankSyntaxError):
        parse_placement(text)


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        pytest.param(3, (range(3, 4),), id="number"),
        pytest.param("0-1,4", (range(2), range(4, 5)), id="text"),
        pytest.param([0, 1], (range(1), range(1, 2)), id="list"),
        pytest.param("All", None, id="all"),
    ],
)
def test_rank_lists(value, ranks):
    assert parse_rank_list(value) == ranks


@pytest.mark.parametrize("value", [True, 1.5, None, [True], [[0]], {"a": 1}])
def test_rank_lists_refused(value):
    with pytest.raises(RankSyntaxError):
        parse_rank_list(value)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_range_holds_both_ends(first, last):
    first, last = sorted((first, last))
    assert parse_range(f"{first}-{last}") == range(first, last + 1)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spelled_ranks_read_back(ranks):
    read = parse_rank_list(spell_ranks(sorted(ranks), limit=1000))
    assert {rank for part in read for rank in part} == ranks
