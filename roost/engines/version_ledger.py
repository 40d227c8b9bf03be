"""Track the policy version of completions for servers that do not report it, from the calls of their one client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from roost.engines.protocol import InFlight, NotOffered, VersionSpan


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in flight."""

    version: int  # of all its tokens, unless `is_mixed`
    is_at_rest: bool  # the engine is paused, and has generated none or all of its tokens
    is_mixed: bool = False  # the weights changed while its tokens may have been generated


class VersionLedger:
    """Policy version of an engine, and the requests that were in flight when it changed.

    >>> ledger = VersionLedger()
    >>> with ledger.request() as ticket:
    ...     ledger.moved_to(1)
    ...     ledger.spans(ticket, 4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    roost.engines.protocol.NotOffered: the weights changed to version 1 during this request...
    """

    def __init__(self) -> None:
        self.version = 0
        self.changes = 0  # number of weight changes, including those to the same version
        self._is_paused = False
        self._open: set[Ticket] = set()

    @contextmanager
    def request(self) -> Iterator[Ticket]:
        """Context that tracks a request in flight."""
        ticket = Ticket(self.version, is_at_rest=self._is_paused)
        self._open.add(ticket)
        try:
            yield ticket
        finally:
            self._open.remove(ticket)

    def paused(self, in_flight: InFlight) -> None:
        """Record that the engine has paused. Call it after the engine has confirmed."""
        self._is_paused = True
        if in_flight is not InFlight.HOLD:
            for ticket in self._open:
                ticket.is_at_rest = True  # its answer is on the way, or it arrived during the pause

    def resumed(self) -> None:
        """Record that the engine resumes. Call it before the request to resume."""
        self._is_paused = False
        for ticket in self._open:
            if ticket.is_at_rest:
                ticket.version = self.version  # answers of before the pause have come back by now
                ticket.is_at_rest = False

    def moved_to(self, version: int) -> None:
        """Record that the weights are now those of this version."""
        self.changes += 1
        if version == self.version:
            return
        self.version = version
        for ticket in self._open:
            ticket.is_mixed |= not ticket.is_at_rest

    def spans(self, ticket: Ticket, tokens: int) -> tuple[VersionSpan, ...]:
        """Version span of an answered request with this number of tokens; raise NotOffered if it has several."""
        if ticket.is_mixed:
            raise NotOffered(
                f"the weights changed to version {self.version} during this request, and the server does not report "
                "which tokens it generated before: pause with drain or drop before an update, not with hold"
            )
        return (VersionSpan(ticket.version, 0, tokens),) if tokens else ()


def version_number(text: object) -> int:
    """A server's weight version as a number; 0 for the name that it has before any is set.

    >>> version_number("12"), version_number("default"), version_number(None)
    (12, 0, 0)
    """
    return int(text) if isinstance(text, str | int) and str(text).isdigit() else 0
