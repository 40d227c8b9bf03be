"""Limits of a server of worlds, and their command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from roost.sandbox.limits import Limits


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits of one server.

    >>> ServingLimits(worlds=8).sandbox.wall_s
    10.0
    >>> ServingLimits(worlds=0)
    Traceback (most recent call last):
    ValueError: worlds is 0; a server needs more than 0
    """

    worlds: int = 64  # at a time, each with a process for its code
    idle_s: float = 1800.0  # a world without requests for this long is closed
    code_chars: int = 100_000  # per execution
    states: int = 8  # saved states per world
    sandbox: Limits = field(default_factory=Limits)  # of each world
    allows_weak: bool = False  # run even if the machine cannot isolate untrusted code

    def __post_init__(self) -> None:
        for name in ("worlds", "idle_s", "code_chars", "states"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a server needs more than 0")


OF_SERVING = ("worlds", "idle_s", "code_chars")
OF_SANDBOX = tuple(field.name for field in fields(Limits))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m roost.app_world.serving",
        description="Worlds of small apps for agents that write code, behind the routes of AppWorld's server.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="there is no key: keep it on this machine, or on a network of your own")
    add("--port", type=int, default=8000, help="0: any that is free; the line printed when it is ready has it")
    add("--worlds", type=int, help=f"at a time; {ServingLimits().worlds} if not given")
    add("--idle-s", type=float, help="a world that was not used for so long is closed")
    add("--code-chars", type=int, help="of one execution")
    for name in OF_SANDBOX:
        kind = float if name == "wall_s" else int
        add(option(name), type=kind, help=f"of the sandbox of each world; {getattr(Limits(), name)} if not given")
    add("--allows-weak", action="store_true", help="also where sandboxes do not hold; for code that is trusted")
    return parser.parse_args(argv)


def option(name: str) -> str:
    """
    >>> option("wall_s")
    '--wall-s'
    """
    return f"--{name.replace('_', '-')}"


def options_of(limits: ServingLimits) -> list[str]:
    """The command line that gives these limits.

    >>> limits = ServingLimits(worlds=8, sandbox=Limits(wall_s=2.5), allows_weak=True)
    >>> limits_of(arguments(options_of(limits))) == limits
    True
    """
    serving = {name: getattr(limits, name) for name in OF_SERVING}
    sandbox = {name: getattr(limits.sandbox, name) for name in OF_SANDBOX}
    given = [word for name, value in (serving | sandbox).items() for word in (option(name), str(value))]
    return [*given, *(["--allows-weak"] if limits.allows_weak else [])]


def limits_of(options: argparse.Namespace) -> ServingLimits:
    """Build the limits from command-line options; others keep their defaults.

    >>> limits_of(arguments(["--worlds", "8", "--wall-s", "2"])).sandbox.wall_s
    2.0
    """
    sandbox = Limits(**_given(options, OF_SANDBOX))
    return ServingLimits(sandbox=sandbox, allows_weak=options.allows_weak, **_given(options, OF_SERVING))


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
