"""Which rewards score an answer, and what their scores make together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCENARIO = "scenario"  # the name under which the scenario's own reward is weighted


@dataclass(frozen=True, slots=True)
class Route:
    """A reward as tasks find it."""

    name: str
    tags: frozenset[str] = frozenset()  # of the tasks that it scores; none: of all tasks
    weight: float = 1.0

    def takes(self, tag: str) -> bool:
        return not self.tags or tag in self.tags


@dataclass(frozen=True, slots=True)
class Routing:
    """All rewards that there are. Those that take a task's tag are added up, each by its weight.

    The scenario's own reward counts beside them only where it has a weight. An answer that no reward takes keeps it.

    >>> routing = Routing((Route("exact", frozenset({"math"})), Route("style", weight=0.5)))
    >>> [route.name for route in routing.of("math")], routing.total("math", 9.0, {"exact": 1.0, "style": 0.2})
    (['exact', 'style'], 1.1)
    """

    routes: tuple[Route, ...] = ()
    own: Route | None = None  # the scenario's

    def of(self, tag: str) -> tuple[Route, ...]:
        """The rewards that score answers to tasks of a tag."""
        return tuple(route for route in self.routes if route.takes(tag))

    def total(self, tag: str, own: float, scores: Mapping[str, float]) -> float:
        """What an answer is worth, given what the scenario gave it and what each of the rewards that take it did."""
        chosen = self.of(tag)
        if not chosen:
            return own
        return sum((route.weight * scores[route.name] for route in chosen), self.own_weight(tag) * own)

    def own_weight(self, tag: str) -> float:
        """By how much the scenario's own reward counts for a task, and so what it gave for each turn.

        >>> Routing((Route("exact"),)).own_weight(""), Routing((Route("exact", frozenset({"math"})),)).own_weight("")
        (0.0, 1.0)
        """
        if not self.of(tag):
            return 1.0
        return self.own.weight if self.own is not None and self.own.takes(tag) else 0.0

    def parts(self, tag: str, own: float, scores: Mapping[str, float]) -> dict[str, float]:
        """What the answer's worth is made of, before it is weighted.

        >>> Routing((Route("exact"),), Route(SCENARIO)).parts("", 9.0, {"exact": 1.0}), Routing().parts("", 9.0, {})
        ({'exact': 1.0, 'scenario': 9.0}, {'scenario': 9.0})
        """
        counts_own = not self.of(tag) or (self.own is not None and self.own.takes(tag))
        return {**scores, **({SCENARIO: own} if counts_own else {})}
