"""Arguments of a command as keys with values: Hydra overrides, and flags."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roost.config.section import Unresolved
from roost.config.yaml_events import KeyPath, Position

if TYPE_CHECKING:
    from roost.config.shell.reading import Command
    from roost.config.shell.values import Unknown, Value

_WHOLE = re.compile(r"[-+]?\d{1,18}")
_NUMBER = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d{1,3})?")
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None, "~": None, "": None}
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)(=|$)")
_FLAG = re.compile(r"(--[A-Za-z][\w.-]*)(=|$)")
MAX_DEPTH = 30


@dataclass(slots=True)
class Arguments:
    """Keys and their values, where each stands, and the arguments whose key is not known."""

    values: dict[Any, Any] = field(default_factory=dict)
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    options: dict[str, Value] = field(default_factory=dict)  # flags beside overrides
    unknown: list[Value] = field(default_factory=list)

    def set(self, path: KeyPath, value: Any, position: Position) -> None:
        """Set a key as an override does: what stood below it is gone."""
        inner = self.values
        for key in path[:-1]:
            below = inner.get(key)
            if not isinstance(below, dict):
                below = inner[key] = {}
            inner = below
        inner[path[-1]] = value
        self.positions = {one: place for one, place in self.positions.items() if one[: len(path)] != path}
        self.positions[path] = position

    def remove(self, path: KeyPath, position: Position) -> None:
        self.set(path, None, position)


@dataclass(frozen=True, slots=True)
class Start:
    """A command that may start a job: the word that names the program, and the arguments after it."""

    command: Command
    at: int  # the program among the words
    arguments: Arguments

    @property
    def program(self) -> str:
        return self.command.words[self.at].known or ""

    @property
    def before(self) -> Sequence[str]:
        """The words before the program that are known, without their folders."""
        return [(word.known or "").rpartition("/")[2] for word in self.command.words[: self.at]]


def value_at(values: Mapping[Any, Any], path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def typed(text: str) -> Any:
    """A value as Hydra and argparse read it: a number, a flag, null, or text.

    >>> typed("8"), typed("1e-6"), typed("True"), typed("null"), typed("'x'")
    (8, 1e-06, True, None, 'x')
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def resolved(value: Value) -> Any:
    """The typed value, or why it is not known and how to give it."""
    text = value.known
    if text is not None:
        return typed(text)
    unknown = value.unknown
    if unknown is None:
        return None
    return Unresolved(value.shown, unknown.reason, how_to_give(unknown))


def how_to_give(unknown: Unknown) -> str:
    if unknown.variable:
        return f"give it: {unknown.variable}=... before roost"
    return "write the value in the script, or a variable with it, such as ${NNODES:-1}, and give that before roost"


def read_overrides(words: Sequence[Value]) -> Arguments:
    """Hydra overrides `a.b=c`, `+a.b=c`, `~a.b`, and options such as `--config-name x`."""
    found = Arguments()
    option = ""
    for word in words:
        flag = re.fullmatch(r"(--?[A-Za-z][\w-]*)(?:=(.*))?", word.prefix, re.DOTALL)
        if flag is not None:
            option = flag[1] if flag[2] is None and word.known is not None else ""
            found.options[flag[1]] = word.after(len(flag[1]) + 1)
            continue
        match = _OVERRIDE.match(word.prefix)
        if option and (match is None or not match[3]):
            found.options[option] = word
        elif match is None or (not match[3] and match[1] != "~"):
            found.unknown.append(word)
        else:
            path: KeyPath = tuple(match[2].split("."))[:MAX_DEPTH]
            if match[1] == "~":
                found.remove(path, word.position)
            else:
                found.set(path, resolved(word.after(match.end())), word.position)
        option = ""
    return found


def alone(flag: Value) -> Any:
    """The value of a flag without one: true, or where a variable after it is not set, why the value is not known."""
    unset = flag.dropped
    return True if unset is None else Unresolved(unset.shown, unset.reason, how_to_give(unset), is_empty=True)


def read_flags(words: Sequence[Value], switches: Collection[str] = ()) -> Arguments:
    """Flags `--a-b 1`, `--a-b=1` and `--a-b`, which is then true; of several values the first is the value.

    `switches` never have a value.
    """
    found = Arguments()
    flag = ""
    position: Position = (None, None, None)
    for word in words:
        match = _FLAG.match(word.prefix)
        if match is not None:
            flag, position = match[1], word.position
            if match[2]:
                found.set((flag,), resolved(word.after(match.end())), position)
                flag = ""
            else:
                found.set((flag,), alone(word) if flag not in switches else True, position)
                flag = "" if flag in switches else flag
        elif word.unknown is not None and word.unknown.is_list:
            found.unknown.append(word)
            flag = ""
        elif flag:
            found.set((flag,), resolved(word), position)
            flag = ""
    return found
