"""Keys of channels on their way to an agent, which must hash them and may not have the classes they are of."""

from __future__ import annotations

import io
import numbers
import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

PLAIN = (str, int, float, bool, bytes, type(None))
ALIKE: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
    (str, str.__str__),
    (numbers.Integral, int),
    (numbers.Real, float),
)


@dataclass(frozen=True, slots=True)
class OpaqueKey:
    """A key that only the processes which use it can read. Two are the same if they pickle to the same bytes."""

    pickled: bytes


def portable(key: Hashable) -> Hashable:
    """A key as it travels: builtin scalars, and tuples and frozen sets of them, as they are; others as bytes.

    >>> portable(("row", 3)), type(portable(range(3))).__name__, restored(portable(range(3)))
    (('row', 3), 'OpaqueKey', range(0, 3))
    """
    hash(key)  # what cannot be a key is an error here, where it was written
    if type(key) in PLAIN:
        return key
    if isinstance(key, tuple | frozenset) and type(key) in (tuple, frozenset):
        return type(key)(portable(part) for part in key)
    for kind, convert in ALIKE:  # numpy's scalars, and enumerations of numbers and texts, which equal builtin ones
        if isinstance(key, kind):
            builtin = convert(key)
            if builtin == key and hash(builtin) == hash(key):
                return builtin
    return OpaqueKey(_pickled(key))


def restored(key: Hashable) -> Hashable:
    """The inverse of `portable`."""
    if isinstance(key, OpaqueKey):
        found: Hashable = pickle.loads(key.pickled)
        return found
    if isinstance(key, tuple | frozenset):
        return type(key)(restored(part) for part in key)
    return key


def _pickled(key: Hashable) -> bytes:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5)
    pickler.fast = True  # no memory of objects met before: equal keys give equal bytes whether or not parts are shared
    pickler.dump(key)
    return stream.getvalue()
