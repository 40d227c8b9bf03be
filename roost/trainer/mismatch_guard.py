"""Whether the engines' log-probabilities have suddenly moved away from the learner's, compared with the run so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from roost.trainer.figures import MISMATCH

FIGURE = f"{MISMATCH}/logprob_mean"
TIMES = 10.0  # the usual mismatch of this run; a model that is sensitive to rounding has a large one from the start
LEAST = 0.1  # nats: less than this is no jump, however small the mismatch was
REMEMBERED = 20  # steps


class MismatchGuard:
    """Remembers the mismatch of the steps that were learnt from.

    >>> guard = MismatchGuard()
    >>> guard.jump({FIGURE: 1.4}), guard.accept({FIGURE: 1.4})
    ('', None)
    >>> guard.jump({FIGURE: 3.0}), guard.jump({FIGURE: 15.0})
    ('', 'the mean mismatch of log-probabilities jumped from 1.4 to 15')
    """

    def __init__(self) -> None:
        self._earlier: deque[float] = deque(maxlen=REMEMBERED)

    def jump(self, figures: Mapping[str, float]) -> str:
        """What is wrong with a step's mismatch, or nothing; the first one is what others are compared with."""
        now = figures.get(FIGURE)
        if now is None or not self._earlier:
            return ""
        usual = median(self._earlier)
        if now <= max(LEAST, TIMES * usual):  # written so that not-a-number is a jump
            return ""
        return f"the mean mismatch of log-probabilities jumped from {usual:.3g} to {now:.3g}"

    def accept(self, figures: Mapping[str, float], is_new_usual: bool = False) -> None:
        """The step is learnt from; after a jump that stays, later ones are compared with it alone."""
        if is_new_usual:
            self._earlier.clear()
        if FIGURE in figures:
            self._earlier.append(figures[FIGURE])
