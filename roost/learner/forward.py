"""Forward pass of a packed batch to log-probs or values of predicted tokens, without holding all logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from roost.learner.attention import ARGUMENT, Segments
from roost.learner.packing import Packed


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A packed batch on the device."""

    token_ids: Tensor
    positions: Tensor
    segments: Segments
    rows: Tensor
    targets: Tensor

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> Rows:
        arrays = (packed.token_ids, packed.positions, packed.rows, packed.targets)
        token_ids, positions, rows, targets = (torch.from_numpy(array).to(device) for array in arrays)
        return cls(token_ids, positions, Segments.of(packed.borders, device), rows, targets)


class Outputs(nn.Module):
    """A transformers model whose forward returns outputs for the rows of a batch.

    It is the root module for FSDP, because sharded weights are gathered by hooks of called modules, and here the body
    and the last layer are called directly, not by the model.
    """

    def __init__(self, model: PreTrainedModel, body: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        # In a tuple, so that they are not registered again: the model already contains them.
        self._parts = (body, last)

    def hidden(self, batch: Rows) -> Tensor:
        """Final hidden state of each row."""
        body: Any = self._parts[0]
        output = body(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            **{ARGUMENT: batch.segments},
        )
        states: Tensor = output.last_hidden_state
        return states[0].index_select(0, batch.rows)


class PolicyOutputs(Outputs):
    """Log-probs of the targets at a temperature, and the entropy of their distribution."""

    def __init__(
        self,
        model: PreTrainedModel,
        body: nn.Module,
        last: nn.Module,
        *,
        chunk: int,
        temperature: float,
        learns_entropy: bool,
    ) -> None:
        super().__init__(model, body, last)
        self._chunk = chunk
        self._temperature = temperature
        self._learns_entropy = learns_entropy

    def forward(self, batch: Rows) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(batch)
        # Run even without rows, so that every weight gets a gradient on every rank.
        chunks = zip(hidden.split(self._chunk), batch.targets.split(self._chunk), strict=True)
        parts = [checkpoint(self._of_chunk, *each, use_reentrant=False) for each in chunks]
        logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        return logprobs, entropy

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Context with a temperature other than the sampling temperature."""
        usual, self._temperature = self._temperature, temperature
        try:
            yield
        finally:
            self._temperature = usual

    def _of_chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._parts[1](hidden).float() / self._temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        with torch.set_grad_enabled(self._learns_entropy and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


class ValueOutputs(Outputs):
    """Value before each target."""

    def forward(self, batch: Rows) -> tuple[Tensor]:
        values: Tensor = self._parts[1](self.hidden(batch))
        return (values.float().squeeze(-1),)
