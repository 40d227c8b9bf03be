"""Requests in the engine, and the scheduler that plans each step's chunks and KV cache blocks."""

from __future__ import annotations

import hashlib
import math
import mmap
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.engines.protocol import Finish, Ids, Sampling, SamplingMasks
from roost.net.routing import Routing, routing_type
from roost.vision.processor import PromptPositions

ROOT = b""


def hash_block(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block from its tokens and the hash of the block before, as keys and values depend on both."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks with reference counts. An unused block can still be found until it is reused.

    >>> pool = BlockPool(count=4, block_size=2)
    >>> block = pool.take()
    >>> pool.announce(block, block_hash := hash_block(ROOT, [1, 2]))
    >>> pool.release([block])
    >>> pool.find([block_hash]) == [block], pool.free
    (True, 4)
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.epoch = 0  # incremented by `forget_all`
        self._users = [0] * count
        self._hashes: list[bytes | None] = [None] * count
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(count - 1, -1, -1))
        self._idle: dict[int, None] = {}  # unused, but can be found; least recently used first

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-tokens // self.block_size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of these hashes, up to the first that is missing."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
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
        """Number of these blocks that have no user, so that sharing them makes them less free."""
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

    def announce(self, block: int, block_hash: bytes) -> None:
        """Make the block findable by this hash, unless another block has it."""
        if block_hash not in self._by_hash and self._hashes[block] is None:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each block of a sequence; its last blocks are evicted first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def forget_all(self) -> None:
        """Clear the prefix cache; blocks in use keep their contents for their users."""
        self.epoch += 1
        self._by_hash.clear()
        self._hashes = [None] * self.count
        self._blank += self._idle
        self._idle.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None


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
        if device.type == "cpu":  # anonymous pages take no memory until written to, unlike torch.zeros
            pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(pages, dtype=dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    return [(room(layer.heads, layer.key_size), room(layer.heads, layer.value_size)) for layer in layers]


GRAIN = 256  # tokens by which gathered copies grow


class Gathered:
    """Contiguous copy of a sequence's keys and values, extended token by token. The blocks stay valid beside it."""

    def __init__(self) -> None:
        self.length = 0  # tokens held
        self._layers: list[LayerCache] = []  # each [1, heads, room, head size]

    def catch_up(self, cache: Sequence[LayerCache], table: Tensor, length: int) -> None:
        """Copy the first `length` tokens from the blocks unless they are held already; make room for one more."""
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
    """Experts of each token in the KV cache, by slot, so that they are known for cached prefixes too.

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


Ints: TypeAlias = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Concatenated tokens of many sequences; sequence i has tokens starts[i] to starts[i + 1]."""

    token_ids: Ints
    positions: Ints
    slots: Ints  # cache slot of each token: block times block size, plus offset in the block
    starts: Ints
    lengths: Ints  # per sequence, all its tokens up to the last of this step
    tables: Ints  # block table per sequence, padded to the same width
    rows: Ints  # tokens whose logits are needed


def flatten(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Concatenate the tokens of chunks.

    >>> from roost.engines.protocol import Sampling
    >>> from roost.torch_engine.scheduler import Request, Tracked
    >>> tracked = Tracked(Request("a", (7, 8, 9), Sampling()), print, seed=0, stop_ids=frozenset(), limit=4)
    >>> tracked.blocks = [5, 3]
    >>> batch = flatten([Chunk(tracked, 1, 3)], block_size=2)
    >>> batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), batch.rows.tolist()
    ([8, 9], [1, 2], [11, 6], [1])
    """
    sequences, firsts, ends = zip(*chunks, strict=True)
    first, lengths = np.array(firsts, np.int64), np.array(ends, np.int32)
    sizes = lengths - first
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    owner = np.repeat(np.arange(len(chunks)), sizes)
    positions = np.arange(starts[-1]) - starts[owner] + first[owner]
    tables = _tables(sequences)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    if len(positions) == len(chunks):
        tokens = [each.token_ids[start] for each, start in zip(sequences, firsts, strict=True)]
    else:
        tokens = [token for chunk in chunks for token in chunk.token_ids]
    return Batch(np.array(tokens, np.int64), positions, slots, starts, lengths, tables, _rows(chunks, starts))


def _tables(sequences: Sequence[Tracked]) -> Ints:
    counts = np.array([len(each.blocks) for each in sequences])
    tables = np.zeros((len(sequences), int(counts.max())), np.int32)
    blocks = np.fromiter(chain.from_iterable(each.blocks for each in sequences), np.int32, int(counts.sum()))
    tables[np.arange(tables.shape[1]) < counts[:, None]] = blocks  # row by row
    return tables


def _rows(chunks: Sequence[Chunk], starts: Ints) -> Ints:
    rows: list[int] = []
    for chunk, end in zip(chunks, starts[1:].tolist(), strict=True):
        if chunk.tracked.is_scored:
            rows.extend(range(end - chunk.size, end))
        elif chunk.makes_token:
            rows.append(end - 1)
    return np.array(rows, np.int64)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the engine: tokens in, tokens out."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    wants_prompt_logprobs: bool = False
    adapter: str | None = None
    streams: bool = True  # report progress after every token; else when it ends or the policy version changes


@dataclass(frozen=True, slots=True)
class Progress:
    """New tokens of a request; prompt log-probs come once, with the first token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: Finish | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    masks: SamplingMasks | None = None  # if requested
    routing: Routing | None = None  # experts of all computed tokens, with the finish, if requested


@dataclass(eq=False, slots=True)
class Tracked:
    """A request with its generated tokens and its KV cache blocks."""

    request: Request
    deliver: Callable[[Progress], None]
    seed: int
    stop_ids: frozenset[int]
    limit: int  # prompt and completion together
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the generated tokens
    delivered: int = 0  # generated tokens that were delivered
    computed: int = 0  # tokens from the start whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of full blocks that were announced or found
    epoch: int = 0  # of the block pool at admission
    gathered: Gathered | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    masks: list[Ids] = field(default_factory=list)  # of the generated tokens, if requested
    layout: PromptPositions | None = None  # of a prompt with images

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

    def block_hash(self, before: bytes, start: int, end: int) -> bytes:
        """Hash of a full block, with the images that begin in it, because placeholder tokens are all alike."""
        digests = (image.digest for image in self.request.sampling.images if start <= image.start < end)
        return hash_block(b"".join((before, *digests)), self.token_ids[start:end])

    @property
    def is_scored(self) -> bool:
        """True if log-probs of its prompt are requested and not computed yet."""
        return self.request.wants_prompt_logprobs and not self.logprobs

    def add(self, token_id: int, logprob: float, mask: Ids | None = None) -> Finish | None:
        """Append a generated token; return the finish reason, or None if the sequence continues."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if mask is not None:
            self.masks.append(mask)
        if token_id in self.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.token_ids) >= self.limit else None

    def progress(self, version: int, finish: Finish | None = None) -> Progress:
        """Tokens that were not delivered yet; they count as delivered from now on."""
        before, self.delivered = self.delivered, len(self.logprobs)
        is_first = before == 0 < self.delivered
        return Progress(
            token_ids=tuple(self.token_ids[len(self.request.token_ids) + before :]),
            logprobs=tuple(self.logprobs[before:]),
            version=version,
            finish=finish,
            prompt_logprobs=tuple(self.prompt_logprobs) if is_first and self.request.wants_prompt_logprobs else None,
            cached_tokens=self.cached_tokens if is_first else 0,
            masks=SamplingMasks.of(self.masks[before:]) if self.masks else None,
        )


class Chunk(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a sequence, computed in one step."""

    tracked: Tracked
    start: int
    end: int

    @property
    def token_ids(self) -> Sequence[int]:
        return self.tracked.token_ids[self.start : self.end]

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def scored_rows(self) -> int:
        """Number of positions whose logits are needed for prompt log-probs."""
        return self.size if self.tracked.is_scored else 0

    @property
    def makes_token(self) -> bool:
        """True if the next token can be sampled after this chunk."""
        return self.end == len(self.tracked.token_ids)


SOON = 16  # tokens per running sequence for which blocks are reserved before a new one is admitted


class Scheduler:
    """Waiting and running sequences; the running ones are in order of arrival."""

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        max_batch_tokens: int,
        max_logit_rows: int,
        root_of: Callable[[str | None], bytes],
    ) -> None:
        self.pool = pool
        self.waiting: deque[Tracked] = deque()
        self.running: list[Tracked] = []
        self._max_sequences = max_sequences
        self._max_batch_tokens = max_batch_tokens
        self._max_logit_rows = max_logit_rows
        self._root_of = root_of  # hash that the first block of a sequence follows, by adapter

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, tracked: Tracked) -> None:
        self.waiting.append(tracked)

    def remove(self, gone: Collection[Tracked]) -> None:
        """Remove ended sequences."""
        for tracked in gone:
            self._take_blocks_from(tracked)
        self.running = [each for each in self.running if each not in gone]
        if any(each in gone for each in self.waiting):
            self.waiting = deque(each for each in self.waiting if each not in gone)

    def preempt_all(self) -> None:
        """Preempt all running sequences; they are recomputed later."""
        while self.running:
            self._preempt_last()

    def plan(self) -> list[Chunk]:
        """Plan the next step. Running sequences come before waiting ones, and get blocks before any is admitted."""
        chunks: list[Chunk] = []
        tokens, rows = self._max_batch_tokens, self._max_logit_rows
        before, size = len(self.running), self.pool.block_size
        while len(chunks) < len(self.running) and tokens > 0:
            tracked = self.running[len(chunks)]
            chunk = self._next_chunk(tracked, tokens, rows)
            # Most steps of a decoding sequence neither need a block nor fill one.
            if len(tracked.blocks) * size >= chunk.end < (len(tracked.hashes) + 1) * size or self._grow(chunk):
                chunks.append(chunk)
                tokens, rows = tokens - chunk.size, rows - chunk.scored_rows
        had_to_preempt = len(self.running) < before
        soon = sum(map(self._needs_block_soon, self.running)) if self.waiting else 0
        while self.waiting and tokens > 0 and not had_to_preempt and len(self.running) < self._max_sequences:
            tracked = self.waiting[0]
            if (tracked.is_scored and rows == 0) or not self._admit(tracked, soon):
                break
            soon += self._needs_block_soon(tracked)
            chunk = self._next_chunk(tracked, tokens, rows)
            self._announce(chunk)
            chunks.append(chunk)
            tokens, rows = tokens - chunk.size, rows - chunk.scored_rows
        return [chunk for chunk in chunks if chunk.size > 0]

    def _next_chunk(self, tracked: Tracked, tokens: int, rows: int) -> Chunk:
        start, end = tracked.computed, len(tracked.token_ids)
        if end - start > 1 or tracked.is_scored:
            end = min(start + (min(tokens, rows) if tracked.is_scored else tokens), end)
        return Chunk(tracked, start, end)

    def _grow(self, chunk: Chunk) -> bool:
        """Allocate the blocks of a running sequence's chunk, preempting the last to arrive, which may be itself."""
        tracked = chunk.tracked
        while len(tracked.blocks) < self.pool.needed(chunk.end):
            if self.pool.free:
                tracked.blocks.append(self.pool.take())
            elif self._preempt_last() is tracked:
                return False
        self._announce(chunk)
        return True

    def _admit(self, tracked: Tracked, soon: int) -> bool:
        """Admit the first waiting sequence if there are blocks for all its tokens beside those needed `soon`."""
        hashes = [] if tracked.is_scored else list(self._full_block_hashes(tracked))
        found = self.pool.find(hashes)
        missing = self.pool.needed(len(tracked.token_ids)) - len(found)
        if missing + self.pool.idle(found) + soon > self.pool.free:
            return False
        self.pool.share(found)
        tracked.blocks = found + [self.pool.take() for _ in range(missing)]
        tracked.hashes = hashes[: len(found)]
        tracked.epoch = self.pool.epoch
        tracked.computed = len(found) * self.pool.block_size
        if not tracked.logprobs:
            tracked.cached_tokens = tracked.computed
        self.running.append(self.waiting.popleft())
        return True

    def _needs_block_soon(self, tracked: Tracked) -> bool:
        """True if a running sequence will need another block within SOON tokens."""
        return self.pool.needed(min(len(tracked.token_ids) + SOON, tracked.limit)) > len(tracked.blocks)

    def _full_block_hashes(self, tracked: Tracked) -> Iterator[bytes]:
        """Hashes of full blocks to look up in the cache; the last token is always computed, for its logits."""
        size, block_hash = self.pool.block_size, self._root_of(tracked.request.adapter)
        for end in range(size, len(tracked.token_ids), size):
            block_hash = tracked.block_hash(block_hash, end - size, end)
            yield block_hash

    def _announce(self, chunk: Chunk) -> None:
        """Make the blocks that this chunk fills findable at once: each layer writes all keys before reading any."""
        tracked, size = chunk.tracked, self.pool.block_size
        if tracked.epoch != self.pool.epoch:
            return
        for index in range(len(tracked.hashes), chunk.end // size):
            before = tracked.hashes[-1] if tracked.hashes else self._root_of(tracked.request.adapter)
            block_hash = tracked.block_hash(before, index * size, (index + 1) * size)
            tracked.hashes.append(block_hash)
            self.pool.announce(tracked.blocks[index], block_hash)

    def _preempt_last(self) -> Tracked:
        tracked = self.running.pop()
        self._take_blocks_from(tracked)
        tracked.computed = 0
        tracked.prompt_logprobs.clear()
        self.waiting.appendleft(tracked)
        return tracked

    def _take_blocks_from(self, tracked: Tracked) -> None:
        self.pool.release(tracked.blocks)
        tracked.blocks, tracked.hashes, tracked.gathered = [], [], None
