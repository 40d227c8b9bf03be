"""Forward pass of a packed batch to log-probs or values of predicted tokens, without holding all logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from roost.config.teacher import Distillation
from roost.learner.attention import ARGUMENT, Segments
from roost.learner.losses import distillation_losses
from roost.learner.packing import Packed
from roost.learner.sample import Sample


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A packed batch on the device."""

    token_ids: Tensor
    positions: Tensor
    segments: Segments
    rows: Tensor
    targets: Tensor
    teacher_logits: Tensor | None = None  # of each row
    teacher_ids: Tensor | None = None

    @classmethod
    def of(cls, packed: Packed, device: torch.device, samples: Sequence[Sample] = ()) -> Rows:
        """Rows of the packed samples, with the teacher's distribution if `samples` have it."""
        arrays = (packed.token_ids, packed.positions, packed.rows, packed.targets)
        token_ids, positions, rows, targets = (torch.from_numpy(array).to(device) for array in arrays)
        taught = [sample.distribution for sample in samples if sample.distribution is not None]
        logits, ids = (
            [each.logits for each in taught],
            [each.token_ids for each in taught if each.token_ids is not None],
        )
        teacher = [torch.from_numpy(np.concatenate(each)).to(device) if each else None for each in (logits, ids)]
        return cls(token_ids, positions, Segments.of(packed.borders, device), rows, targets, *teacher)


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
    """Log-probs of the targets at a temperature, and the entropy of their distribution.

    For rows with a teacher's distribution, the divergence from it as well.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        body: nn.Module,
        last: nn.Module,
        *,
        chunk: int,
        temperature: float,
        learns_entropy: bool,
        distillation: Distillation | None = None,
        compiles: bool = False,
    ) -> None:
        super().__init__(model, body, last)
        self._of_logits = torch.compile(_of_logits, dynamic=True) if compiles else _of_logits
        self._chunk = chunk
        self._temperature = temperature
        self._learns_entropy = learns_entropy
        self._distillation = distillation or Distillation()
        self._most_likely: tuple[int, int] | None = None  # k, and the size of the vocabulary

    def forward(self, batch: Rows) -> tuple[Tensor, ...]:
        columns = (self.hidden(batch), batch.targets, batch.teacher_logits, batch.teacher_ids)
        of_chunk = self._of_chunk if self._most_likely is None else self._top
        # Run even without rows, so that every weight gets a gradient on every rank.
        chunks = zip(*(repeat(None) if each is None else each.split(self._chunk) for each in columns), strict=False)
        parts = [checkpoint(of_chunk, *each, use_reentrant=False) for each in chunks]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @contextmanager
    def returning_top_logits(self, top_k: int, vocabulary: int) -> Iterator[None]:
        """Context in which the outputs are the `top_k` highest logits and their tokens; 0: all logits alone."""
        self._most_likely = (top_k, vocabulary)
        try:
            yield
        finally:
            self._most_likely = None

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Context with a temperature other than the sampling temperature."""
        usual, self._temperature = self._temperature, temperature
        try:
            yield
        finally:
            self._temperature = usual

    def _top(self, hidden: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
        top_k, vocabulary = self._most_likely or (0, 0)
        logits = self._parts[1](hidden).float()[:, :vocabulary]
        if not top_k:
            return (logits,)
        highest, token_ids = logits.topk(min(top_k, logits.shape[-1]))
        return highest, token_ids.int()

    def _of_chunk(
        self, hidden: Tensor, targets: Tensor, teacher: Tensor | None, teacher_ids: Tensor | None
    ) -> tuple[Tensor, ...]:
        logits = self._parts[1](hidden)
        # Not a view of all targets: compiled code would be compiled again for other sizes of its base.
        outputs = self._of_logits(logits, targets.clone(), self._temperature, self._learns_entropy)
        if teacher is None:
            return outputs
        own = logits[:, : teacher.shape[-1]] if teacher_ids is None else logits.gather(-1, teacher_ids.long())
        return (*outputs, distillation_losses(own.float(), teacher, self._distillation))


def _of_logits(logits: Tensor, targets: Tensor, temperature: float, learns_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and the entropy, which has a gradient only if it is learnt from."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    seen = logprobs if learns_entropy else logprobs.detach()
    entropy = -(seen.exp() * seen).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


class ValueOutputs(Outputs):
    """Value before each target."""

    def forward(self, batch: Rows) -> tuple[Tensor]:
        values: Tensor = self._parts[1](self.hidden(batch))
        return (values.float().squeeze(-1),)
