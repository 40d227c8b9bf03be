"""Which rollouts a report shows: some of every step, and the same tasks before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.trainer.metrics.json_lines import Record
from roost.trainer.samples import shortened

MOST_OF_A_STEP = 8  # of a kind
MOST_ROLLOUTS = 2_000
MOST_CHARACTERS = 4_000  # of a text
MOST_OF_CONVERSATION = 12_000  # characters of all messages of a rollout
MOST_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What is shown, by ascending step, of how many."""

    shown: tuple[Record, ...]
    total: int


def choose_rollouts(records: Iterable[Record], most: int = MOST_ROLLOUTS) -> Rollouts:
    """The first few rollouts of every step and kind; where that is too many, of fewer steps, evenly spread."""
    chosen: dict[tuple[int, str], list[Record]] = {}
    total = 0
    for record in records:
        total += 1
        some = chosen.setdefault((record["step"], str(record.get("kind", "train"))), [])
        if len(some) < MOST_OF_A_STEP:
            some.append(_cut(record))
    keys = spread(sorted(chosen), max(1, most // MOST_OF_A_STEP))
    return Rollouts(tuple(record for key in keys for record in chosen[key]), total)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spread, with the first and the last.

    >>> spread(range(10), 4), spread("ab", 4), spread(range(10), 1)
    ([0, 3, 6, 9], ['a', 'b'], [9])
    """
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def before_and_after(rollouts: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Rollouts of the first and of the last step that has any: of equal tasks where there are some.

    Evaluations go first: they draw the same tasks each time.

    >>> records = [{"step": step, "task": task} for step in (1, 5) for task in ("3+4=", "1+1=", f"{step}+9=")]
    >>> [(one["step"], other["step"], one["task"]) for one, other in before_and_after(records)]
    [(1, 5, '3+4='), (1, 5, '1+1=')]
    """
    for kind in ("evaluation", "train"):
        of_kind = [record for record in rollouts if record.get("kind", "train") == kind]
        steps = sorted({record["step"] for record in of_kind})
        if len(steps) < 2:
            continue
        first = [record for record in of_kind if record["step"] == steps[0]]
        last = [record for record in of_kind if record["step"] == steps[-1]]
        by_task = {str(record.get("task")): record for record in reversed(last)}
        unique = {str(record.get("task")): record for record in reversed(first)}
        equal = [(record, by_task[task]) for task, record in reversed(unique.items()) if task in by_task]
        return (equal or list(zip(first, last, strict=False)))[:MOST_PAIRS]
    return []


def _cut(record: Mapping[str, Any]) -> Record:
    """The rollout with long texts cut in the middle: how it begins and how it ends both matter."""
    return {key: _cut_value(value) for key, value in record.items()}


def _cut_value(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value, MOST_CHARACTERS)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return value
    most = max(200, MOST_OF_CONVERSATION // max(1, len(value)))
    total = sum(len(str(one.get("content", ""))) for one in value)
    limit = MOST_CHARACTERS if total <= MOST_OF_CONVERSATION else most
    return [{**one, "content": shortened(str(one.get("content", "")), limit)} for one in value]
