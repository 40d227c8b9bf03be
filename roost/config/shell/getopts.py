"""Options of the arguments of a script, as getopts finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """An option that getopts found, and where it continues: the index of an argument, and of a letter in it."""

    name: str
    argument: str | None
    index: int
    letter: int = 1
    is_end: bool = False


def next_option(form: str, arguments: Sequence[str], index: int, letter: int) -> Option:
    """The option at an argument, counted from 1, as getopts gives it.

    >>> next_option("n:v", ["-n", "4"], 1, 1)
    Option(name='n', argument='4', index=3, letter=1, is_end=False)
    """
    text = arguments[index - 1] if 0 < index <= len(arguments) else ""
    if text == "--":
        return Option("?", None, index + 1, is_end=True)
    if len(text) < 2 or not text.startswith("-") or letter >= len(text):
        return Option("?", None, index, is_end=True)
    name, is_quiet = text[letter], form.startswith(":")
    following = (index, letter + 1) if letter + 1 < len(text) else (index + 1, 1)
    at = form.find(name)
    if at < 0 or name == ":":
        return Option("?", name if is_quiet else None, *following)
    if form[at + 1 : at + 2] != ":":
        return Option(name, None, *following)
    if letter + 1 < len(text):
        return Option(name, text[letter + 1 :], index + 1)
    if index < len(arguments):
        return Option(name, arguments[index], index + 2)
    return Option(":", name, index + 1) if is_quiet else Option("?", None, index + 1)
