"""How much a server of worlds may use."""

from __future__ import annotations

from dataclasses import dataclass, field

from roost.sandbox.limits import Limits


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Bounds of one server.

    >>> ServingLimits(worlds=8).sandbox.wall_s
    10.0
    >>> ServingLimits(worlds=0)
    Traceback (most recent call last):
    ValueError: worlds is 0; a server needs more than 0
    """

    worlds: int = 64  # at a time, each with a process for its code
    idle_s: float = 1800.0  # after which a world that nobody asked for anything is closed
    code_chars: int = 100_000  # of one execution
    states: int = 8  # that one world keeps at the same time
    sandbox: Limits = field(default_factory=Limits)  # of each world
    allows_weak: bool = False  # sandboxes also where the machine cannot hold code that nobody trusts

    def __post_init__(self) -> None:
        for name in ("worlds", "idle_s", "code_chars", "states"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a server needs more than 0")
