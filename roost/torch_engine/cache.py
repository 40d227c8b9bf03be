"""The keys and values of all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

LayerCache: TypeAlias = tuple[Tensor, Tensor]  # keys and values, each [blocks, block size, heads, head size]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token."""

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
    """Room for so many blocks, and one more: rows that only fill up a captured batch write there."""

    def room(heads: int, size: int) -> Tensor:
        # Zeros: what a padded row reads is masked, but not-a-number times zero would still be not-a-number.
        return torch.zeros(blocks + 1, block_size, heads, size, dtype=dtype, device=device)

    return [(room(layer.heads, layer.key_size), room(layer.heads, layer.value_size)) for layer in layers]
