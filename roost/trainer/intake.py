"""Which groups may begin, and which are taken: decisions only, so that the lag is bounded by arithmetic.

Versions count updates. While the policy has version v, at most (v + 1 + lag) * groups have begun, so that of those that
began at version v - lag or before, and were not taken yet, there are never more than one step takes. A step takes all
of them: a group that waited longer would be too old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InPlay:
    """A group that has begun."""

    number: int
    began_at: int  # the policy version
    is_over: bool


def may_begin(taken: int, in_play: int, version: int, groups: int, max_lag: int, first_version: int = 0) -> int:
    """How many groups may begin now.

    `taken` and `first_version` count from the same moment: the start of the run, or the step it was resumed at.

    >>> may_begin(taken=0, in_play=0, version=0, groups=4, max_lag=1)
    8
    >>> may_begin(taken=4, in_play=4, version=0, groups=4, max_lag=1), may_begin(4, 4, 1, 4, 1)
    (0, 4)
    """
    return max(0, (version - first_version + 1 + max_lag) * groups - taken - in_play)


def choose(in_play: Sequence[InPlay], count: int, version: int, max_lag: int) -> tuple[int, ...] | None:
    """The groups to learn from at a version: those that would be too old next time, then the oldest that are over.

    None where some of them are not over yet.

    >>> waiting = [InPlay(0, 0, True), InPlay(1, 0, False), InPlay(2, 1, True), InPlay(3, 1, True)]
    >>> choose(waiting, 2, version=1, max_lag=1) is None, choose(waiting, 2, version=0, max_lag=1)
    (True, (0, 2))
    """
    due = [group for group in in_play if group.began_at <= version - max_lag]
    if any(not group.is_over for group in due):
        return None
    others = [group for group in in_play if group not in due and group.is_over]
    ready = [*sorted(due, key=_age), *sorted(others, key=_age)]
    return tuple(group.number for group in ready[:count]) if len(ready) >= count else None


def _age(group: InPlay) -> tuple[int, int]:
    return group.began_at, group.number
