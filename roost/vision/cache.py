"""`ByteCache`: an LRU cache of values by image digest, bounded by bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """Evicts the least recently used values. The newest is kept, even if it alone exceeds the limit.

    >>> cache = ByteCache[str](4, len)
    >>> [cache.get(key, lambda: value) for key, value in ((b"a", "12"), (b"b", "34"), (b"a", "-"), (b"c", "5"))]
    ['12', '34', '12', '5']
    >>> cache.get(b"a", lambda: "new"), cache.get(b"b", lambda: "new")
    ('12', 'new')
    """

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self._limit, self._size = limit, size
        self._kept: dict[bytes, Value] = {}  # least recently used first
        self._lock = threading.Lock()
        self.bytes = 0

    def get(self, key: bytes, make: Callable[[], Value]) -> Value:
        """Return the cached value of a key, or compute and cache it."""
        with self._lock:
            if key in self._kept:
                self._kept[key] = found = self._kept.pop(key)
                return found
        made = make()  # without the lock: other threads make theirs meanwhile
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self.bytes += self._size(made)
            while self.bytes > self._limit and len(self._kept) > 1:
                self.bytes -= self._size(self._kept.pop(next(iter(self._kept))))
        return made

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self.bytes = 0
