"""Generate worlds from seeds: a supervisor, people, and records in the apps."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from roost.app_world import records, words
from roost.app_world.state import Record, State

FIRST_DAY = date(2026, 1, 5)
PEOPLE = 14
NUMBERED = ("notes", "tasks", "contacts", "events", "transactions", "requests")  # tables with generated IDs


def generated_state(seed: int | str) -> State:
    """Generate a state from a seed, the same in every process. Names and titles in it are unique.

    >>> generated_state(1) == generated_state(1) != generated_state(2)
    True
    """
    random = Random(f"world {seed}")
    people = _people(random, PEOPLE + 1)
    today = (FIRST_DAY + timedelta(days=random.randrange(700))).isoformat()
    supervisor = people.pop()
    state = State(
        today=today,
        profile={field: supervisor[field] for field in ("name", "email", "phone", "city")},
        accounts={"payments": {"password": _secret(random, 8), "access_token": _secret(random, 24)}},
        next_ids={table: random.randrange(100, 900) for table in NUMBERED},
    )
    for person in people:
        state.add("contacts", person)
    emails = [person["email"] for person in people]
    _add_notes(state, random)
    _add_tasks(state, random)
    _add_events(state, random, emails)
    _add_money(state, random, emails)
    _add_files(state, random)
    return state


def day_from(state: State, days: int) -> str:
    """The date `days` after today.

    >>> day_from(State(today="2026-02-27"), 2)
    '2026-03-01'
    """
    return (date.fromisoformat(state.today) + timedelta(days=days)).isoformat()


def person(random: Random, first: str, last: str) -> Record:
    """Generate a contact with this name."""
    return records.contact(
        name=f"{first} {last}",
        email=f"{first}.{last}@example.com".lower(),
        phone=f"555-{random.randrange(10_000):04d}",
        relation=random.choice(words.RELATIONS),
        city=random.choice(words.CITIES),
        birthday=f"{random.randrange(1950, 2005)}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}",
    )


def _people(random: Random, count: int) -> list[Record]:
    names = zip(random.sample(words.FIRST_NAMES, count), random.sample(words.LAST_NAMES, count), strict=True)
    return [person(random, first, last) for first, last in names]


def _add_notes(state: State, random: Random) -> None:
    for title in random.sample(words.NOTE_TITLES, 8):
        content = " ".join(random.sample(words.SENTENCES, 2))
        tags = random.sample(words.NOTE_TAGS, random.randrange(3))
        state.add("notes", records.note(title, day_from(state, -random.randrange(1, 200)), content, tags))


def _add_tasks(state: State, random: Random) -> None:
    for title in random.sample(words.TASK_TITLES, 12):
        due = day_from(state, random.randrange(-10, 30)) if random.random() < 0.6 else None
        added = state.add("tasks", records.task(title, random.choice(words.TASK_LISTS), due, random.randrange(1, 4)))
        added["is_done"] = random.random() < 0.3


def _add_events(state: State, random: Random, emails: list[str]) -> None:
    for title in random.sample(words.EVENT_TITLES, 10):
        start = (
            f"{day_from(state, random.randrange(-5, 20))}T{random.randrange(8, 19):02d}:{random.choice(('00', '30'))}"
        )
        minutes = random.choice((30, 45, 60, 90))
        attendees = random.sample(emails, random.randrange(4))
        state.add("events", records.event(title, start, minutes, random.choice(words.PLACES), attendees))


def _add_money(state: State, random: Random, emails: list[str]) -> None:
    state.add("wallets", {"email": state.profile["email"], "balance": random.randrange(2_000, 9_000)})
    for _ in range(18):
        kind = random.choice(("sent", "sent", "received"))
        day = day_from(state, -random.randrange(1, 60))
        note = random.choice(words.PAYMENT_NOTES)
        state.add("transactions", records.transaction(kind, random.choice(emails), random.randrange(5, 120), note, day))
    for direction in ("incoming", "outgoing"):
        for status in ("paid", "declined"):
            amount, note = random.randrange(5, 90), random.choice(words.PAYMENT_NOTES)
            state.add("requests", records.request(direction, random.choice(emails), amount, note, status))


def _add_files(state: State, random: Random) -> None:
    paths = [f"{folder}/{name}" for folder in words.FOLDERS for name in words.FILE_NAMES]
    for path in random.sample(paths, 7):
        content = " ".join(random.sample(words.SENTENCES, 2))
        state.add("files", records.file(path, day_from(state, -random.randrange(1, 90)), content))


def _secret(random: Random, length: int) -> str:
    return "".join(random.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(length))
