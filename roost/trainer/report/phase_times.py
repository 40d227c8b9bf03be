"""Where the time of the steps went: seconds of each phase, and the colours of the phases."""

from __future__ import annotations

from collections.abc import Sequence

from roost.trainer.metrics.json_lines import Record, number_of
from roost.view.marks import COLOURS, USUAL

# A phase looks like the component that works in it.
_LIKE = {"generate": "rollout", "score": "reward", "learn": "actor", "sync": "inference", "switch": "reference"}
_WHOLE = "time/step"


def phases_of(steps: Sequence[Record]) -> list[str]:
    """The phases that were measured: the usual ones in their order, then others as they came up.

    >>> phases_of([{"step": 1, "time/step": 3.0, "time/save": 1.0, "time/learn": 1.0, "time/generate": 1.0}])
    ['generate', 'learn', 'save']
    """
    measured: dict[str, None] = {}
    for record in steps:
        measured.update(
            (key.removeprefix("time/"), None) for key in record if key.startswith("time/") and key != _WHOLE
        )
    return [*(name for name in _LIKE if name in measured), *(name for name in measured if name not in _LIKE)]


def times_of(steps: Sequence[Record], phase: str) -> list[float]:
    """The seconds of a phase in each step; 0 where it was not measured."""
    return [number_of(record, f"time/{phase}") or 0.0 for record in steps]


def phase_colours(steps: Sequence[Record]) -> dict[str, str]:
    """A colour for each phase."""
    taken = {USUAL[like] for like in _LIKE.values()}
    free = [colour for number, colour in enumerate(COLOURS) if number not in taken]
    others = [name for name in phases_of(steps) if name not in _LIKE]
    colours = {name: COLOURS[USUAL[like]] for name, like in _LIKE.items()}
    return colours | {name: free[number % len(free)] for number, name in enumerate(others)}
