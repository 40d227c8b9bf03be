"""The learner's weights on their way out: whatever becomes of the sending, every rank goes through all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from roost.engines.weights.source import ModuleSource


class WeightStream(ModuleSource):
    """Shards are gathered by all ranks together. One that stopped half way would leave the others waiting for it."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__(module, dtype)
        self._streaming: Iterator[torch.Tensor] | None = None

    def stream(self) -> Iterator[torch.Tensor]:
        self._streaming = super().stream()
        return self._streaming

    def finish(self) -> None:
        """Go through what nobody took."""
        for _ in self._streaming if self._streaming is not None else self.stream():
            pass
