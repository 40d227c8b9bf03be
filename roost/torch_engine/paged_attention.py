"""Triton kernel for attention over the paged KV cache, of prompt chunks and of single tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.torch_engine.attention import PAGED_BLOCK, SPLIT, LayerCall, Tables, Tiles
from roost.torch_engine.scheduler import LayerCache

TILE = PAGED_BLOCK  # keys per iteration, all of one block
PROMPT_ROWS, DECODE_ROWS = 64, 16  # rows of a query tile: tokens times the queries that share a key


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    tables,
    starts,
    lengths,
    owners,
    firsts,
    output,
    partial,
    stats,
    scale,
    table_width,
    parts,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One tile of queries that share a key head, over all their keys or, if SPLIT, one part of them."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    owner, first = tl.load(owners + tile), tl.load(firsts + tile)
    start, length = tl.load(starts + owner), tl.load(lengths + owner)
    size = tl.load(starts + owner + 1) - start
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    is_row = (row < (ROWS // GROUP) * GROUP) & (token < size)
    position = length - size + token
    begin = 0
    end = tl.minimum(length, length - size + first + ROWS // GROUP)
    if SPLIT > 0:
        begin = part * SPLIT
        end = tl.minimum(end, begin + SPLIT)
        if begin >= end:
            return
    key_lane, value_lane = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    heads = HEADS * GROUP
    query_row = (start + token).to(tl.int64) * heads + head * GROUP + row % GROUP
    is_query = is_row[:, None] & (key_lane < KEY_SIZE)[None, :]
    queries = tl.load(query + query_row[:, None] * KEY_SIZE + key_lane[None, :], mask=is_query, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    column = tl.arange(0, TILE)
    for at in range(begin, end, TILE):
        block = tl.load(tables + owner * table_width + at // BLOCK).to(tl.int64)
        slot = (block * BLOCK + at % BLOCK + column) * HEADS + head
        is_key = at + column < end
        key = tl.load(
            keys + slot[:, None] * KEY_SIZE + key_lane[None, :],
            mask=is_key[:, None] & (key_lane < KEY_SIZE)[None, :],
            other=0.0,
        )
        value = tl.load(
            values + slot[:, None] * VALUE_SIZE + value_lane[None, :],
            mask=is_key[:, None] & (value_lane < VALUE_SIZE)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        is_seen = (at + column)[None, :] <= position[:, None]
        # Padding rows see every key, so that no row is without one.
        scores = tl.where((is_seen | ~is_row[:, None]) & is_key[None, :], scores, float("-inf"))
        # A row may see no key of this tile, but then it saw one of an earlier tile.
        maximum = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - maximum[:, None])
        decay = tl.exp(largest - maximum)
        total = total * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = maximum
    is_value = is_row[:, None] & (value_lane < VALUE_SIZE)[None, :]
    if SPLIT > 0:
        place = ((tile.to(tl.int64) * HEADS + head) * parts + part) * GROUP + row
        is_single = row < GROUP
        tl.store(stats + place * 2, largest, mask=is_single)
        tl.store(stats + place * 2 + 1, total, mask=is_single)
        tl.store(partial + place[:, None] * VALUE_PAD + value_lane[None, :], sums, mask=is_single[:, None])
    else:
        result = (sums / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + query_row[:, None] * VALUE_SIZE + value_lane[None, :], result, mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial,
    stats,
    starts,
    lengths,
    owners,
    output,
    parts,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the parts of a single token's attention."""
    tile, head = tl.program_id(0), tl.program_id(1)
    owner = tl.load(owners + tile)
    start, length = tl.load(starts + owner), tl.load(lengths + owner)
    row, value_lane = tl.arange(0, ROWS), tl.arange(0, VALUE_PAD)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    is_single = row < GROUP
    for part in range(tl.cdiv(length, SPLIT)):
        place = ((tile.to(tl.int64) * HEADS + head) * parts + part) * GROUP + row
        largest_of_part = tl.load(stats + place * 2, mask=is_single, other=0.0)
        maximum = tl.maximum(largest, largest_of_part)
        decay, weight = tl.exp(largest - maximum), tl.exp(largest_of_part - maximum)
        total = total * decay + tl.load(stats + place * 2 + 1, mask=is_single, other=1.0) * weight
        more = tl.load(partial + place[:, None] * VALUE_PAD + value_lane[None, :], mask=is_single[:, None], other=0.0)
        sums = sums * decay[:, None] + more * weight[:, None]
        largest = maximum
    result = (sums / total[:, None]).to(output.dtype.element_ty)
    output_row = start.to(tl.int64) * HEADS * GROUP + head * GROUP + row
    mask = is_single[:, None] & (value_lane < VALUE_SIZE)[None, :]
    tl.store(output + output_row[:, None] * VALUE_SIZE + value_lane[None, :], result, mask=mask)


def tile_tokens(group: int) -> int:
    """Tokens per tile of a prompt's chunk, if `group` queries share a key."""
    return _rows(PROMPT_ROWS, group) // group


def attend_prompts(call: LayerCall, cache: LayerCache, tables: Tables, tiles: Tiles, output: Tensor) -> None:
    """Write the output of the chunks that the tiles cover."""
    _launch(call, cache, tables, tiles, output, PROMPT_ROWS, parts=1)


def attend_singles(call: LayerCall, cache: LayerCache, tables: Tables, tiles: Tiles, output: Tensor) -> None:
    """Write the output of single tokens, with one tile each."""
    room = tables.tables.shape[1] * cache[0].shape[1]
    _launch(call, cache, tables, tiles, output, DECODE_ROWS, parts=-(-room // SPLIT))


def _launch(
    call: LayerCall, cache: LayerCache, tables: Tables, tiles: Tiles, output: Tensor, least_rows: int, parts: int
) -> None:
    keys, values = cache
    query = call.query.contiguous()
    heads, key_size, value_size = keys.shape[2], keys.shape[3], values.shape[3]
    group = query.shape[1] // heads
    rows = _rows(least_rows, group)
    value_pad = max(16, triton.next_power_of_2(value_size))
    partial = stats = output
    if parts > 1:
        partial = query.new_empty((len(tiles.owners), heads, parts, group, value_pad), dtype=torch.float32)
        stats = query.new_empty((len(tiles.owners), heads, parts, group, 2), dtype=torch.float32)
    _attend[len(tiles.owners), heads, parts](
        query,
        keys,
        values,
        tables.tables,
        tables.starts,
        tables.lengths,
        tiles.owners,
        tiles.firsts,
        output,
        partial,
        stats,
        key_size**-0.5 if call.scale is None else call.scale,
        tables.tables.stride(0),
        parts,
        HEADS=heads,
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEY_PAD=max(16, triton.next_power_of_2(key_size)),
        VALUE_PAD=value_pad,
        BLOCK=keys.shape[1],
        ROWS=rows,
        TILE=TILE,
        SPLIT=SPLIT if parts > 1 else 0,
    )
    if parts > 1:
        _combine[len(tiles.owners), heads](
            partial,
            stats,
            tables.starts,
            tables.lengths,
            tiles.owners,
            output,
            parts,
            HEADS=heads,
            GROUP=group,
            VALUE_SIZE=value_size,
            VALUE_PAD=value_pad,
            ROWS=rows,
            SPLIT=SPLIT,
        )


def _rows(least: int, group: int) -> int:
    return max(least, int(triton.next_power_of_2(group)))
