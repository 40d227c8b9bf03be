"""State of the apps: in-memory tables of records that can be copied, saved and restored; and errors of API calls."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_NAMES = 100  # names compared and listed: an agent may create any number of files


class ApiError(Exception):
    """A refused call that changed nothing. The message tells the agent what is wrong and how to fix it."""


def unknown(what: str, name: object, known: Iterable[str]) -> ApiError:
    """The error for an unknown name, with the closest known one.

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


Json = Any  # None, bool, number, string, or lists and mappings of them
Record = dict[str, Any]
Key = int | str
Snapshot = dict[str, Any]  # a whole state as a JSON value

KEYS = {  # the key field of each table
    "notes": "note_id",
    "tasks": "task_id",
    "contacts": "contact_id",
    "events": "event_id",
    "wallets": "email",
    "transactions": "transaction_id",
    "requests": "request_id",
    "files": "path",
}
MOST_RECORDS = 1_000  # per table: an agent's endless loop must not fill the host's memory


def copied(value: Json) -> Json:
    """Return a deep copy of a JSON value, many times faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Completion:
    """Status with which an agent ended its task."""

    status: str
    answer: Json = None


@dataclass
class State:
    """State of all apps; only apps and task generators modify it.

    >>> state = State(today="2026-03-02")
    >>> state.add("notes", {"title": "milk"})
    {'note_id': 1, 'title': 'milk'}
    >>> State.restored(state.snapshot()) == state
    True
    """

    today: str  # as 2026-03-02
    profile: Record = field(default_factory=dict)  # of the supervisor
    accounts: dict[str, Record] = field(default_factory=dict)  # by app: password and access token
    tables: dict[str, dict[Key, Record]] = field(default_factory=lambda: {table: {} for table in KEYS})
    next_ids: dict[str, int] = field(default_factory=dict)  # an id is never given twice
    completion: Completion | None = None

    def rows(self, table: str) -> list[Record]:
        """Records of a table, in insertion order."""
        return list(self.tables[table].values())

    def find(self, table: str, key: Key) -> Record:
        """Return the record itself, not a copy."""
        record = self.tables[table].get(key)
        if record is None:
            raise ApiError(f"there is nothing in {table} with {KEYS[table]} {key!r}")
        return record

    def add(self, table: str, fields: Record) -> Record:
        """Add a record, with a new ID unless the fields have its key."""
        rows = self.tables[table]
        if len(rows) >= MOST_RECORDS:
            raise ApiError(f"{table} is full: it holds {MOST_RECORDS} records; delete some first")
        key_field = KEYS[table]
        if key_field not in fields:
            number = self.next_ids.get(table, 1)
            self.next_ids[table] = number + 1
            fields = {key_field: number, **fields}
        record: Record = copied(fields)
        rows[record[key_field]] = record
        return record

    def remove(self, table: str, key: Key) -> Record:
        """Remove a record and return it."""
        record = self.find(table, key)
        del self.tables[table][key]
        return record

    def copy(self) -> State:
        """Return an independent copy."""
        return State.restored(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return the whole state as an independent JSON value."""
        completion = self.completion
        snapshot: Snapshot = copied(
            {
                "today": self.today,
                "profile": self.profile,
                "accounts": self.accounts,
                "tables": {table: list(rows.values()) for table, rows in self.tables.items()},
                "next_ids": self.next_ids,
                "completion": completion and {"status": completion.status, "answer": completion.answer},
            }
        )
        return snapshot

    @classmethod
    def restored(cls, snapshot: Snapshot) -> State:
        """Restore a state from a snapshot."""
        held = copied(snapshot)
        tables = {table: {row[KEYS[table]]: row for row in rows} for table, rows in held.pop("tables").items()}
        completion = held.pop("completion")
        return cls(tables=tables, completion=completion and Completion(**completion), **held)
