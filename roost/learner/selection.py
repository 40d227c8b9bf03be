"""Which samples are learnt from, and how many are not, and why."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.learner.advantages import are_equal
from roost.spec.training import AdvantageSettings


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The samples to learn from, by position, in the order they came; and how many were left out."""

    kept: npt.NDArray[np.int64]
    too_small: int  # nearer to zero than AdvantageSettings.least
    not_positive: int  # far enough from zero, but AdvantageSettings.positive_only leaves them out
    largest_too_small: float  # how near to being kept; 0 where none was too small

    @property
    def dropped(self) -> int:
        return self.too_small + self.not_positive

    @property
    def dropped_share(self) -> float:
        seen = len(self.kept) + self.dropped
        return self.dropped / seen if seen else 0.0


def select(advantages: npt.NDArray[np.floating], settings: AdvantageSettings) -> Selection:
    """The samples whose advantage is large enough, and positive where only those count. May be none, or any number.

    >>> chosen = select(np.array([0.5, -0.5, 0.01]), AdvantageSettings(least=0.1, positive_only=True))
    >>> chosen.kept.tolist(), chosen.too_small, chosen.not_positive
    ([0], 1, 1)
    """
    sizes = np.abs(advantages)
    small = sizes < settings.least
    unwanted = ~small & (advantages <= 0) & settings.positive_only
    return Selection(
        kept=np.flatnonzero(~small & ~unwanted),
        too_small=int(small.sum()),
        not_positive=int(unwanted.sum()),
        largest_too_small=float(sizes[small].max(initial=0.0)),
    )


def equal_groups(returns: Sequence[float], groups: Sequence[Hashable]) -> frozenset[Hashable]:
    """The groups whose samples all got the same: dynamic sampling draws others in their place.

    >>> sorted(equal_groups([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"]))
    ['a']
    """
    members: dict[Hashable, list[float]] = {}
    for outcome, group in zip(returns, groups, strict=True):
        members.setdefault(group, []).append(outcome)
    return frozenset(group for group, outcomes in members.items() if are_equal(outcomes))
