"""Attention on CUDA in half precision: torch's flash attention, which finds a sequence's blocks by itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from roost.torch_engine.attention import LayerCall, OneByOne, Tables, kept
from roost.torch_engine.batch import Batch
from roost.torch_engine.cache import LayerCache, LayerShape, new_cache

FLASH_BLOCK, FLASH_HEAD = 256, 256  # blocks are a multiple of the one, heads no larger than the other
log = logging.getLogger(__name__)


class Flash:
    """All sequences in one call."""

    def __init__(self, cache: Sequence[LayerCache], tables: Tables, longest_chunk: int, longest: int) -> None:
        self._cache = cache
        self._tables = tables
        self._longest_chunk = longest_chunk
        self._longest = longest
        self._key_starts = F.pad(tables.lengths.cumsum(0, dtype=torch.int32), (1, 0))
        # One pass over each sequence: how keys are split depends on the longest of a batch, and results would with it.
        self._options: dict[str, Any] = {"num_splits": 1} if "num_splits" in _parameters() else {}

    def __call__(self, call: LayerCall) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        keys, values = kept(call, self._cache, self._tables.slots)
        output = varlen_attn(
            call.query,
            keys,
            values,
            self._tables.starts,
            self._key_starts,  # keys are found by their blocks, but the kernel insists on them
            self._longest_chunk,
            self._longest,
            scale=call.scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self._tables.lengths,
            block_table=self._tables.tables,
            **self._options,
        )
        return cast(Tensor, output)


def can_flash(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch's flash attention reads such blocks of keys and values here; where it says so, it is tried."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or block_size % FLASH_BLOCK:
        return False
    if any(layer.key_size != layer.value_size or layer.key_size > FLASH_HEAD for layer in layers):
        return False
    if not {"block_table", "seqused_k"} <= _parameters():
        return False
    try:
        is_right = _agrees(layers[0], block_size, dtype, device)
    except (RuntimeError, TypeError) as error:
        log.warning("flash attention over blocks fails here (%s); blocks are gathered instead", error)
        return False
    if not is_right:
        log.warning("flash attention over blocks gives wrong results here; blocks are gathered instead")
    return is_right


@cache
def _parameters() -> frozenset[str]:
    """What this torch's flash attention takes."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@torch.inference_mode()
def _agrees(layer: LayerShape, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a chunk of a long sequence and one token of a short one come out as they do one by one."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    cache = new_cache([layer], 3, block_size, dtype, device)
    for blocks in cache[0]:
        blocks.copy_(random(*blocks.shape))
    length = block_size + 5
    positions = np.arange(length - 7, length)
    tables = np.array([[2, 0], [1, 0]], np.int32)
    slots = tables[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    batch = Batch(
        token_ids=np.zeros(8, np.int64),
        positions=np.append(positions, 2),
        slots=np.append(slots, block_size + 2),
        starts=np.array([0, 7, 8], np.int32),
        lengths=np.array([length, 3], np.int32),
        tables=tables,
        rows=np.arange(8),
    )
    key, value = random(8, layer.heads, layer.key_size), random(8, layer.heads, layer.value_size)
    call = LayerCall(0, random(8, 2 * layer.heads, layer.key_size), key, value, None, {})
    flashed = Flash(cache, Tables.of(batch, device), 7, length)(call)
    return torch.allclose(flashed, OneByOne(cache, batch, [None, None])(call), atol=0.03, rtol=0.03)
