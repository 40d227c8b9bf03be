"""Which engine gets a request: the one its episode is at home with, otherwise the one with the least to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

MOST_EPISODES = 100_000


class Router:
    """Remembers where episodes are at home, so that their prompts find the prefix cache that has most of them.

    >>> router = Router()
    >>> router.choose({"a": 3, "b": 1}, episode="7")
    'b'
    >>> router.choose({"a": 0, "b": 9}, episode="7")
    'b'
    >>> router.choose({"a": 0}, episode="7")
    'a'
    """

    def __init__(self, most_episodes: int = MOST_EPISODES) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._most = most_episodes
        self._turn = 0

    def choose(self, loads: Mapping[str, int], episode: str | None = None) -> str | None:
        """One of the engines that take work, by how much each has; None where there is none.

        An episode whose home takes no work moves to another one, and stays there.
        """
        if not loads:
            return None
        home = self._homes.get(episode) if episode is not None else None
        chosen = home if home is not None and home in loads else self._least_loaded(loads)
        if episode is not None:
            self._homes[episode] = chosen
            self._homes.move_to_end(episode)
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)
        return chosen

    def forget(self, episode: str) -> None:
        """The episode is over."""
        self._homes.pop(episode, None)

    def _least_loaded(self, loads: Mapping[str, int]) -> str:
        least = min(loads.values())
        equal = [name for name, load in loads.items() if load == least]
        # Engines with equally little to do take turns, so that a quiet fleet is used evenly.
        self._turn += 1
        return equal[self._turn % len(equal)]
