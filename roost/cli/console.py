"""The console that every command prints to."""

from __future__ import annotations

from rich.console import Console


def open_console(stderr: bool = False) -> Console:
    """A console that prints text as it is: brackets are no markup, and `:key:` is no emoji.

    >>> open_console().print("pip install 'roost[train]'")
    pip install 'roost[train]'
    """
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
