"""The chunks of a step as flat arrays: the model's inputs and the KV cache slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from roost.torch_engine.scheduler import Chunk

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
    """
    >>> from roost.engines.protocol import Sampling
    >>> from roost.torch_engine.scheduler import Request, Tracked
    >>> tracked = Tracked(Request("a", (7, 8, 9), Sampling()), print, seed=0, stop_ids=frozenset(), limit=4)
    >>> tracked.blocks = [5, 3]
    >>> batch = flatten([Chunk(tracked, 1, 3)], block_size=2)
    >>> batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), batch.rows.tolist()
    ([8, 9], [1, 2], [11, 6], [1])
    """
    sizes = np.fromiter((chunk.size for chunk in chunks), np.int64, len(chunks))
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(sizes, out=starts[1:])
    first = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    owner = np.repeat(np.arange(len(chunks)), sizes)
    positions = np.arange(starts[-1]) - starts[owner] + first[owner]
    tables = _tables(chunks, block_size)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    token_ids = np.fromiter((token for chunk in chunks for token in chunk.token_ids), np.int64, int(starts[-1]))
    lengths = np.fromiter((chunk.end for chunk in chunks), np.int32, len(chunks))
    return Batch(token_ids, positions, slots, starts, lengths, tables, _rows(chunks, starts))


def _tables(chunks: Sequence[Chunk], block_size: int) -> Ints:
    used = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(used)), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, used, strict=True)):
        tables[row, :count] = chunk.tracked.blocks[:count]
    return tables


def _rows(chunks: Sequence[Chunk], starts: Ints) -> Ints:
    rows: list[int] = []
    for chunk, end in zip(chunks, starts[1:].tolist(), strict=True):
        if chunk.scored_rows:
            rows.extend(range(end - chunk.size, end))
        elif chunk.makes_token:
            rows.append(end - 1)
    return np.array(rows, np.int64)
