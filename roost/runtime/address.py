"""Who a worker is: the name of its group and its rank in it."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """A worker by group and rank.

    >>> str(Address("rollout", 3)), Address.parse("rollout:3") == Address("rollout", 3)
    ('rollout:3', True)
    """

    group: str
    rank: int

    def __str__(self) -> str:
        return f"{self.group}:{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Address:
        group, _, rank = text.rpartition(":")
        return cls(group, int(rank))


DRIVER = Address("driver", 0)
