"""A probe: fixed tokens and the log-probabilities that the learner gives them, to be compared with an engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# A text of 32 tokens already tells one set of weights from another; ids stay small, so that every vocabulary has them.
LENGTH = 32
SPREAD = 73
TOLERANCES = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.25, "float16": 0.08}


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids, the log-probability of every one but the first, and how far an engine may be off."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float

    def difference(self, logprobs: Sequence[float]) -> float:
        """The largest distance of an engine's answer.

        >>> Probe((1, 2, 3), (-1.0, -2.0), 0.01).difference([-1.0, -2.5])
        0.5
        """
        if len(logprobs) != len(self.logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities came for a probe of {len(self.logprobs)}")
        return max(abs(one - other) for one, other in zip(logprobs, self.logprobs, strict=True))


def probe_tokens(vocabulary: int, length: int = LENGTH) -> tuple[int, ...]:
    """Fixed tokens, spread over the vocabulary.

    >>> probe_tokens(100, 4)
    (1, 74, 47, 20)
    """
    return tuple((1 + place * SPREAD) % vocabulary for place in range(length))


@torch.no_grad()
def make_probe(model: nn.Module, vocabulary: int, tolerance: float | None = None) -> Probe:
    """Ask a Hugging Face model for the log-probabilities of the fixed tokens, as an engine will be asked."""
    tokens = probe_tokens(vocabulary)
    weight = next(model.parameters())
    ids = torch.tensor([tokens], device=weight.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    limit = TOLERANCES.get(str(weight.dtype).removeprefix("torch."), 0.25) if tolerance is None else tolerance
    return Probe(tokens, tuple(found.tolist()), limit)
