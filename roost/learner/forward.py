"""From a packed batch to what the model says of each predicted token, without ever holding the logits of all."""

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
    """A transformers model whose forward gives what is said of the rows of a batch.

    It is a module, and the root of what is sharded, because sharded weights are gathered by the hooks of modules that
    are called: neither the body of the model nor its last layer is called by the model itself here.
    """

    def __init__(self, model: PreTrainedModel, body: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        # Without being registered: they are in the model already.
        self._parts = (body, last)

    def hidden(self, batch: Rows) -> Tensor:
        """The final hidden state of each row."""
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
    """Log-probabilities of the targets at a temperature, and the entropy of what they were drawn from."""

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
        # Also for no rows at all, so that every weight takes part and gets a gradient on every rank.
        chunks = zip(hidden.split(self._chunk), batch.targets.split(self._chunk), strict=True)
        parts = [checkpoint(self._of_chunk, *each, use_reentrant=False) for each in chunks]
        logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        return logprobs, entropy

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Another temperature than samples are drawn with, for the time of a question."""
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
    """What is to be expected before each target is made."""

    def forward(self, batch: Rows) -> tuple[Tensor]:
        values: Tensor = self._parts[1](self.hidden(batch))
        return (values.float().squeeze(-1),)
