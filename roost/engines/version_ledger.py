"""Track the policy version of completions for servers that do not report it, from the calls of their one client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from roost.engines.protocol import InFlight, NotOffered, VersionSpan


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in flight."""

    version: int  # of its tokens, if it is not mixed
    is_at_rest: bool  # the engine is paused, and has generated either none or all of its tokens
    is_mixed: bool = False  # the weights changed while its tokens may have been generated


class VersionLedger:
    """The version of an engine, and the requests in flight when it changed.

    >>> ledger = VersionLedger()
    >>> with ledger.request() as ticket:
    ...     ledger.moved_to(1)
    ...     ledger.spans(ticket, 4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    roost.engines.protocol.NotOffered: the weights changed to version 1 while this request was worked on...
    """

    def __init__(self) -> None:
        self.version = 0
        self.changes = 0  # of the weights, those to the same version too
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
        """Record that the engine has paused; call it after the engine confirms, not before."""
        self._is_paused = True
        if in_flight is not InFlight.HOLD:
            for ticket in self._open:
                ticket.is_at_rest = True  # its answer is on the way, or it came too late to be begun

    def resumed(self) -> None:
        """Record that the engine resumes; call it before the request to resume."""
        self._is_paused = False
        for ticket in self._open:
            if ticket.is_at_rest:
                ticket.version = self.version  # all that had been made has come back by now
                ticket.is_at_rest = False

    def moved_to(self, version: int) -> None:
        """The weights are those of this version now."""
        self.changes += 1
        if version == self.version:
            return
        self.version = version
        for ticket in self._open:
            ticket.is_mixed |= not ticket.is_at_rest

    def spans(self, ticket: Ticket, tokens: int) -> tuple[VersionSpan, ...]:
        """The version of all tokens of a request that has come back."""
        if ticket.is_mixed:
            raise NotOffered(
                f"the weights changed to version {self.version} while this request was worked on, and the server does "
                "not tell which tokens it made before: pause with drain or drop before an update, not with hold"
            )
        return (VersionSpan(ticket.version, 0, tokens),) if tokens else ()


def version_number(text: object) -> int:
    """A server's word for its version as a number; what it starts with, before any was set, is 0.

    >>> version_number("12"), version_number("default"), version_number(None)
    (12, 0, 0)
    """
    return int(text) if isinstance(text, str | int) and str(text).isdigit() else 0
