"""Which samples are learnt from, and how many are not, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roost.config.training import AdvantageSettings


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """The samples to learn from, by position, in the order they came; and how many were left out."""

    kept: npt.NDArray[np.int64]
    too_small: int  # nearer to zero than AdvantageSettings.least
    not_positive: int  # far enough from zero, but AdvantageSettings.positive_advantages_only leaves them out

    @property
    def dropped(self) -> int:
        return self.too_small + self.not_positive


def select(advantages: npt.NDArray[np.floating], settings: AdvantageSettings) -> Selection:
    """The samples whose advantage is large enough, and positive where only those count. May be none, or any number.

    >>> chosen = select(np.array([0.5, -0.5, 0.01]), AdvantageSettings(least=0.1, positive_advantages_only=True))
    >>> chosen.kept.tolist(), chosen.too_small, chosen.not_positive
    ([0], 1, 1)
    """
    small = np.abs(advantages) < settings.least
    unwanted = ~small & (advantages <= 0) & settings.positive_advantages_only
    return Selection(
        kept=np.flatnonzero(~small & ~unwanted),
        too_small=int(small.sum()),
        not_positive=int(unwanted.sum()),
    )
