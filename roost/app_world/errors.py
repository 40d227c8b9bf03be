"""What an agent is told when a call cannot be done."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 100  # that are compared and listed: an agent can make as many files as it likes


class ApiError(Exception):
    """A call that was refused and changed nothing. Its text tells the agent what is wrong, and what would be right."""


def unknown(what: str, name: object, known: Iterable[str]) -> ApiError:
    """The error for a name that does not exist, with the nearest one that does.

    >>> str(unknown("API of notes", "creat", ["create", "delete"]))
    "there is no API of notes called 'creat'; did you mean 'create'?"
    >>> str(unknown("app", "zzz", ["todo", "notes"]))
    "there is no app called 'zzz'; there are: notes, todo"
    """
    names = sorted(known)[:MOST_NAMES]
    asked = name[:100] if isinstance(name, str) else f"a {type(name).__name__}"
    near = difflib.get_close_matches(asked, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
    return ApiError(f"there is no {what} called {asked!r}; {hint}")
