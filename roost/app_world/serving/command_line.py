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

    worlds: int = 64  # at the same time, each with a process for its code
    idle_s: float = 1800.0  # a world without requests for this long is closed
    code_chars: int = 100_000  # per execution
    states: int = 8  # saved states per world
    sandbox: Limits = field(default_factory=Limits)  # of each world
    allows_weak: bool = False  # run even if the machine cannot isolate untrusted code

    def __post_init__(self) -> None:
        for name in ("worlds", "idle_s", "code_chars", "states"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a server needs more than 0")


SERVER_OPTIONS = ("worlds", "idle_s", "code_chars")
SANDBOX_OPTIONS = tuple(field.name for field in fields(Limits))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m roost.app_world.serving",
        description="Worlds of small apps for agents that write code, behind the routes of AppWorld's server.",
    )
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on; requests need no key, so use one that only you can reach",
    )
    add("--port", type=int, default=8000, help="0: a free one, printed once the server is ready")
    add("--worlds", type=int, help=f"worlds at the same time (default {ServingLimits().worlds})")
    add("--idle-s", type=float, help="close a world after this many seconds without requests")
    add("--code-chars", type=int, help="characters of code per execution")
    for name in SANDBOX_OPTIONS:
        kind = float if name == "wall_s" else int
        add(option(name), type=kind, help=f"limit of each world's sandbox (default {getattr(Limits(), name)})")
    add("--allows-weak", action="store_true", help="run even if this machine cannot isolate untrusted code")
    return parser.parse_args(argv)


def option(name: str) -> str:
    """
    >>> option("wall_s")
    '--wall-s'
    """
    return f"--{name.replace('_', '-')}"


def options_of(limits: ServingLimits) -> list[str]:
    """Command-line options for these limits.

    >>> limits = ServingLimits(worlds=8, sandbox=Limits(wall_s=2.5), allows_weak=True)
    >>> limits_of(arguments(options_of(limits))) == limits
    True
    """
    serving = {name: getattr(limits, name) for name in SERVER_OPTIONS}
    sandbox = {name: getattr(limits.sandbox, name) for name in SANDBOX_OPTIONS}
    given = [word for name, value in (serving | sandbox).items() for word in (option(name), str(value))]
    return [*given, *(["--allows-weak"] if limits.allows_weak else [])]


def limits_of(options: argparse.Namespace) -> ServingLimits:
    """Build the limits from command-line options; others keep their defaults.

    >>> limits_of(arguments(["--worlds", "8", "--wall-s", "2"])).sandbox.wall_s
    2.0
    """
    sandbox = Limits(**_given(options, SANDBOX_OPTIONS))
    return ServingLimits(sandbox=sandbox, allows_weak=options.allows_weak, **_given(options, SERVER_OPTIONS))


def _given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
