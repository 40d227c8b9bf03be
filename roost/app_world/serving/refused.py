"""What a server does not do, and why."""

from __future__ import annotations


class Refused(Exception):
    """A request that cannot be served: the status says whose fault it is, the message what to change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
