"""The key-value cache: its blocks, tensors and size."""

from __future__ import annotations

import hashlib
import math
import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.net.routing import Routing, routing_type

ROOT = b""


def block_hash(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full block by its tokens and all tokens before it, since keys and values depend on both."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks with reference counts. An unused block can still be found until it is reused.

    >>> pool = BlockPool(count=4, block_size=2)
    >>> block = pool.take()
    >>> pool.announce(block, name := block_hash(ROOT, [1, 2]))
    >>> pool.give_back([block])
    >>> pool.find([name]) == [block], pool.free
    (True, 4)
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.epoch = 0  # incremented by `forget_all`
        self._users = [0] * count
        self._names: list[bytes | None] = [None] * count
        self._by_name: dict[bytes, int] = {}
        self._blank = list(range(count - 1, -1, -1))
        self._idle: dict[int, None] = {}  # unused, but can be found; least recently used first

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-tokens // self.block_size)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of these names, up to the first that is missing."""
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these found blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] += 1

    def idle(self, blocks: Iterable[int]) -> int:
        """Number of these blocks that count as free and would not if they were shared."""
        return sum(block in self._idle for block in blocks)

    def take(self) -> int:
        """Allocate a block; if none is blank, evict the least recently used one."""
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        self._users[block] = 1
        return block

    def announce(self, block: int, name: bytes) -> None:
        """Make the block findable by this name, unless another one has the name."""
        if name not in self._by_name and self._names[block] is None:
            self._by_name[name] = block
            self._names[block] = name

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of a sequence's blocks; its last blocks are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._names[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def forget_all(self) -> None:
        """Make all blocks unfindable; those in use keep their contents for their users."""
        self.epoch += 1
        self._by_name.clear()
        self._names = [None] * self.count
        self._blank += self._idle
        self._idle.clear()

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None


LayerCache: TypeAlias = tuple[Tensor, Tensor]  # keys and values, each [blocks, block size, heads, head size]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one attention layer's keys and values per token."""

    heads: int
    key_size: int
    value_size: int

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_size + self.value_size)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    return sum(layer.numbers for layer in layers) * block_size * dtype.itemsize


def new_cache(
    layers: Sequence[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Allocate the blocks plus one scrap block, to which padding rows of a captured batch write."""

    def room(heads: int, size: int) -> Tensor:
        # Zeros, because padded rows are masked, but NaN times zero would still be NaN.
        shape = (blocks + 1, block_size, heads, size)
        if device.type == "cpu":  # fresh pages take no memory before they are written to; torch writes its zeros
            pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    return [(room(layer.heads, layer.key_size), room(layer.heads, layer.value_size)) for layer in layers]


GRAIN = 256  # tokens by which gathered copies grow, so that growing is rare


class Gathered:
    """Contiguous copy of a sequence's keys and values, extended token by token; its blocks remain shareable."""

    def __init__(self) -> None:
        self.length = 0  # tokens held
        self._layers: list[LayerCache] = []  # each [1, heads, room, head size]

    def catch_up(self, cache: Sequence[LayerCache], table: Tensor, length: int) -> None:
        """Copy the blocks up to `length`, with room for at least one more token."""
        if self.length != length:
            self._layers = [(_copied(keys, table, length), _copied(values, table, length)) for keys, values in cache]
        elif length == self._layers[0][0].shape[2]:
            self._layers = [(_with_room(keys), _with_room(values)) for keys, values in self._layers]
        self.length = length + 1

    def with_token(self, layer: int, key: Tensor, value: Tensor) -> LayerCache:
        """A layer's keys and values including those of this step's token."""
        keys, values = self._layers[layer]
        keys[0, :, self.length - 1] = key
        values[0, :, self.length - 1] = value
        return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)


def _copied(blocks: Tensor, table: Tensor, length: int) -> Tensor:
    heads, size = blocks.shape[2:]
    room = blocks.new_empty(1, heads, (length // GRAIN + 1) * GRAIN, size)
    room[0, :, :length] = blocks.index_select(0, table).flatten(0, 1)[:length].transpose(0, 1)
    return room


def _with_room(held: Tensor) -> Tensor:
    return torch.cat([held, held.new_empty(1, held.shape[1], max(held.shape[2], GRAIN), held.shape[3])], dim=2)


class RoutingTable:
    """Experts chosen for each token in the KV cache, by slot, so that tokens found there have theirs as well.

    >>> table = RoutingTable(slots=8, layers=1, top_k=2, experts=4)
    >>> table.write(np.array([6, 7, 0]), torch.tensor([[[3, 1]], [[0, 2]], [[1, 0]]]))
    >>> table.read(blocks=[3, 0], block_size=2, tokens=3).tolist()
    [[[3, 1]], [[0, 2]], [[1, 0]]]
    """

    def __init__(self, slots: int, layers: int, top_k: int, experts: int) -> None:
        self._chosen = np.zeros((slots, layers, top_k), routing_type(experts))

    def write(self, slots: NDArray[np.integer[Any]], chosen: Tensor) -> None:
        self._chosen[slots] = chosen.cpu().numpy()

    def read(self, blocks: Sequence[int], block_size: int, tokens: int) -> Routing:
        """Experts of the first tokens of a sequence."""
        places = np.arange(tokens)
        found: Routing = self._chosen[np.array(blocks)[places // block_size] * block_size + places % block_size]
        return found
