"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopScanner:
    """Looks for stop strings, and keeps back text that may turn out to be the beginning of one.

    >>> scanner = StopScanner(("END",))
    >>> scanner.add("one E").text, scanner.add("N"), scanner.add("D two")
    ('one ', Scanned(text='', stop=None), Scanned(text='', stop='END'))
    """

    def __init__(self, stops: tuple[str, ...], keeps_stop: bool = False) -> None:
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._kept_back = ""

    def add(self, piece: str) -> Scanned:
        text = self._kept_back + piece
        if found := _first_stop(text, self._stops):
            start, stop = found
            self._kept_back = ""
            return Scanned(text[: start + len(stop)] if self._keeps_stop else text[:start], stop)
        shown = len(text) - _length_of_beginning(text, self._stops)
        self._kept_back = text[shown:]
        return Scanned(text[:shown])

    def rest(self) -> str:
        """What was kept back, once no more text comes."""
        rest, self._kept_back = self._kept_back, ""
        return rest


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first stop string begins, and which it is; of two that begin together, the one written first."""
    found = [(text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text]
    if not found:
        return None
    start, _, stop = min(found)
    return start, stop


def _length_of_beginning(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of a text could be the beginning of a stop string.

    >>> _length_of_beginning("tea</", ("</end>", "ab"))
    2
    """
    longest = max((len(stop) for stop in stops), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
