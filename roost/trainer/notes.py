"""What people are told beside the figures, each thing once: why episodes fail, which rewards have nothing to score."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from roost.rollout.rewards.routing import Routing

MOST_REASONS = 10  # more of them are all the same to whoever reads
LONGEST = 500  # characters of a reason
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{8,}|[0-9]+")


class Notes:
    """Remembers what was said.

    >>> notes = Notes()
    >>> notes.of_failure("reward judge: no answer to task '1+1' within 9 s")
    "an episode failed: reward judge: no answer to task '1+1' within 9 s"
    >>> notes.of_failure("reward judge: no answer to task '2+2' within 8 s")
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._unused: set[str] = set()

    def of_failure(self, reason: str) -> str | None:
        """What to say of an episode that failed; None where the same was said but for names and numbers."""
        kind = _PARTICULAR.sub("", reason)
        if kind in self._reasons or len(self._reasons) > MOST_REASONS:
            return None
        self._reasons.add(kind)
        if len(self._reasons) > MOST_REASONS:
            return "episodes fail for many more reasons, which are not told any more"
        shown = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} [...]"
        return f"an episode failed: {shown or 'nobody said why'}"

    def of_unused(self, routing: Routing, tags: Sequence[str]) -> list[str]:
        """What to say of rewards that take none of a step's tasks, given the tags of these.

        >>> from roost.rollout.rewards.routing import Route
        >>> Notes().of_unused(Routing((Route("exact", frozenset({"maths"})),)), ["math", "math", ""])
        ['reward exact scores nothing in this step: its tags are maths, and the tasks have math (2), no tag (1)']
        """
        if not tags:
            return []
        idle = [route for route in routing.routes if route.name not in self._unused and not any(map(route.takes, tags))]
        self._unused |= {route.name for route in idle}
        had = ", ".join(f"{tag or 'no tag'} ({count})" for tag, count in sorted(Counter(tags).items(), reverse=True))
        return [
            f"reward {route.name} scores nothing in this step: its tags are {', '.join(sorted(route.tags))}, "
            f"and the tasks have {had}"
            for route in idle
        ]
