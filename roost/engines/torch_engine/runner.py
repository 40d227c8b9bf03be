"""One step of the model: chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roost.engines.torch_engine.adapters import Adapters
from roost.engines.torch_engine.attention import ARGUMENT, Attention, Flash, OneByOne, Tables, can_flash
from roost.engines.torch_engine.batch import Batch, flatten
from roost.engines.torch_engine.cache import LayerCache
from roost.engines.torch_engine.model import LoadedModel
from roost.engines.torch_engine.sequence import Chunk


class Runner:
    """Runs batches of chunks over a key-value cache."""

    def __init__(self, model: LoadedModel, adapters: Adapters, block_size: int) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._flashes = can_flash(model.device, model.dtype)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], cache: Sequence[LayerCache]) -> Tensor:
        """The logits of the rows that need them, in the order of the chunks."""
        batch = flatten(chunks, self._block_size)
        device = self._model.device
        names = [chunk.tracked.request.adapter for chunk in chunks]
        self._adapters.select(names, [chunk.size for chunk in chunks], device)
        return forward(
            self._model.module,
            torch.from_numpy(batch.token_ids).to(device),
            torch.from_numpy(batch.positions).to(device),
            torch.from_numpy(batch.rows).to(device),
            self._attention(batch, cache),
        )

    def drop_graphs(self) -> None:
        """Give up what was captured, since it refers to memory that changes."""

    def _attention(self, batch: Batch, cache: Sequence[LayerCache]) -> Attention:
        if not self._flashes:
            return OneByOne(cache, batch, self._model.device)
        tables = Tables.of(batch, self._model.device)
        return Flash(cache, tables, int((batch.starts[1:] - batch.starts[:-1]).max()), int(batch.lengths.max()))


def forward(module: Any, token_ids: Tensor, positions: Tensor, rows: Tensor, attention: Attention) -> Tensor:
    """The logits of some rows of a flat batch."""
    output = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=rows,
        **{ARGUMENT: attention},
    )
    logits: Tensor = output.logits
    return logits[0]
