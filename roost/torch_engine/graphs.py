"""Decode steps captured as CUDA graphs, so that the many small kernels of a step need one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roost.torch_engine.attention import SPLIT, Paged, Tables
from roost.torch_engine.cache import LayerCache
from roost.torch_engine.model import LoadedModel, forward
from roost.torch_engine.scheduler import Batch
from roost.torch_engine.settings import EngineSettings

LEAST_STEP = 8


def bucket(count: int, limit: int) -> int:
    """Return the batch size that `count` sequences are padded to: by an eighth at most from 64 on.

    At least two, if there is room: layers are compiled once more for a batch of one.

    >>> [bucket(count, limit=300) for count in (1, 3, 5, 9, 65, 250, 299)]
    [2, 4, 8, 16, 72, 256, 300]
    """
    power = 1 << max(1, (count - 1).bit_length())
    step = max(LEAST_STEP, power // 16)
    return min(power if power <= LEAST_STEP else -(-count // step) * step, limit)


def table_width(blocks: int, block_size: int, limit: int) -> int:
    """Return the number of blocks that tables are padded to; the kernel starts a program for each part of a table.

    >>> [table_width(blocks, block_size=64, limit=100) for blocks in (1, 16, 17, 65)]
    [16, 16, 64, 100]
    """
    width = max(1, SPLIT // block_size)
    while width < blocks:
        width *= 4
    return min(width, limit)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step at fixed addresses. Two copies fill them, as a copy costs more than its bytes."""

    longs: Tensor  # token ids, positions and slots
    ints: Tensor  # lengths and tables
    token_ids: Tensor
    positions: Tensor
    tables: Tables

    @classmethod
    def empty(cls, sequences: int, width: int, device: torch.device) -> DecodeInputs:
        """Inputs for up to this many sequences and blocks of each."""
        longs = torch.zeros(3 * sequences, dtype=torch.int64, device=device)
        ints = torch.zeros(sequences * (1 + width), dtype=torch.int32, device=device)
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        return cls._of(longs, ints, starts, sequences)

    @classmethod
    def _of(cls, longs: Tensor, ints: Tensor, starts: Tensor, sequences: int) -> DecodeInputs:
        token_ids, positions, slots = longs.view(3, sequences)
        tables = Tables(slots, starts, ints[:sequences], ints[sequences:].view(sequences, -1))
        return cls(longs, ints, token_ids, positions, tables)

    def part(self, sequences: int, width: int) -> DecodeInputs:
        """Inputs in the same memory for this many sequences and blocks of each."""
        longs, ints = self.longs[: 3 * sequences], self.ints[: sequences * (1 + width)]
        return self._of(longs, ints, self.tables.starts[: sequences + 1], sequences)

    def fill(self, batch: Batch, scrap: int, block_size: int) -> None:
        """Write a batch of single tokens; padding rows read and write the scrap block."""
        count, blocks = batch.tables.shape
        sequences, width = self.tables.tables.shape
        longs = np.zeros((3, sequences), np.int64)
        longs[2, count:] = scrap * block_size
        longs[:, :count] = batch.token_ids, batch.positions, batch.slots
        ints = np.full(len(self.ints), scrap, np.int32)
        ints[:count], ints[count:sequences] = batch.lengths, 1
        ints[sequences:].reshape(sequences, width)[:count, :blocks] = batch.tables
        self.longs.copy_(torch.from_numpy(longs.ravel()), non_blocking=True)
        self.ints.copy_(torch.from_numpy(ints), non_blocking=True)


def decode(model: LoadedModel, inputs: DecodeInputs, cache: Sequence[LayerCache]) -> tuple[Tensor, Tensor | None]:
    """Logits after one token of each sequence, and its experts; shapes depend on the inputs' shapes alone."""
    rows = torch.arange(len(inputs.token_ids), device=inputs.token_ids.device)
    logits = forward(model.module, inputs.token_ids, inputs.positions, rows, Paged(cache, inputs.tables))
    return logits, None if model.routers is None else model.routers.chosen()


def new_graphs(model: LoadedModel, settings: EngineSettings, pages: bool, width: int) -> DecodeGraphs | None:
    """Graphs for this model, or None if unsupported; `width` is the maximum of blocks per sequence."""
    config = model.module.config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # These check the longest position on the host in every step, which a graph cannot.
    is_fixed = scaling.get("rope_type") not in ("dynamic", "longrope")
    if not settings.cuda_graphs or not pages or not is_fixed:
        return None
    return DecodeGraphs(model, settings.limits(on_cuda=True).sequences, width, model.device)


Captured: TypeAlias = tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]  # with logits and experts
Shape: TypeAlias = tuple[int, int]  # sequences, and blocks of each


class DecodeGraphs:
    """Graphs by batch size, table width and adapter, captured when they are first needed."""

    def __init__(self, model: LoadedModel, sequences: int, width: int, device: torch.device) -> None:
        self._model = model
        self._sequences = sequences
        self._width = width
        self._inputs = DecodeInputs.empty(sequences, width, device)
        self._parts: dict[Shape, DecodeInputs] = {}
        self._captured: dict[tuple[Shape, str | None], Captured] = {}
        self._memory: Any = None

    def run(self, batch: Batch, cache: Sequence[LayerCache], adapter: str | None) -> tuple[Tensor, Tensor | None]:
        """Logits, and experts, of a batch of single tokens whose sequences use the same adapter."""
        blocks, block_size = cache[0][0].shape[:2]
        count = len(batch.token_ids)
        shape = bucket(count, self._sequences), table_width(batch.tables.shape[1], block_size, self._width)
        if shape not in self._parts:
            self._parts[shape] = self._inputs.part(*shape)
        inputs = self._parts[shape]
        inputs.fill(batch, scrap=blocks - 1, block_size=block_size)
        if (shape, adapter) not in self._captured:
            self._captured[shape, adapter] = self._capture(inputs, cache)
        graph, logits, experts = self._captured[shape, adapter]
        graph.replay()
        return logits[:count], None if experts is None else experts[:count]

    def drop(self) -> None:
        """Drop all graphs and their memory, because the addresses they refer to become invalid."""
        self._captured.clear()
        self._memory = None

    def _capture(self, inputs: DecodeInputs, cache: Sequence[LayerCache]) -> Captured:
        # Warm-up: libraries initialize in the first run, which must not be captured.
        decode(self._model, inputs, cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, which would break the capture in the default mode.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits, experts = decode(self._model, inputs, cache)
        self._memory = self._memory or graph.pool()
        return graph, logits, experts
