"""A queue of weighted items whose getters and putters are served in the order they came. It knows no transport."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
ROUNDING = 1e-9  # of the target: ten items of weight 0.1 make up 1


class Item(NamedTuple, Generic[T]):
    """Something in a queue, and what it counts when a batch is taken."""

    value: T
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class _Getter(Generic[T]):
    target: float | None  # None: one item
    future: asyncio.Future[list[T]]
    taken: list[Item[T]] = field(default_factory=list)
    weight: float = 0.0  # of what is taken

    def take(self, item: Item[T]) -> None:
        self.taken.append(item)
        self.weight += item.weight

    def has_enough(self) -> bool:
        return self.target is None or self.weight >= self.target - ROUNDING * abs(self.target)

    def has_room_for(self, item: Item[T]) -> bool:
        if self.target is None or not self.taken:
            return True
        return self.weight + item.weight <= self.target + ROUNDING * abs(self.target)


class ItemQueue(Generic[T]):
    """First in, first out, for items as for those who wait for them.

    One who waits for a batch keeps the items it has while it waits for more; if it gives up, they go back to the front.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self._items: deque[Item[T]] = deque()
        self._getters: deque[_Getter[T]] = deque()
        self._putters: deque[tuple[Item[T], asyncio.Future[None]]] = deque()
        self._closed: Exception | None = None

    def __len__(self) -> int:
        if self._getters and self._getters[0].future.done():
            self._serve()  # it gave up just now, and what it had taken counts again
        return len(self._items)

    @property
    def is_full(self) -> bool:
        return 0 < self.maxsize <= len(self._items)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing in it and nobody waits at it."""
        waits = [getter.future for getter in self._getters] + [future for _, future in self._putters]
        return not len(self) and all(wait.done() for wait in waits)

    def put(self, item: Item[T]) -> asyncio.Future[None] | None:
        """Add an item; where there is no room, the future is done once it has been added."""
        if not item.weight >= 0:
            raise ValueError(f"an item's weight is {item.weight}; it must be 0 or more")
        if self._closed is not None:
            raise copy.copy(self._closed)  # an error that is raised again and again would keep every frame it passed
        if self.is_full or self._putters:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._putters.append((item, future))
            self._serve()
            if not future.done():
                future.add_done_callback(self._taken_back)
            return future
        self._items.append(item)
        self._serve()
        return None

    def get(self, target: float | None = None) -> asyncio.Future[list[T]]:
        """One item, or a batch whose weight comes as near to the target as whole items can without passing it.

        An item heavier than the target comes alone: a batch is never empty.
        """
        future: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
        self._getters.append(_Getter(target, future))
        self._serve()
        if not future.done():
            future.add_done_callback(self._given_up)
        return future

    def _given_up(self, future: asyncio.Future[list[T]]) -> None:
        if future.cancelled():
            self._serve()  # what it had taken is for those behind it
            self._getters = deque(getter for getter in self._getters if not getter.future.done())

    def _taken_back(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._putters = deque(putter for putter in self._putters if putter[1] is not future)

    def close(self, reason: Exception) -> None:
        """Refuse further items; who waits for more than is left gets what there is, or else the reason."""
        self._closed = reason
        self.fail_putters(reason)
        self._serve()

    def fail_getters(self, reason: Exception) -> None:
        """End every wait for an item with an error; items that a waiting batch had taken stay for others."""
        for getter in self._getters:
            self._items.extendleft(reversed(getter.taken))
            getter.taken = []
            _fail(getter.future, reason)
        self._getters.clear()

    def fail_putters(self, reason: Exception) -> None:
        """End every wait for room with an error."""
        for _, future in self._putters:
            _fail(future, reason)
        self._putters.clear()

    def clear(self) -> list[T]:
        """Take everything out, for nobody."""
        items = [item.value for item in self._items]
        self._items.clear()
        return items

    def _serve(self) -> None:
        while True:
            self._admit()
            getter = self._next_getter()
            if getter is None or not self._fill(getter):
                return

    def _next_getter(self) -> _Getter[T] | None:
        while self._getters and self._getters[0].future.done():  # it gave up
            gone = self._getters.popleft()
            self._items.extendleft(reversed(gone.taken))
        return self._getters[0] if self._getters else None

    def _fill(self, getter: _Getter[T]) -> bool:
        """Give the first in line what there is; whether it has got all it waits for."""
        while self._items:
            if not getter.has_room_for(self._items[0]):
                return self._finish(getter)
            getter.take(self._items.popleft())
            self._admit()
            if getter.has_enough():
                return self._finish(getter)
        if self._closed is not None:
            if getter.taken:
                return self._finish(getter)
            self._getters.popleft()
            _fail(getter.future, self._closed)
            return True
        return False

    def _finish(self, getter: _Getter[T]) -> bool:
        self._getters.popleft()
        getter.future.set_result([item.value for item in getter.taken])
        return True

    def _admit(self) -> None:
        while self._putters and not self.is_full:
            item, future = self._putters.popleft()
            if not future.done():
                self._items.append(item)
                future.set_result(None)


def _fail(future: asyncio.Future[Any], reason: Exception) -> None:
    if not future.done():
        future.set_exception(copy.copy(reason))
