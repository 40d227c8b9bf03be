"""Keys of channels: what an daemon gets of them, and what comes back."""

import enum
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from roost.transport.channel import OpaqueKey, portable, restored


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Name(str, enum.Enum):  # noqa: UP042 -- as people wrote it before there was StrEnum
    ONE = "one"


@dataclass(frozen=True)
class Cell:
    row: str
    column: str


PLAIN = ["a", 1, 1.5, True, None, b"x", ("a", (1, None)), frozenset({"a"}), ()]
LIKE_BUILTIN = {"an IntEnum": (Level.LOW, 1), "numpy's int": (np.int64(3), 3), "a str Enum": (Name.ONE, "one")}
OPAQUE = [Colour.RED, Cell("a", "b"), range(3), Level, ("a", Cell("a", "a"))]


@pytest.mark.parametrize("key", PLAIN, ids=repr)
def test_builtin_keys_travel_as_they_are(key):
    assert portable(key) == key
    assert type(portable(key)) is type(key)
    assert restored(portable(key)) == key


@pytest.mark.parametrize("key, builtin", LIKE_BUILTIN.values(), ids=LIKE_BUILTIN)
def test_keys_that_equal_builtin_ones_are_the_same_keys(key, builtin):
    assert type(portable(key)) is type(builtin)
    assert portable(key) == builtin == key


@pytest.mark.parametrize("key", OPAQUE, ids=repr)
def test_other_keys_travel_as_bytes_and_come_back_as_they_were(key):
    sent = pickle.loads(pickle.dumps(portable(key)))
    assert sent == portable(key)
    assert hash(sent) == hash(portable(key))
    assert restored(sent) == key
    parts = sent if isinstance(sent, tuple) else (sent,)
    assert any(isinstance(part, OpaqueKey) for part in parts)


def test_equal_keys_are_the_same_whether_or_not_their_parts_are_one_object():
    text = "".join(["a", "b"])
    other = "".join(["a", "b"])
    assert portable(Cell(text, text)) == portable(Cell(text, other))


def test_what_cannot_be_a_key_is_refused_where_it_is_used():
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        portable(["a"])
