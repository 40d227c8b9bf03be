"""Rewards that have nothing to score, which is seldom meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from roost.rollout.rewards.routing import Routing


def idle_rewards(routing: Routing, tags: Sequence[str]) -> dict[str, str]:
    """What to say of each reward that takes none of a step's tasks, given the tags of these.

    >>> from roost.rollout.rewards.routing import Route
    >>> idle_rewards(Routing((Route("exact", frozenset({"maths"})),)), ["math", "math", ""])["exact"]
    'reward exact scores nothing in this step: its tags are maths, and the tasks have math (2), no tag (1)'
    """
    had = ", ".join(f"{tag or 'no tag'} ({count})" for tag, count in sorted(Counter(tags).items(), reverse=True))
    return {
        route.name: f"reward {route.name} scores nothing in this step: its tags are {', '.join(sorted(route.tags))}, "
        f"and the tasks have {had}"
        for route in routing.routes
        if tags and not any(map(route.takes, tags))
    }
