"""The console that every command prints to."""

from __future__ import annotations

from rich.console import Console

from roost.view.plain import PlainConsole


def open_console(stderr: bool = False) -> Console:
    """A console that prints text as it is: brackets are no markup, `:key:` is no emoji, escape sequences are dropped.

    >>> open_console().print("pip install 'roost[train]'")
    pip install 'roost[train]'
    """
    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
