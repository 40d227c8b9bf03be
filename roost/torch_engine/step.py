"""What a step's logits mean for the sequences: the next tokens, and the log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.torch_engine.randomness import uniforms
from roost.torch_engine.sampler import chosen_logprobs, draw
from roost.torch_engine.sequence import Chunk, Tracked


@dataclass(frozen=True, slots=True)
class NewToken:
    """What a sequence goes on with."""

    tracked: Tracked
    token_id: int
    logprob: float


@torch.inference_mode()
def next_tokens(chunks: Sequence[Chunk], logits: Tensor) -> list[NewToken]:
    """Draw a token for every sequence that is computed up to its end; the rows are in the order of the chunks."""
    drawing: list[Tracked] = []
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        if chunk.scored_rows:
            _score(chunk, logits[row : row + chunk.size])
            row += chunk.size
        elif chunk.makes_token:
            row += 1
        if chunk.makes_token:
            drawing.append(chunk.tracked)
            rows.append(row - 1)
    if not drawing:
        return []
    numbers = uniforms([each.seed for each in drawing], [each.made for each in drawing])
    used = logits if len(rows) == len(logits) else logits[rows]
    drawn = draw(used, [each.request.sampling for each in drawing], numbers)
    return [NewToken(*each) for each in zip(drawing, drawn.token_ids, drawn.logprobs, strict=True)]


def _score(chunk: Chunk, logits: Tensor) -> None:
    """Add the log-probabilities of the prompt's tokens that follow those of the chunk."""
    following = chunk.tracked.token_ids[chunk.start + 1 : chunk.end + 1]
    targets = torch.tensor(following, dtype=torch.int64, device=logits.device)
    chunk.tracked.prompt_logprobs += chosen_logprobs(logits[: len(following)], targets).tolist()
