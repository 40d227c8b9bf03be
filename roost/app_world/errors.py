"""Errors of API calls, worded for agents."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 100  # names compared and listed: an agent may create any number of files


class ApiError(Exception):
    """A refused call that changed nothing. The message tells the agent what is wrong and how to fix it."""


def unknown(what: str, name: object, known: Iterable[str]) -> ApiError:
    """The error for a name that does not exist, with the nearest one that does.

    >>> str(unknown("API of notes", "creat", ["create", "delete"]))
    "there is no API of notes called 'creat'; did you mean 'create'?"
    >>> str(unknown("app", "zzz", ["todo", "notes"]))
    "there is no app called 'zzz'; there are: notes, todo"
    """
    names = sorted(known)[:MOST_NAMES]
    shown = name[:100] if isinstance(name, str) else f"a {type(name).__name__}"
    near = difflib.get_close_matches(shown, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
    return ApiError(f"there is no {what} called {shown!r}; {hint}")
