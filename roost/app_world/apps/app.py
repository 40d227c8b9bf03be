"""Base class of apps: a view of the state whose public methods are its APIs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import ClassVar

from roost.app_world.errors import ApiError
from roost.app_world.signature import Api, read_api
from roost.app_world.state import Record, State

PAGE_LIMIT = 5
LARGEST_PAGE = 20


class App:
    """An app of a world. Every public method is an API that takes keywords only, and checks before it changes."""

    name: ClassVar[str]
    apis: ClassVar[Mapping[str, Api]]  # by name

    def __init_subclass__(cls) -> None:
        functions = [value for value in vars(cls).values() if inspect.isfunction(value)]
        cls.apis = {one.__name__: read_api(cls.name, one) for one in functions if not one.__name__.startswith("_")}

    def __init__(self, state: State, apps: Mapping[str, type[App]]) -> None:
        self._state = state
        self._apps = apps  # all of the world, by name


def page_of(rows: Sequence[Record], page_index: int, page_limit: int) -> list[Record]:
    """One page of the records; an empty one after the last.

    >>> page_of([{"a": 1}, {"a": 2}, {"a": 3}], page_index=1, page_limit=2)
    [{'a': 3}]
    """
    if page_index < 0:
        raise ApiError(f"page_index must be 0 or more, not {page_index}")
    if not 1 <= page_limit <= LARGEST_PAGE:
        raise ApiError(f"page_limit must be from 1 to {LARGEST_PAGE}, not {page_limit}")
    return list(rows[page_index * page_limit : (page_index + 1) * page_limit])


def has_text(query: str, *texts: str) -> bool:
    """Return True if one of the texts contains the query, ignoring case."""
    return any(query.casefold() in text.casefold() for text in texts)
