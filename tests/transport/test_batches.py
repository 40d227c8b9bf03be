"""Batches between groups of ranks: the plans of both sides, and cutting and joining what holds the rows."""

import dataclasses
from collections import OrderedDict, UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from roost.transport.batches import Piece, batch_size_of, merge, receive_plan, rows_of, send_plan, split

MANY = settings(max_examples=150)


@dataclasses.dataclass(frozen=True)
class Rollout:
    tokens: torch.Tensor
    texts: list[str]
    version: int
    count: int = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "count", len(self.texts))


class Pair(NamedTuple):
    observation: np.ndarray
    action: np.ndarray


counts = st.integers(1, 12)
sizes = st.integers(0, 60)


@MANY
@given(sizes, counts, counts)
def test_every_row_goes_to_one_receiver_in_order(size, senders, receivers):
    arrived = {rank: [] for rank in range(receivers)}
    for sender in range(senders):
        first = rows_of(size, senders, sender)[0]
        for piece in send_plan(size, senders, receivers, sender):
            assert len(piece) > 0
            arrived[piece.peer] += range(first + piece.start, first + piece.stop)
    assert [row for rows in arrived.values() for row in rows] == list(range(size))
    assert all(rows == list(range(*rows_of(size, receivers, rank))) for rank, rows in arrived.items())


@MANY
@given(sizes, counts, counts)
def test_both_plans_name_the_same_messages(size, senders, receivers):
    sent = {
        (sender, piece.peer, rows_of(size, senders, sender)[0] + piece.start, len(piece))
        for sender in range(senders)
        for piece in send_plan(size, senders, receivers, sender)
    }
    received = {
        (piece.peer, receiver, rows_of(size, receivers, receiver)[0] + piece.start, len(piece))
        for receiver in range(receivers)
        for piece in receive_plan(size, senders, receivers, receiver)
    }
    assert sent == received


@MANY
@given(sizes, counts)
def test_shares_differ_by_one_at_most(size, ranks):
    shares = [stop - start for start, stop in (rows_of(size, ranks, rank) for rank in range(ranks))]
    assert sum(shares) == size
    assert shares == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= 1


def numbered(size):
    return {
        "tokens": torch.arange(size * 3).reshape(size, 3),
        "rewards": np.arange(size, dtype=np.float32),
        "texts": [f"row {row}" for row in range(size)],
        "spans": tuple((row, row + 1) for row in range(size)),
        "nested": {"mask": torch.ones(size, dtype=torch.bool), "scale": 0.5},
        "version": 3,
        "loss": float("nan"),
        "name": "a name",
        "none": None,
    }


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and (left == right or left != left)


@MANY
@given(st.integers(1, 40), counts, counts)
def test_a_batch_arrives_as_it_was(size, senders, receivers):
    whole = numbered(size)
    posted = {}
    for sender in range(senders):
        start, stop = rows_of(size, senders, sender)
        if start == stop:
            continue
        [own] = split(whole, [Piece(0, 0, size)])
        own = {**split(own, [Piece(0, 0, start), Piece(1, start, stop), Piece(2, stop, size)])[1]}
        pieces = send_plan(size, senders, receivers, sender)
        for piece, part in zip(pieces, split(own, pieces), strict=True):
            posted[sender, piece.peer] = part
    arrived = []
    for receiver in range(receivers):
        pieces = receive_plan(size, senders, receivers, receiver)
        if pieces:
            arrived.append(merge([posted[piece.peer, receiver] for piece in pieces], pieces))
    assert same(merge(arrived), whole)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        pytest.param(torch.zeros(4, 2), 4, id="tensor"),
        pytest.param(np.zeros((4, 2)), 4, id="array"),
        pytest.param([1, 2], 2, id="list"),
        pytest.param((1, 2, 3), 3, id="tuple"),
        pytest.param({"a": {"b": [1, 2]}, "c": "text", "d": torch.tensor(1.0)}, 2, id="nested dict"),
        pytest.param(Rollout(torch.zeros(2, 5), ["a", "b"], 1), 2, id="dataclass"),
        pytest.param(Pair(np.zeros(3), np.zeros(3)), 3, id="named tuple"),
        pytest.param({"a": torch.zeros(0, 4)}, 0, id="no rows"),
        pytest.param(UserDict(a=[1, 2]), 2, id="mapping that is not a dict"),
    ],
)
def test_size(batch, size):
    assert batch_size_of(batch) == size


