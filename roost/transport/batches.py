"""Transfers between workers, and batches from M senders to N receivers: which rows go where, split and merge.

The rows of a batch are divided in rank order, as evenly as possible: of 10 rows, 4 ranks own 3, 3, 2 and 2.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from roost.transport.context import Address, Current
from roost.transport.directory import GroupEntry
from roost.transport.host_tensors import DeviceRoute
from roost.transport.shared_memory import Packet
from roost.transport.waits import Pending

LIMIT_VARIABLE = "ROOST_TRANSFER_TIMEOUT"
DEFAULT_LIMIT = 1800.0  # seconds
MESSAGE, BROADCAST = "message", "broadcast"

Groups = Sequence[tuple[str, int | Sequence[int] | None]]


def transfer_limit(timeout: float | None) -> float:
    """Time limit of a transfer: `timeout`, else ROOST_TRANSFER_TIMEOUT, else half an hour."""
    if timeout is not None:
        return timeout
    return float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT))


class Transfer:
    """Sends and receives of one worker. Messages of a pair arrive in order."""

    def __init__(self, context: Current) -> None:
        self._context = context

    @property
    def _me(self) -> Address:
        return self._context.link.who

    def group(self, name: str) -> GroupEntry:
        return GroupEntry(*self._context.link.ask("group", name))

    def send(self, obj: Any, to: Sequence[Address], kind: str, timeout: float | None) -> Pending[None]:
        """Send an object; done when the receivers' nodes have it, after which its memory may be changed."""
        link = self._context.link
        packet = link.pack(obj, self._device_route(to))
        return Pending(
            link.send("send", kind, [tuple(who) for who in to], transfer_limit(timeout), packet=packet),
            lambda _: None,
        )

    def receive(self, sender: Address, kind: str, timeout: float | None) -> Pending[Any]:
        link = self._context.link
        future = link.request("receive", kind, tuple(sender), transfer_limit(timeout))

        def finish(answer: tuple[Any, list[Packet]]) -> Any:
            return link.unpack(answer[1][0], self._device())

        return Pending(future, finish)

    def broadcast(self, obj: Any, groups: Groups, src: Address | None, timeout: float | None) -> Pending[Any]:
        """Broadcast one member's object. All members call it with the same groups; the first is the default source."""
        members = self.members(groups)
        source = src or members[0]
        if self._me not in members:
            raise ValueError(f"{self._me} is not among the workers of the broadcast: {', '.join(map(str, members))}")
        if source not in members:
            raise ValueError(f"the source {source} is not among {', '.join(map(str, members))}")
        if self._me != source:
            return self.receive(source, BROADCAST, timeout)
        others = [who for who in members if who != source]
        if not others:
            return Pending(_done(), lambda _: obj)
        sent = self.send(obj, others, BROADCAST, timeout)
        return Pending(sent._future, lambda _: obj)

    def members(self, groups: Groups) -> list[Address]:
        """Workers named by groups: `("actor", 0)`, `("rollout", [0, 1])`, or `("env", None)` for all ranks."""
        found: list[Address] = []
        for name, ranks in groups:
            if ranks is None:
                ranks = range(len(self.group(name).nodes))
            elif isinstance(ranks, int):
                ranks = [ranks]
            elif isinstance(ranks, str) or not all(isinstance(rank, int) for rank in ranks):
                raise TypeError(f"ranks of {name} are {ranks!r}; give a rank, a list of ranks, or None for all")
            found += [Address(name, rank) for rank in ranks]
        if len(set(found)) < len(found):
            raise ValueError(f"a worker is named twice among {', '.join(map(str, found))}")
        if not found:
            raise ValueError("a broadcast needs at least one worker")
        return found

    def _device_route(self, to: Sequence[Address]) -> DeviceRoute:
        """Use IPC if the only receiver shares the device, otherwise stage tensors in host memory."""
        setup = self._context.setup
        torch = sys.modules.get("torch")
        if setup is None or torch is None or len(to) != 1 or not setup.physical_ids or not torch.cuda.is_initialized():
            return "stage"
        entry = self.group(to[0].group)
        same_node = entry.nodes[to[0].rank] == setup.daemon.node
        shares = bool(set(entry.devices[to[0].rank]) & set(setup.physical_ids)) if entry.devices else False
        return "ipc" if same_node and shares and len(setup.physical_ids) == 1 else "stage"

    def _device(self) -> Any:
        """Target device of received device tensors: this worker's own, if torch can use it."""
        setup = self._context.setup
        torch = sys.modules.get("torch")
        if setup is None or torch is None or not setup.physical_ids or not torch.cuda.is_available():
            return None
        return torch.device("cuda", torch.cuda.current_device())


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that one rank exchanges with one peer, counted from the first row that this rank owns."""

    peer: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def send_plan(batch_size: int, senders: int, receivers: int, rank: int) -> tuple[Piece, ...]:
    """Pieces that sender `rank` sends to each receiver; receivers that own none of its rows are omitted.

    >>> send_plan(10, senders=2, receivers=4, rank=0)  # it owns rows 0-4, the receivers 0-2, 3-5, 6-7, 8-9
    (Piece(peer=0, start=0, stop=3), Piece(peer=1, start=3, stop=5))
    """
    return _overlaps(batch_size, ("sender", senders, rank), ("receiver", receivers))


def receive_plan(batch_size: int, senders: int, receivers: int, rank: int) -> tuple[Piece, ...]:
    """Pieces that receiver `rank` gets from each sender, in row order.

    With fewer rows than receivers, some get nothing and have nothing to merge.

    >>> receive_plan(10, senders=2, receivers=4, rank=1)  # it owns rows 3-5, the senders 0-4 and 5-9
    (Piece(peer=0, start=0, stop=2), Piece(peer=1, start=2, stop=3))
    """
    return _overlaps(batch_size, ("receiver", receivers, rank), ("sender", senders))


def rows_of(batch_size: int, ranks: int, rank: int) -> tuple[int, int]:
    """First row that a rank owns, and the row after its last. A remainder goes to the first ranks, one row each.

    >>> [rows_of(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    each, more = divmod(batch_size, ranks)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def _overlaps(batch_size: int, own: tuple[str, int, int], other: tuple[str, int]) -> tuple[Piece, ...]:
    name, ranks, rank = own
    peer_name, peers = other
    if batch_size < 0:
        raise ValueError(f"a batch cannot have {batch_size} rows")
    for noun, number in ((name, ranks), (peer_name, peers)):
        if number < 1:
            raise ValueError(f"there must be at least one {noun}, not {number}")
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no {name} {rank}; ranks are 0 to {ranks - 1}")
    first, end = rows_of(batch_size, ranks, rank)
    pieces, start = [], first
    while start < end:
        peer = _owner(batch_size, peers, start)
        stop = min(end, rows_of(batch_size, peers, peer)[1])
        pieces.append(Piece(peer, start - first, stop - first))
        start = stop
    return tuple(pieces)


def _owner(batch_size: int, ranks: int, row: int) -> int:
    each, more = divmod(batch_size, ranks)
    larger = more * (each + 1)  # rows of the ranks that own one more
    return row // (each + 1) if row < larger else more + (row - larger) // each


def batch_size_of(batch: Any) -> int:
    """Number of rows of a batch.

    Rows are the first dimension of tensors and arrays, and the items of lists and tuples. Dicts, dataclasses and named
    tuples hold fields, nested to any depth, which must agree. Anything else (numbers, strings, None, 0-d tensors) has
    no rows and is shared by all of them.

    >>> batch_size_of({"obs": {"image": np.zeros((4, 2, 2))}, "text": ["a", "b", "c", "d"], "step": 7})
    4
    """
    found = list(_sizes(batch, ""))
    if not found:
        raise ValueError(f"nothing in the batch has rows: it is a {type(batch).__name__}{_named_fields(batch)}")
    path, size = found[0]
    for other, length in found:
        if length != size:
            raise ValueError(f"the fields of a batch differ in length: {path} has {size} rows, {other} has {length}")
    return size


def split(batch: Any, pieces: Sequence[Piece]) -> tuple[Any, ...]:
    """The batch of each piece; tensors and arrays are views. The pieces must cover the rows, each once and in order.

    >>> split({"tokens": [1, 2, 3], "step": 7}, send_plan(3, senders=1, receivers=2, rank=0))
    ({'tokens': [1, 2], 'step': 7}, {'tokens': [3], 'step': 7})
    """
    size, row = batch_size_of(batch), 0
    for piece in pieces:
        if piece.start != row or piece.stop < row:
            raise ValueError(f"rows {piece.start}-{piece.stop} for peer {piece.peer} do not follow row {row}")
        row = piece.stop
    if row != size:
        path = next(_sizes(batch, ""))[0]
        raise ValueError(f"{path} has {size} rows, but the {len(pieces)} pieces to split it into have {row}")
    return tuple(_cut(batch, slice(piece.start, piece.stop)) for piece in pieces)


def merge(parts: Sequence[Any], pieces: Sequence[Piece] | None = None) -> Any:
    """Join parts in their order; what has no rows must be equal in all. With `pieces`, sizes are checked against them.

    >>> merge([{"tokens": [1, 2], "step": 7}, {"tokens": [3], "step": 7}])
    {'tokens': [1, 2, 3], 'step': 7}
    """
    if not parts:
        raise ValueError("there are no parts to merge")
    sizes = [batch_size_of(part) for part in parts]
    if pieces is not None:
        if len(pieces) != len(parts):
            raise ValueError(f"received {len(parts)} parts, but {len(pieces)} were planned")
        for piece, part, size in zip(pieces, parts, sizes, strict=True):
            if size != len(piece):
                path = next(_sizes(part, ""))[0]
                raise ValueError(f"{path} from peer {piece.peer} has {size} rows, but {len(piece)} were planned")
    return _joined(parts, "") if len(parts) > 1 else parts[0]


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")  # a process that holds tensors has imported it
    return isinstance(value, np.ndarray) or (hasattr(torch, "Tensor") and isinstance(value, torch.Tensor))


def _fields(value: Any) -> dict[Any, Any] | None:
    """Fields of a mapping, named tuple or dataclass by name; None for anything else."""
    if isinstance(value, MutableMapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields with init=False are derived from the others when the object is rebuilt.
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return None


def _with_fields(value: Any, fields: dict[Any, Any]) -> Any:
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # keeps the class and its other attributes
        result.update(fields)
        return result
    return value._replace(**fields) if hasattr(value, "_fields") else dataclasses.replace(value, **fields)


def _length(value: Any) -> int | None:
    if _is_tensor(value):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _sizes(value: Any, path: str) -> Iterator[tuple[str, int]]:
    fields = _fields(value)
    if fields is not None:
        for name, field in fields.items():
            yield from _sizes(field, _below(path, name))
    elif (length := _length(value)) is not None:
        yield _spelled(path), length


def _cut(value: Any, rows: slice) -> Any:
    fields = _fields(value)
    if fields is not None:
        return _with_fields(value, {name: _cut(field, rows) for name, field in fields.items()})
    return value if _length(value) is None else value[rows]


def _joined(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    for number, value in enumerate(values):
        if type(value) is not type(first):
            raise ValueError(
                f"{_spelled(path)} is a {type(first).__name__} in part 0 and a {type(value).__name__} in part {number}"
            )
    fields = [_fields(value) for value in values]
    if fields[0] is not None:
        return _with_fields(first, _joined_fields([held for held in fields if held is not None], path))
    if any(_length(value) is None for value in values):
        return _agreed(values, path)
    if isinstance(first, (list, tuple)):
        return type(first)(item for value in values for item in value)
    return _concatenated(values, path)


def _joined_fields(fields: Sequence[dict[Any, Any]], path: str) -> dict[Any, Any]:
    for number, held in enumerate(fields):
        odd = held.keys() ^ fields[0].keys()
        if odd:
            name = min(odd, key=str)
            has, lacks = (number, 0) if name in held else (0, number)
            raise ValueError(f"{_below(path, name)} is in part {has} and not in part {lacks}")
    return {name: _joined([held[name] for held in fields], _below(path, name)) for name in fields[0]}


def _agreed(values: Sequence[Any], path: str) -> Any:
    """The one value that all parts carry."""
    first = values[0]
    for number, value in enumerate(values):
        are_nan = bool(first != first) and bool(value != value)  # NaN differs from itself, but counts as equal here
        if value is not first and not are_nan and not bool(value == first):
            raise ValueError(
                f"{_spelled(path)} has no rows and must be equal: {first!r} in part 0, {value!r} in {number}"
            )
    return first


def _concatenated(values: Sequence[Any], path: str) -> Any:
    first = values[0]
    # NumPy and torch would silently promote to a common dtype.
    for name, property_of in _MUST_AGREE.items():
        expected = property_of(first)
        for number, value in enumerate(values):
            found = property_of(value)
            if found != expected:
                raise ValueError(
                    f"{_spelled(path)} differs in {name}: {expected} in part 0 and {found} in part {number}"
                )
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return sys.modules["torch"].cat(list(values))


_MUST_AGREE: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda value: value.dtype,
    "the shape of a row": lambda value: tuple(value.shape[1:]),
    "device": lambda value: str(getattr(value, "device", "cpu")),
}


def _below(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _spelled(path: str) -> str:
    return path or "the batch"


def _named_fields(value: Any) -> str:
    fields = _fields(value)
    return f" of {', '.join(map(str, fields))}" if fields else ""
