"""Channels: named queues between any processes of a job."""

from __future__ import annotations

import io
import numbers
import pickle
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, overload

from roost.transport.context import Current, current_context
from roost.transport.shared_memory import Packet
from roost.transport.waits import Pending

DEFAULT_KEY = "default"


class Channel:
    """A named FIFO queue on one node. Each key has its own queue, created on first use.

    Pass a channel to workers as an argument, or connect to it by name. When a queue of limited size is full, `put`
    waits for room. Any hashable object is a valid key; keys of other than builtin types are equal if their pickles are.
    """

    def __init__(self, name: str, place: Current | None = None) -> None:
        self.name = name
        self._place = place

    @classmethod
    def create(cls, name: str, maxsize: int = 0, node_rank: int = 0, place: Current | None = None) -> Channel:
        """Create a channel, or return the existing one of this name with its own size. `maxsize` 0 means no limit.

        A channel that is closed and empty is replaced by a new one.
        """
        channel = cls(name, place)
        channel._context.link.ask("channel", "create", name, node_rank, maxsize)
        return channel

    @classmethod
    def connect(cls, name: str, current_worker: object = None) -> Channel:
        """Connect to a channel that another process creates; wait up to a minute for it."""
        channel = cls(name)
        channel._context.link.ask("channel", "connect", name)
        return channel

    def __reduce__(self) -> tuple[type[Channel], tuple[str]]:
        return Channel, (self.name,)

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    @property
    def _context(self) -> Current:
        return self._place or current_context()

    @overload
    def put(
        self, item: Any, weight: float = 1, key: Hashable = DEFAULT_KEY, async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> None: ...  # fmt: skip
    @overload
    def put(
        self, item: Any, weight: float = 1, key: Hashable = DEFAULT_KEY, *, async_op: Literal[True],
        timeout: float | None = None,
    ) -> Pending[None]: ...  # fmt: skip
    def put(
        self,
        item: Any,
        weight: float = 1,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Pending[None] | None:
        """Add an item; wait while the channel is full. `weight` counts towards `get_batch`'s target."""
        link, sent_key = self._context.link, portable(key)
        future = link.send("put", self.name, sent_key, weight, timeout, packet=link.pack(item))
        pending = Pending(future, lambda _: None, self._check(future))
        return pending if async_op else self._waited(pending, "put")

    def put_nowait(self, item: Any, weight: float = 1, key: Hashable = DEFAULT_KEY) -> None:
        """Add an item, or raise `asyncio.QueueFull`."""
        self.put(item, weight, key, timeout=0)

    def get(self, key: Hashable = DEFAULT_KEY, async_op: bool = False, timeout: float | None = None) -> Any:
        """Remove and return the next item; wait while there is none."""
        return self._get(key, None, async_op, timeout, lambda items: items[0])

    def get_nowait(self, key: Hashable = DEFAULT_KEY) -> Any:
        """Remove and return the next item, or raise `asyncio.QueueEmpty`."""
        return self.get(key, timeout=0)

    def get_batch(
        self,
        target_weight: float = 1,
        key: Hashable = DEFAULT_KEY,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Items whose weights sum to the target, or as close as possible without exceeding it.

        An item heavier than the target comes alone. Wait for enough items, unless the channel is closed.
        """
        return self._get(key, target_weight, async_op, timeout, list)

    def _get(self, key: Hashable, target: float | None, async_op: bool, timeout: float | None, shape: Any) -> Any:
        link = self._context.link
        future = link.request("get", self.name, portable(key), target, timeout)

        def finish(answer: tuple[Any, list[Packet]]) -> Any:
            return shape([link.unpack(packet) for packet in answer[1]])

        pending = Pending(future, finish, self._check(future))
        return pending if async_op else self._waited(pending, "get")

    def _check(self, future: Future[Any]) -> Callable[[], None] | None:
        """Check that the driver makes while it waits: after a failure nothing may ever arrive. None in a worker."""
        context = self._context
        link, check = context.link, context.check
        if context.setup is not None or check is None:
            return None

        def give_up_if_failed() -> None:
            try:
                check()
            except BaseException:
                link.cancel(future)
                raise

        return give_up_if_failed

    def _waited(self, pending: Pending[Any], what: str) -> Any:
        with self._context.recorder.span(f"{what} {self.name}", "wait"):
            return pending.wait()

    def qsize(self, key: Hashable = DEFAULT_KEY) -> int:
        size: int = self._context.link.ask("channel", "size", self.name, portable(key))
        return size

    def sizes(self) -> dict[Hashable, int]:
        """Number of items by key."""
        sizes: dict[Hashable, int] = self._context.link.ask("channel", "sizes", self.name)
        return {restored(key): size for key, size in sizes.items()}

    def empty(self, key: Hashable = DEFAULT_KEY) -> bool:
        return self.qsize(key) == 0

    def full(self, key: Hashable = DEFAULT_KEY) -> bool:
        is_full: bool = self._context.link.ask("channel", "full", self.name, portable(key))
        return is_full

    def close(self) -> None:
        """Accept no more items; the remaining ones can be taken, then `get` raises `ChannelClosed`."""
        self._context.link.ask("channel", "close", self.name)


PLAIN = (str, int, float, bool, bytes, type(None))
ALIKE: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
    (str, str.__str__),
    (numbers.Integral, int),
    (numbers.Real, float),
)


@dataclass(frozen=True, slots=True)
class OpaqueKey:
    """A pickled key that only the processes using it can read. Keys are equal if their pickles are."""

    pickled: bytes


def portable(key: Hashable) -> Hashable:
    """Key in transport form: builtin scalars, and tuples and frozen sets of them, unchanged; others pickled.

    >>> portable(("row", 3)), type(portable(range(3))).__name__, restored(portable(range(3)))
    (('row', 3), 'OpaqueKey', range(0, 3))
    """
    hash(key)  # raise for an unhashable key here, at the caller
    if type(key) in PLAIN:
        return key
    if isinstance(key, tuple | frozenset) and type(key) in (tuple, frozenset):
        return type(key)(portable(part) for part in key)
    for kind, convert in ALIKE:  # NumPy scalars, and enum members that equal a number or a string
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
    pickler.fast = True  # no memo, so that equal keys give equal bytes whether or not they share objects
    pickler.dump(key)
    return stream.getvalue()
