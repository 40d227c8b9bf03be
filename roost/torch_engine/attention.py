"""Attention over the paged KV cache: a Triton kernel on CUDA, and torch's own attention elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from roost.torch_engine.scheduler import Batch, Gathered, Ints, LayerCache, LayerShape, new_cache

PAGED_BLOCK = 64  # the paged kernel needs blocks of a multiple of this
# Keys per program when single tokens are computed. Fixed, so that results do not depend on the rest of the batch.
SPLIT = 1024
log = logging.getLogger(__name__)


class Paged:
    """Attention by the Triton kernel, which reads keys and values from their blocks."""

    def __init__(self, cache: Sequence[LayerCache], tables: Tables, batch: Batch | None = None) -> None:
        from roost.torch_engine import paged_attention

        self._kernel = paged_attention
        self._cache = cache
        self._tables = tables
        device = tables.lengths.device
        if batch is None:  # one token of each sequence
            self._singles: Tiles | None = Tiles.singles(torch.arange(len(tables.lengths), device=device).int())
            self._owners = self._sizes = np.zeros(0, np.int64)
        else:
            sizes = np.diff(batch.starts)
            owners = torch.from_numpy(np.flatnonzero(sizes == 1).astype(np.int32)).to(device)
            self._singles = Tiles.singles(owners) if len(owners) else None
            self._owners = np.flatnonzero(sizes > 1)
            self._sizes = sizes[self._owners]
        self._prompts: dict[int, Tiles] = {}  # by tokens per tile

    def __call__(self, call: LayerCall) -> Tensor:
        blocks = store_keys_values(call, self._cache, self._tables.slots)
        output = call.query.new_empty((*call.query.shape[:2], call.value.shape[2]))
        if len(self._owners):
            tokens = self._kernel.tile_tokens(call.query.shape[1] // call.key.shape[1])
            if tokens not in self._prompts:
                self._prompts[tokens] = Tiles.of(self._owners, self._sizes, tokens, output.device)
            self._kernel.attend_prompts(call, blocks, self._tables, self._prompts[tokens], output)
        if self._singles is not None:
            self._kernel.attend_singles(call, blocks, self._tables, self._singles, output)
        return output


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of queries: the sequence of each, and the first token of the sequence's chunk that it covers."""

    owners: Tensor
    firsts: Tensor

    @classmethod
    def singles(cls, owners: Tensor) -> Tiles:
        """One token of each sequence."""
        return cls(owners, torch.zeros_like(owners))

    @classmethod
    def of(cls, owners: Ints, sizes: Ints, tokens: int, device: torch.device) -> Tiles:
        """Chunks of these sizes, in tiles of `tokens` tokens."""
        counts = -(-sizes // tokens)
        firsts = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        arrays = np.repeat(owners, counts), firsts * tokens
        return cls(*(torch.from_numpy(each.astype(np.int32)).to(device) for each in arrays))


def split_bytes(layers: Sequence[LayerShape], queries: int, sequences: int, context: int) -> int:
    """Memory of a decode step for partial results of contexts longer than SPLIT."""
    parts = -(-context // SPLIT)
    widest = max(1 << (layer.value_size - 1).bit_length() for layer in layers)
    return sequences * queries * parts * (widest + 2) * 4 if parts > 1 else 0


def can_page(
    layers: Sequence[LayerShape], queries: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if the Triton kernel compiles on the device and gives correct results."""
    if device.type != "cuda" or block_size % PAGED_BLOCK:
        return False
    try:
        is_right = _agrees(layers[0], queries, block_size, dtype, device)
    except Exception as error:  # Triton is missing, or its compiler fails in one of many ways
        log.warning("the paged attention kernel fails here (%s); keys are gathered instead, which is slow", error)
        return False
    if not is_right:
        log.warning("the paged attention kernel gives wrong results here; keys are gathered instead, which is slow")
    return is_right


@torch.inference_mode()
def _agrees(layer: LayerShape, queries: int, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernel matches `BySequence` on a chunk of a prompt, and on single tokens of all lengths."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    lengths, sizes = np.array([block_size + 5, 3, SPLIT + 5], np.int32), np.array([7, 1, 1])
    counts = -(-lengths // block_size)
    cache = new_cache([layer], int(counts.sum()), block_size, dtype, device)
    for blocks in cache[0]:
        blocks.copy_(random(*blocks.shape))
    tables = np.zeros((len(lengths), int(counts.max())), np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = np.arange(counts.sum())[::-1]
    owners = np.repeat(np.arange(len(lengths)), sizes)
    starts = np.append(0, sizes.cumsum()).astype(np.int32)
    positions = np.arange(starts[-1]) - starts[owners] + (lengths - sizes)[owners]
    batch = Batch(
        token_ids=np.zeros(len(owners), np.int64),
        positions=positions,
        slots=tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        starts=starts,
        lengths=lengths,
        tables=tables,
        rows=np.arange(len(owners)),
    )
    key, value = random(len(owners), layer.heads, layer.key_size), random(len(owners), layer.heads, layer.value_size)
    call = LayerCall(0, random(len(owners), queries, layer.key_size), key, value, None, {})
    paged = Paged(cache, Tables.of(batch, device), batch)(call)
    return torch.allclose(paged, BySequence(cache, batch, [None] * len(lengths))(call), atol=0.03, rtol=0.03)


NAME = "roost_paged"
ARGUMENT = "roost_attention"  # models pass unknown arguments on to their attention


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of one layer's attention; the tensors are [tokens, heads, head size]."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    options: Mapping[str, Any]


class Attention(Protocol):
    """The attention of one batch, in all layers."""

    def __call__(self, call: LayerCall) -> Tensor:
        """Write the new keys and values to the cache, and return the output for each query."""
        ...


def register(is_compiled: bool = False) -> None:
    """Register with transformers, without a mask function, so that no mask is built."""
    # Excluded from compiled layers, because its tables have other shapes in every step. Only then, because
    # `torch.compiler.disable` loads the whole compiler.
    AttentionInterface.register(NAME, torch.compiler.disable(_attend) if is_compiled else _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    attention: Attention | None = options.pop(ARGUMENT, None)
    if attention is None:
        raise ValueError(f"the model does not pass its keyword arguments on to {type(module).__name__}")
    layer: Any = module.layer_idx
    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    return attention(LayerCall(layer, query, key, value, scaling, options)).unsqueeze(0), None


def store_keys_values(call: LayerCall, cache: Sequence[LayerCache], slots: Tensor) -> LayerCache:
    """Write the new keys and values to their slots, and return the layer's cache."""
    keys, values = cache[call.layer]
    keys.flatten(0, 1).index_copy_(0, slots, call.key)
    values.flatten(0, 1).index_copy_(0, slots, call.value)
    return keys, values


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part in a batch."""

    start: int
    end: int
    length: int  # of the sequence
    table: Tensor
    mask: Tensor | None  # for a chunk of a prompt that is not the first
    gathered: Gathered | None

    def keys_and_values(self, call: LayerCall, blocks: LayerCache) -> LayerCache:
        """Keys and values of the whole sequence, each [1, heads, tokens, head size]."""
        if self.gathered is not None:
            return self.gathered.with_token(call.layer, call.key[self.start], call.value[self.start])
        keys, values = (each.index_select(0, self.table).flatten(0, 1)[: self.length] for each in blocks)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


SHORT = 64  # tokens up to which padding costs less than a call per sequence


class BySequence:
    """Attention for a CPU: short sequences together, long ones one at a time.

    A long sequence alone needs no padding, and its gathered keys and values are still in the CPU cache when they are
    used. For short ones, calls cost more than tokens: whole prompts of the same length are computed together, and
    single tokens over blocks padded to one length.
    """

    def __init__(self, cache: Sequence[LayerCache], batch: Batch, gathered: Sequence[Gathered | None]) -> None:
        self._cache = cache
        device, block_size = cache[0][0].device, cache[0][0].shape[1]
        self._slots = torch.from_numpy(batch.slots).to(device)
        starts, sizes = batch.starts[:-1].astype(np.int64), np.diff(batch.starts)
        is_short = batch.lengths <= SHORT
        whole, single = is_short & (sizes == batch.lengths) & (sizes > 1), is_short & (sizes == 1)
        self._prompts = [
            torch.from_numpy(starts[whole & (sizes == size)][:, None] + np.arange(size)).to(device)
            for size in np.unique(sizes[whole]).tolist()
        ]
        self._singles = torch.from_numpy(starts[single]).to(device)
        self._padded: Padded | None = None
        if single.any():
            # Always of the same width: results must not depend on the other sequences of a batch.
            tables = np.zeros((int(single.sum()), -(-SHORT // block_size)), batch.tables.dtype)
            known = batch.tables[single, : tables.shape[1]]
            tables[:, : known.shape[1]] = known
            lengths = torch.from_numpy(batch.lengths[single]).to(device)
            self._padded = Padded(torch.from_numpy(tables).to(device), lengths, block_size)
        self._spans = _spans(cache, batch, gathered, np.flatnonzero(~(whole | single)).tolist())

    def __call__(self, call: LayerCall) -> Tensor:
        blocks = store_keys_values(call, self._cache, self._slots)
        groups = call.query.unflatten(1, (call.key.shape[1], -1))  # [tokens, heads, queries per key, head size]
        output = call.query.new_empty((*groups.shape[:3], call.value.shape[2]))
        for rows in self._prompts:
            output[rows] = _prompt_attention(groups[rows], call.key[rows], call.value[rows], call.scale)
        if self._padded is not None:
            output[self._singles] = self._padded.attend(groups[self._singles], blocks, call.scale)
        for span in self._spans:
            queries = groups[span.start : span.end]
            keys, values = span.keys_and_values(call, blocks)
            if len(queries) == 1:
                # Queries that share a key are the rows of one small attention, so keys are not repeated.
                attended = F.scaled_dot_product_attention(queries, keys, values, scale=call.scale)
            else:
                attended = _chunk_attention(queries, keys[0], values[0], span.mask, call.scale)
            output[span.start : span.end] = attended
        return output.flatten(1, 2)


def _prompt_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """Causal attention of whole prompts of one length.

    `queries` is [prompts, tokens, heads, queries per key, head size], keys and values [prompts, tokens, heads, size].
    """
    per_head = queries.permute(0, 2, 3, 1, 4).flatten(1, 2)
    repeats = queries.shape[3]
    keys, values = (each.transpose(1, 2).repeat_interleave(repeats, dim=1) for each in (keys, values))
    output = F.scaled_dot_product_attention(per_head, keys, values, is_causal=True, scale=scale)
    attended: Tensor = output.unflatten(1, (-1, repeats)).permute(0, 3, 1, 2, 4)
    return attended


def _chunk_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Causal attention of several tokens of one sequence."""
    per_head = queries.permute(1, 2, 0, 3)
    repeat = (keys.shape[0], per_head.shape[1], keys.shape[1], -1)
    output = F.scaled_dot_product_attention(
        per_head,
        keys[:, None].expand(repeat),
        values[:, None].expand(repeat),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3)


def _spans(
    cache: Sequence[LayerCache], batch: Batch, gathered: Sequence[Gathered | None], rows: Iterable[int]
) -> list[Span]:
    device, block_size = cache[0][0].device, cache[0][0].shape[1]
    tables = torch.from_numpy(batch.tables).to(device, torch.int64)
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    spans = []
    for row in rows:
        length, held = lengths[row], gathered[row]
        start, end = starts[row], starts[row + 1]
        table = tables[row, : -(-length // block_size)]
        if held is not None:
            held.catch_up(cache, table, length - 1)
        mask = None
        if 1 < end - start < length:
            seen = torch.ones(end - start, length, dtype=torch.bool, device=device)
            mask = seen.tril(diagonal=length - (end - start))
        spans.append(Span(start, end, length, table, mask, held))
    return spans


@dataclass(frozen=True, slots=True)
class Tables:
    """Slots, lengths and block tables of a batch on the device, with shapes fixed by its size, as CUDA graphs need."""

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Tables:
        arrays = (batch.slots, batch.starts, batch.lengths, batch.tables)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


class Padded:
    """Attention of single tokens over the blocks of their sequences, padded to one length."""

    def __init__(self, tables: Tensor, lengths: Tensor, block_size: int) -> None:
        self._tables = tables
        places = torch.arange(tables.shape[1] * block_size, device=lengths.device)
        self._mask = (places < lengths[:, None])[:, None, None, :]

    def attend(self, queries: Tensor, blocks: LayerCache, scale: float | None) -> Tensor:
        """Output for queries of [tokens, heads, queries per key, head size]; its last size is that of values."""
        keys, values = (each[self._tables].flatten(1, 2).transpose(1, 2) for each in blocks)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask, scale=scale)


class DecodeTogether:
    """Single tokens batched, longer chunks one by one, for a GPU on which the paged kernel does not compile.

    There, kernel launches per sequence cost far more than padding.
    """

    def __init__(self, cache: Sequence[LayerCache], batch: Batch) -> None:
        self._cache = cache
        device, block_size = cache[0][0].device, cache[0][0].shape[1]
        self._slots = torch.from_numpy(batch.slots).to(device)
        spans = _spans(cache, batch, [None] * len(batch.lengths), range(len(batch.lengths)))
        self._chunks = [span for span in spans if span.end - span.start > 1]
        singles = [row for row, span in enumerate(spans) if span.end - span.start == 1]
        self._rows = torch.tensor([spans[row].start for row in singles], device=device, dtype=torch.int64)
        lengths = batch.lengths[singles]
        width = -(-int(lengths.max(initial=0)) // block_size)
        tables = torch.from_numpy(batch.tables[singles, :width]).to(device)
        self._padded = Padded(tables, torch.from_numpy(lengths).to(device), block_size) if singles else None

    def __call__(self, call: LayerCall) -> Tensor:
        blocks = store_keys_values(call, self._cache, self._slots)
        output = call.query.new_empty((*call.query.shape[:2], call.value.shape[2]))
        if self._padded is not None:
            singles = call.query[self._rows].unflatten(1, (call.key.shape[1], -1))
            output[self._rows] = self._padded.attend(singles, blocks, call.scale).flatten(1, 2)
        for span in self._chunks:
            queries = call.query[span.start : span.end].unflatten(1, (call.key.shape[1], -1))
            keys, values = span.keys_and_values(call, blocks)
            output[span.start : span.end] = _chunk_attention(
                queries, keys[0], values[0], span.mask, call.scale
            ).flatten(1, 2)
        return output
