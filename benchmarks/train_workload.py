"""Workload of both sides of the comparison. Nothing of Roost is imported here: the peer's interpreter reads it, too.

Completions are of mixed length: a model that knows nothing ends after each token with a chance of about one in
`VOCABULARY`, so that lengths have a mean of about a quarter of the limit, and a tenth of them more than half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

VOCABULARY = 32
DIGITS = "0123456789"
END = 15  # the token that ends a completion
LIKED = range(16, 24)  # tokens that earn a reward


@dataclass(frozen=True, slots=True)
class Workload:
    """Settings of a training run, the same on both sides."""

    steps: int  # the first of which only warms up
    prompts: int = 16  # of a step
    group_size: int = 8
    prompt_tokens: int = 48
    max_tokens: int = 128
    learning_rate: float = 1e-5
    seed: int = 0

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * self.group_size


def small(steps: int) -> Workload:
    """Many samples of two tokens: the overhead beside the model's own work dominates."""
    return Workload(steps, prompts=64, prompt_tokens=8, max_tokens=2)


def prompt(workload: Workload, index: int) -> str:
    """One of the prompts, of which there are as many as the steps need; a token is a character.

    >>> len(prompt(Workload(steps=2), 31))
    48
    """
    chance = Random(f"{workload.seed} {index}")
    return "".join(chance.choices(DIGITS, k=workload.prompt_tokens))


def reward(token_ids: Sequence[int]) -> float:
    """Share of liked tokens in a completion; its end does not count, so that lengths do not change.

    >>> reward([16, 17, 1, 2, END])
    0.5
    """
    tokens = [token for token in token_ids if token != END]
    return sum(token in LIKED for token in tokens) / max(1, len(tokens))
