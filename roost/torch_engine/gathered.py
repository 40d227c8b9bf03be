"""Keys and values of a running sequence in one piece, for CPUs, where gathering its blocks in every step costs much."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roost.torch_engine.cache import LayerCache

GRAIN = 256  # tokens by which there is more room than needed, so that growing is rare


class Gathered:
    """A copy beside the blocks: made once, then added to token by token. The blocks stay what others can share."""

    def __init__(self) -> None:
        self.length = 0  # tokens that are in it
        self._layers: list[LayerCache] = []  # each [1, heads, room, head size]

    def catch_up(self, cache: Sequence[LayerCache], table: Tensor, length: int) -> None:
        """Hold what the blocks hold, up to `length`, with room for at least one more token."""
        if self.length != length:
            self._layers = [(_copied(keys, table, length), _copied(values, table, length)) for keys, values in cache]
        elif length == self._layers[0][0].shape[2]:
            self._layers = [(_with_room(keys), _with_room(values)) for keys, values in self._layers]
        self.length = length + 1

    def with_token(self, layer: int, key: Tensor, value: Tensor) -> LayerCache:
        """A layer's keys and values with those of the token that this step adds."""
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
