"""Which groups may begin, and which are taken: decisions only, so that the lag is bounded by arithmetic.

Versions count updates; each of them takes the groups of one step. A group that began at version b must be taken at
version b + lag at the latest. While the policy has version v, at most (v + 1 + lag) * groups have begun, so that there
is a step for each of them; and no step takes so many young ones that the next steps could not take all the old ones.
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


def choose(
    in_play: Sequence[InPlay], count: int, version: int, max_lag: int, groups: int, left: int = 0
) -> tuple[int, ...] | None:
    """The groups to learn from at a version: the oldest that are over.

    None where they are too few, or where those that stay behind would be more than can still be taken in time: `left`
    at this version, and `groups` at each one after it.

    >>> waiting = [InPlay(0, 0, True), InPlay(1, 0, False), InPlay(2, 1, True), InPlay(3, 1, True)]
    >>> choose(waiting, 2, version=1, max_lag=1, groups=2) is None, choose(waiting, 2, version=0, max_lag=1, groups=2)
    (True, (0, 2))
    """
    over = sorted((group for group in in_play if group.is_over), key=lambda group: (group.began_at, group.number))
    chosen = tuple(group.number for group in over[:count])
    staying = [group.began_at for group in in_play if group.number not in chosen]
    are_in_time = all(
        sum(began_at + max_lag <= version + ahead for began_at in staying) <= left + ahead * groups
        for ahead in range(max_lag + 1)
    )
    return chosen if len(chosen) == count and are_in_time else None
