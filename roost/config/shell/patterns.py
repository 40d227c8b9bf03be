"""Patterns of bash: globs, and the regular expressions of `[[ =~ ]]`."""

from __future__ import annotations

import fnmatch
import re

_CLASSES = {
    "digit": "0-9",
    "alpha": "a-zA-Z",
    "alnum": "a-zA-Z0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": " \t\n\r\f\v",
    "blank": " \t",
    "xdigit": "0-9a-fA-F",
}
_CLASS = re.compile(r"\[:(\w+):\]")


def with_classes(pattern: str) -> str | None:
    """A pattern with `[:digit:]` and the like spelled out; None if it has a class that is not supported.

    >>> with_classes("[[:digit:]_]*")
    '[0-9_]*'
    """
    spelled = _CLASS.sub(lambda match: _CLASSES.get(match[1], match[0]), pattern)
    return None if re.search(r"\[[:.=]", spelled) else spelled


def compiled(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression that matches a whole text."""
    text = re.sub(r"\[\^", "[!", pattern)
    return re.compile(fnmatch.translate(text), re.DOTALL)


def matches_pattern(text: str, pattern: str) -> bool:
    return compiled(pattern).match(text) is not None


def regular(pattern: str) -> str | None:
    """A regular expression of bash as one of Python; None if the two may differ."""
    spelled = with_classes(pattern)
    if spelled is None:
        return None
    inside = False
    found = ""
    for at, character in enumerate(spelled):
        if character == "[" and inside:
            found += "\\["
            continue
        if character == "[" and not spelled[:at].endswith("\\"):
            inside = True
        elif character == "]" and inside and not re.search(r"\[\^?$", found):
            inside = False
        elif character == "\\" and inside:
            return None
        found += character
    return found
