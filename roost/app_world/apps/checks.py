"""Checks of argument values, beyond their types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date, datetime

from roost.app_world.errors import ApiError
from roost.app_world.signature import MOST_ITEMS

DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}", re.ASCII)
LONGEST_EMAIL = 254
LONGEST_PATH = 200
EMAIL = re.compile(r"[^\s@]+@[^\s@]+\.[^\s@]+")


def needs_text(name: str, text: str) -> None:
    if not text.strip():
        raise ApiError(f"{name} must not be empty")


def needs_date(name: str, text: str) -> None:
    try:
        is_right = DATE.fullmatch(text) is not None and bool(date.fromisoformat(text))
    except ValueError:
        is_right = False
    if not is_right:
        raise ApiError(f"{name} must be a date such as '2026-03-02', not {text[:40]!r}")


def needs_moment(name: str, text: str) -> None:
    try:
        is_right = MOMENT.fullmatch(text) is not None and bool(datetime.fromisoformat(text))
    except ValueError:
        is_right = False
    if not is_right:
        raise ApiError(f"{name} must be a date and time such as '2026-03-02T09:30', not {text[:40]!r}")


def needs_email(name: str, text: str) -> None:
    if len(text) > LONGEST_EMAIL or not EMAIL.fullmatch(text):
        raise ApiError(f"{name} must be an address such as 'ada@example.com', not {text[:40]!r}")


def needs_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ApiError(f"{name} must be from {least} to {most}, not {value}")


def needs_one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ApiError(f"{name} must be one of {', '.join(choices)}, not {value[:40]!r}")


def needs_room(name: str, items: Sequence[str]) -> None:
    if len(items) >= MOST_ITEMS:
        raise ApiError(f"there are {len(items)} {name} already; {MOST_ITEMS} are allowed")


def needs_path(name: str, text: str) -> None:
    if len(text) > LONGEST_PATH:
        raise ApiError(f"{name} has {len(text)} characters; {LONGEST_PATH} are allowed")
    parts = text.split("/")
    if parts[0] or len(parts) < 2 or any(part.strip() in ("", ".", "..") for part in parts[1:]):
        raise ApiError(f"{name} must be a full path such as '/lists/food.txt', not {text[:60]!r}")
