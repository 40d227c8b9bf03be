"""Result of reading a script: its commands and the values that are not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roost.config.shell.state import Array
from roost.config.shell.syntax import ShellError
from roost.config.shell.values import Unknown, Value
from roost.config.yaml_events import Position


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script would start: its words, its place, and the variables at that moment."""

    words: tuple[Value, ...]
    position: Position
    variables: Mapping[str, Value | Array]
    folder: Path | None
    is_certain: bool  # False where a condition that is not known decides


@dataclass(slots=True)
class Reading:
    """Commands, missing files, errors and unknown values of a script."""

    commands: dict[tuple[object, ...], Command] = field(default_factory=dict)
    missing: list[tuple[str, Position]] = field(default_factory=list)  # sourced files that are not here
    errors: list[ShellError] = field(default_factory=list)
    # Variables that the caller gave for a command's output: what they stand for, and their values.
    given: dict[str, tuple[Unknown, str]] = field(default_factory=dict)
    reads_arguments: bool = False
    # An `exit` with an error that is always reached, and the variables without a value that lead to it.
    stops: list[tuple[Position, tuple[str, ...]]] = field(default_factory=list)
    is_cut: bool = False  # a limit was reached