def test_a_dataclass_is_cut_and_joined_with_what_follows_from_its_rows():
    whole = Rollout(torch.arange(6).reshape(3, 2), ["a", "b", "c"], version=9)
    parts = split(whole, send_plan(3, 1, 2, 0))
    assert [(part.texts, part.count, part.version) for part in parts] == [(["a", "b"], 2, 9), (["c"], 1, 9)]
    joined = merge(parts)
    assert torch.equal(joined.tokens, whole.tokens)
    assert (joined.texts, joined.count) == (whole.texts, 3)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(Pair(np.arange(3), np.arange(3)), id="named tuple"),
        pytest.param(OrderedDict(a=[1, 2, 3]), id="ordered dict"),
        pytest.param(UserDict(a=[1, 2, 3]), id="mapping that is not a dict"),
    ],
)
def test_the_class_of_a_structure_is_kept(batch):
    parts = split(batch, send_plan(3, 1, 3, 0))
    assert [batch_size_of(part) for part in parts] == [1, 1, 1]
    assert type(merge(parts)) is type(batch)
    assert batch_size_of(merge(parts)) == 3


def test_cutting_copies_nothing():
    whole = torch.zeros(4, 1000)
    parts = split({"x": whole}, send_plan(4, 1, 2, 0))
    assert [part["x"].data_ptr() - whole.data_ptr() for part in parts] == [0, 8000]


def test_what_came_in_one_part_is_not_copied():
    part = {"x": torch.zeros(4)}
    assert merge([part]) is part


BOTH = [Piece(0, 0, 2), Piece(1, 2, 4)]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        pytest.param(lambda: send_plan(-1, 1, 1, 0), "cannot have -1 rows", id="negative size"),
        pytest.param(lambda: send_plan(4, 0, 1, 0), "at least one sender, not 0", id="no senders"),
        pytest.param(lambda: send_plan(4, 1, 0, 0), "at least one receiver, not 0", id="no receivers"),
        pytest.param(lambda: send_plan(4, 2, 1, 2), "there is no sender 2; ranks are 0 to 1", id="no such sender"),
        pytest.param(lambda: receive_plan(4, 2, 3, -1), "there is no receiver -1; ranks", id="no such receiver"),
        pytest.param(lambda: batch_size_of({"a": 1, "b": "x"}), "nothing in the batch has rows.*a, b", id="no rows"),
        pytest.param(lambda: batch_size_of(3), "nothing in the batch has rows: it is a int", id="a number"),
        pytest.param(
            lambda: batch_size_of({"a": [1, 2], "b": {"c": np.zeros(3)}}),
            "a has 2 rows, b.c has 3",
            id="lengths differ",
        ),
        pytest.param(lambda: split({"a": [1, 2, 3]}, BOTH), "a has 3 rows, but the 2 pieces .* have 4", id="too short"),
        pytest.param(lambda: split([1, 2, 3, 4, 5], BOTH), "the batch has 5 rows.*have 4", id="too long"),
        pytest.param(lambda: split([1, 2, 3, 4], BOTH[::-1]), "rows 2-4 for peer 1 do not follow row 0", id="order"),
        pytest.param(lambda: merge([]), "no parts", id="nothing to merge"),
        pytest.param(lambda: merge([[1, 2]], BOTH), "received 1 parts, but 2 were planned", id="part missing"),
        pytest.param(
            lambda: merge([{"a": [1, 2]}, {"a": [3]}], BOTH),
            "a from peer 1 has 1 rows, but 2 were planned",
            id="short part",
        ),
        pytest.param(
            lambda: merge([{"a": [1], "v": 1}, {"a": [2], "v": 2}]),
            "v has no rows and must be equal: 1 .* 2",
            id="carried",
        ),
        pytest.param(
            lambda: merge([{"a": [1]}, {"a": [2], "b": [3]}]), "b is in part 1 and not in part 0", id="field missing"
        ),
        pytest.param(
            lambda: merge([{"a": [1]}, {"a": (2,)}]), "a is a list in part 0 and a tuple in part 1", id="class"
        ),
        pytest.param(
            lambda: merge([{"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.float64)}]),
            "a differs in dtype: torch.float32 in part 0 and torch.float64 in part 1",
            id="dtype",
        ),
        pytest.param(
            lambda: merge([np.zeros((1, 2)), np.zeros((1, 3))]),
            r"the batch differs in the shape of a row: \(2,\) in part 0 and \(3,\) in part 1",
            id="row shape",
        ),
    ],
)
def test_errors_name_the_field_and_the_numbers(act, message):
    with pytest.raises(ValueError, match=message):
        act()
