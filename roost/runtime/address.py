"""Who a worker is: the name of its group and its rank in it."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """A worker by group and rank.

    >>> str(Address("rollout", 3))
    'rollout:3'
    """

    group: str
    rank: int

    def __str__(self) -> str:
        return f"{self.group}:{self.rank}"


DRIVER = Address("driver", 0)
