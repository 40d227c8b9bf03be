"""Numbers as tokens: what is observed is binned, and what the policy says is an action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

END = "<end>"
DEVIATIONS = 3.0  # to either side of the mean that are told apart


@dataclass(frozen=True)
class ObservationBins:
    """Bounds for each number that is observed, with bins of equal width between them.

    >>> ObservationBins((-1.0, 0.0), (1.0, 10.0), bins=4).of([0.9, 99.0])
    [3, 3]
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    bins: int

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or any(
            not low < high for low, high in zip(self.low, self.high, strict=True)
        ):
            raise ValueError(f"low is {self.low} and high is {self.high}; give each number a low below its high")
        if self.bins < 2:
            raise ValueError(f"bins is {self.bins}; two are needed to tell anything apart")

    @classmethod
    def from_statistics(cls, mean: Sequence[float], deviation: Sequence[float], bins: int) -> ObservationBins:
        """Bounds from what was observed before.

        >>> ObservationBins.from_statistics([1.0], [0.5], bins=8).high
        (2.5,)
        """
        pairs = list(zip(mean, deviation, strict=True))
        low = tuple(middle - DEVIATIONS * width for middle, width in pairs)
        return cls(low, tuple(middle + DEVIATIONS * width for middle, width in pairs), bins)

    def of(self, numbers: Sequence[float] | npt.NDArray[Any]) -> list[int]:
        """The bin of each number; those beyond the bounds are in the outermost."""
        found = np.asarray(numbers, np.float64)
        if found.shape != (len(self.low),):
            raise ValueError(f"{found.size} numbers are observed, but bounds are given for {len(self.low)}")
        if np.isnan(found).any():
            raise ValueError(f"not all that is observed are numbers: {found.tolist()}")
        share = (found - np.array(self.low)) / (np.array(self.high) - np.array(self.low))
        binned: list[int] = np.clip(np.floor(share * self.bins), 0, self.bins - 1).astype(int).tolist()
        return binned


@dataclass(frozen=True)
class Actions:
    """What the policy can do: one of `choices`, or where bounds are given, one value of `choices` for each number.

    >>> Actions(2).action([1]), Actions(3, (-1.0, 0.0), (1.0, 5.0)).action([0, 1]).tolist()
    (1, [-1.0, 2.5])
    """

    choices: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.choices < 2:
            raise ValueError(f"{self.choices} actions leave nothing to choose; give 2 or more")
        if len(self.low) != len(self.high):
            raise ValueError(f"action_low has {len(self.low)} numbers and action_high {len(self.high)}; give as many")

    @property
    def numbers(self) -> int:
        """How many tokens an action has."""
        return max(len(self.low), 1)

    def action(self, chosen: Sequence[int]) -> Any:
        """The action as the environment takes it."""
        if not self.low:
            return chosen[0]
        low, high = np.array(self.low), np.array(self.high)
        return (low + (high - low) * np.array(chosen) / (self.choices - 1)).astype(np.float32)


def vocabulary(numbers: int, bins: int, choices: int) -> list[str]:
    """All tokens in the order of their ids: each bin of each number has its own, as has each choice.

    >>> vocabulary(numbers=2, bins=2, choices=2)
    ['o0.0', 'o0.1', 'o1.0', 'o1.1', 'a0', 'a1', '<end>']
    """
    shown = [f"o{number}.{bin}" for number in range(numbers) for bin in range(bins)]
    return [*shown, *(f"a{choice}" for choice in range(choices)), END]


class ControlTokens:
    """Observations to token ids, and token ids to actions, with the ids that the tokenizer has for them.

    `places` are those of the observed numbers that are shown; all of them if there are none.
    """

    def __init__(self, tokenizer: Any, bins: ObservationBins, actions: Actions, places: Sequence[int] = ()) -> None:
        if places and len(places) != len(bins.low):
            raise ValueError(f"{len(places)} numbers are to be shown, but bounds are given for {len(bins.low)}")
        names = vocabulary(len(bins.low), bins.bins, actions.choices)
        ids = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
        if len(set(ids.values())) != len(names) or None in ids.values():
            raise ValueError(
                f"the tokenizer does not have a token for each of {len(bins.low)} x {bins.bins} bins and "
                f"{actions.choices} actions; write the model with the same numbers (write_control_model)"
            )
        self._bins, self.actions, self._places = bins, actions, list(places)
        self._shown = [[ids[f"o{number}.{bin}"] for bin in range(bins.bins)] for number in range(len(bins.low))]
        self._choice = {ids[f"a{choice}"]: choice for choice in range(actions.choices)}

    def observation(self, content: Any) -> list[int]:
        """The tokens of what an environment shows."""
        numbers = numbers_of(content)
        if any(not 0 <= place < len(numbers) for place in self._places):
            raise ValueError(f"{len(numbers)} numbers are observed; those to be shown are {self._places}, from 0")
        binned = self._bins.of(numbers[self._places] if self._places else numbers)
        return [ids[bin] for ids, bin in zip(self._shown, binned, strict=True)]

    def action(self, said: Sequence[int]) -> tuple[Any, int]:
        """The action, and how many of its tokens were no action.

        A token that is none counts as the choice that its id falls to, so that a policy that knows nothing acts at
        random; one that is missing, as the choice in the middle.
        """
        choices = self.actions.choices
        chosen = [self._choice.get(token, token % choices) for token in said[: self.actions.numbers]]
        wrong = sum(token not in self._choice for token in said[: self.actions.numbers])
        missing = self.actions.numbers - len(chosen)
        return self.actions.action(chosen + [choices // 2] * missing), wrong + missing


def numbers_of(content: Any) -> npt.NDArray[np.float64]:
    """What an environment shows as numbers in a row: `state` of a mapping that has it, or all of its values.

    >>> numbers_of((np.int64(3), np.array([0.5, 1.0]))).tolist()
    [3.0, 0.5, 1.0]

    >>> numbers_of({"state": [1, 2], "images": {}}).tolist(), numbers_of({"b": [[3], [4]], "a": 1}).tolist()
    ([1.0, 2.0], [1.0, 3.0, 4.0])
    """
    if isinstance(content, Mapping):
        if "state" in content:
            return numbers_of(content["state"])
        return np.concatenate([numbers_of(content[name]) for name in sorted(content)])
    if isinstance(content, tuple):  # its parts may have any shapes
        return np.concatenate([np.zeros(0), *map(numbers_of, content)])
    return np.asarray(content, np.float64).reshape(-1)
