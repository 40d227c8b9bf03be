"""One step of the model: chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roost.torch_engine.adapters import Adapters
from roost.torch_engine.attention import Attention, DecodeTogether, OneByOne, Tables
from roost.torch_engine.batch import Batch, flatten
from roost.torch_engine.cache import LayerCache
from roost.torch_engine.flash import Flash
from roost.torch_engine.gathered import Gathered
from roost.torch_engine.graphs import DecodeGraphs
from roost.torch_engine.model import LoadedModel, forward
from roost.torch_engine.sequence import Chunk


class Runner:
    """Runs batches of chunks over a key-value cache."""

    def __init__(
        self,
        model: LoadedModel,
        adapters: Adapters,
        block_size: int,
        flashes: bool = False,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._block_size = block_size
        self._flashes = flashes
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], cache: Sequence[LayerCache]) -> Tensor:
        """The logits of the rows that need them, in the order of the chunks."""
        batch, device = flatten(chunks, self._block_size), self._model.device
        adapters = [chunk.tracked.request.adapter for chunk in chunks]
        self._adapters.select(adapters, [chunk.size for chunk in chunks], device)
        is_decode = len(batch.token_ids) == len(chunks) == len(batch.rows)
        if self._graphs is not None and is_decode and len(set(adapters)) == 1:
            return self._graphs.run(batch, cache, adapters[0])
        logits = forward(
            self._model.module,
            torch.from_numpy(batch.token_ids).to(device),
            torch.from_numpy(batch.positions).to(device),
            torch.from_numpy(batch.rows).to(device),
            self._attention(chunks, batch, cache),
        )
        if device.type == "cpu":
            _prepare_decode(chunks)
        return logits

    def drop_graphs(self) -> None:
        """Give up what was captured, before memory that it refers to goes away."""
        if self._graphs is not None:
            self._graphs.drop()

    def _attention(self, chunks: Sequence[Chunk], batch: Batch, cache: Sequence[LayerCache]) -> Attention:
        if self._model.device.type == "cpu":
            return OneByOne(cache, batch, [chunk.tracked.gathered for chunk in chunks])
        if not self._flashes:
            return DecodeTogether(cache, batch)
        longest_chunk = int((batch.starts[1:] - batch.starts[:-1]).max())
        return Flash(cache, Tables.of(batch, self._model.device), longest_chunk, int(batch.lengths.max()))


def _prepare_decode(chunks: Sequence[Chunk]) -> None:
    """What is one token a step from now on is gathered from the next step on: by then all its blocks are filled."""
    for chunk in chunks:
        if chunk.makes_token and chunk.tracked.gathered is None:
            chunk.tracked.gathered = Gathered()
