"""A sample: one sequence that the learner learns from, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NOT_MADE = -1  # the turn of a token that the policy did not make


@dataclass(frozen=True, eq=False)
class Sample:
    """Prompt, turns and observations as the engine saw them; every array has one entry for each token.

    `turns` numbers the policy's turns from 0; tokens that the policy did not make have NOT_MADE, and what the other
    arrays say of them does not count. `logprobs` are those of the engine, under the distribution that was drawn from.
    """

    token_ids: Ints
    turns: Ints
    logprobs: Floats
    advantages: Floats
    old_logprobs: Floats | None = None  # the learner's own, before the first step on it
    reference_logprobs: Floats | None = None
    returns: Floats | None = None  # what a critic is to say
    values: Floats | None = None  # what it said

    def __post_init__(self) -> None:
        sizes = {len(array) for array in self._arrays()}
        if len(sizes) != 1:
            raise ValueError(f"the arrays of a sample have one entry for each token, but here are {sorted(sizes)}")

    @classmethod
    def of_policy(cls, token_ids: Ints) -> Sample:
        """Tokens that the policy might have made in one turn, to be scored."""
        zeros = np.zeros(len(token_ids), np.float32)
        return cls(token_ids, np.zeros(len(token_ids), np.int64), zeros, zeros)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_made(self) -> npt.NDArray[np.bool_]:
        """Which tokens the policy made."""
        made: npt.NDArray[np.bool_] = self.turns != NOT_MADE
        return made

    @property
    def made(self) -> int:
        """How many tokens the policy made."""
        return int(self.is_made.sum())

    def _arrays(self) -> list[npt.NDArray[np.generic]]:
        optional = (self.old_logprobs, self.reference_logprobs, self.returns, self.values)
        needed = (self.token_ids, self.turns, self.logprobs, self.advantages)
        return [*needed, *(array for array in optional if array is not None)]
