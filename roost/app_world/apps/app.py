"""Base class of apps: a view of the state whose public methods are its APIs; and checks of argument values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import ClassVar

from roost.app_world.signature import MOST_ITEMS, Api, read_api
from roost.app_world.state import ApiError, Record, State

PAGE_LIMIT = 5
MAX_PAGE_LIMIT = 20


class App:
    """An app of a world. Every public method is an API: it takes keywords only, and checks them before any change."""

    name: ClassVar[str]
    apis: ClassVar[Mapping[str, Api]]  # by name

    def __init_subclass__(cls) -> None:
        functions = [value for value in vars(cls).values() if inspect.isfunction(value)]
        cls.apis = {one.__name__: read_api(cls.name, one) for one in functions if not one.__name__.startswith("_")}

    def __init__(self, state: State, apps: Mapping[str, type[App]]) -> None:
        self._state = state
        self._apps = apps  # all apps of the world, by name


def page_of(rows: Sequence[Record], page_index: int, page_limit: int) -> list[Record]:
    """Return one page of the records; an empty list after the last page.

    >>> page_of([{"a": 1}, {"a": 2}, {"a": 3}], page_index=1, page_limit=2)
    [{'a': 3}]
    """
    if page_index < 0:
        raise ApiError(f"page_index must be 0 or more, not {page_index}")
    if not 1 <= page_limit <= MAX_PAGE_LIMIT:
        raise ApiError(f"page_limit must be from 1 to {MAX_PAGE_LIMIT}, not {page_limit}")
    return list(rows[page_index * page_limit : (page_index + 1) * page_limit])


def has_text(query: str, *texts: str) -> bool:
    """Return True if one of the texts contains the query, ignoring case."""
    return any(query.casefold() in text.casefold() for text in texts)


DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}", re.ASCII)
LONGEST_EMAIL = 254
LONGEST_PATH = 200
EMAIL = re.compile(r"[^\s@]+@[^\s@]+\.[^\s@]+")


def check_text(name: str, text: str) -> None:
    if not text.strip():
        raise ApiError(f"{name} must not be empty")


def check_date(name: str, text: str) -> None:
    try:
        is_right = DATE.fullmatch(text) is not None and bool(date.fromisoformat(text))
    except ValueError:
        is_right = False
    if not is_right:
        raise ApiError(f"{name} must be a date such as '2026-03-02', not {text[:40]!r}")


def check_moment(name: str, text: str) -> None:
    try:
        is_right = MOMENT.fullmatch(text) is not None and bool(datetime.fromisoformat(text))
    except ValueError:
        is_right = False
    if not is_right:
        raise ApiError(f"{name} must be a date and time such as '2026-03-02T09:30', not {text[:40]!r}")


def check_email(name: str, text: str) -> None:
    if len(text) > LONGEST_EMAIL or not EMAIL.fullmatch(text):
        raise ApiError(f"{name} must be an address such as 'ada@example.com', not {text[:40]!r}")


def check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ApiError(f"{name} must be from {least} to {most}, not {value}")


def check_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ApiError(f"{name} must be one of {', '.join(choices)}, not {value[:40]!r}")


def check_room(name: str, items: Sequence[str]) -> None:
    if len(items) >= MOST_ITEMS:
        raise ApiError(f"there are {len(items)} {name} already; {MOST_ITEMS} are allowed")


def check_path(name: str, text: str) -> None:
    if len(text) > LONGEST_PATH:
        raise ApiError(f"{name} has {len(text)} characters; {LONGEST_PATH} are allowed")
    parts = text.split("/")
    if parts[0] or len(parts) < 2 or any(part.strip() in ("", ".", "..") for part in parts[1:]):
        raise ApiError(f"{name} must be a full path such as '/lists/food.txt', not {text[:60]!r}")
