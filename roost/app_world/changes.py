"""Differences between two snapshots of a world."""

from __future__ import annotations

from dataclasses import dataclass

from roost.app_world.state import KEYS, Json, Key, Record, Snapshot


@dataclass(frozen=True)
class Change:
    """One record that was added, changed or removed."""

    table: str
    key: Key
    before: Record | None  # None if it was added
    after: Record | None  # None if it was removed

    def describe(self) -> str:
        """The change as readable text.

        >>> Change("notes", 4, {"note_id": 4, "title": "tea"}, {"note_id": 4, "title": "milk"}).describe()
        "notes 4: title set to 'milk'"
        """
        if self.after is None:
            return f"{self.table} {self.key}: removed"
        if self.before is None:
            shown = (
                f"{name} {value!r}" for name, value in (self._compared() or {}).items() if value not in ("", None, [])
            )
            return f"{self.table}: {', '.join(shown)} added"
        fields = {name: value for name, value in self.after.items() if self.before.get(name) != value}
        return f"{self.table} {self.key}: " + ", ".join(f"{name} set to {value!r}" for name, value in fields.items())

    def matches(self, other: Change) -> bool:
        """Return True if both changes are equivalent.

        Ids of added records may differ, and so may the space around texts.

        >>> one, other = ({"note_id": key, "title": "milk"} for key in (4, 5))
        >>> Change("notes", 4, None, one).matches(Change("notes", 5, None, other))
        True
        """
        if (self.table, self.before) != (other.table, other.before):
            return False
        return self._compared() == other._compared()

    def _compared(self) -> Record | None:
        # Only integers are generated; other keys have a meaning, such as a path.
        has_generated_id = self.before is None and isinstance(self.key, int)
        ignored = KEYS[self.table] if has_generated_id else None
        return self.after and {name: _stripped(value) for name, value in self.after.items() if name != ignored}


def changes_between(before: Snapshot, after: Snapshot) -> list[Change]:
    """Records that differ between two snapshots.

    >>> from roost.app_world.state import State
    >>> state = State(today="2026-03-02")
    >>> before = state.snapshot()
    >>> _ = state.add("notes", {"title": "milk"})
    >>> [change.describe() for change in changes_between(before, state.snapshot())]
    ["notes: title 'milk' added"]
    """
    changes = []
    for table, key_field in KEYS.items():
        old = {row[key_field]: row for row in before["tables"][table]}
        new = {row[key_field]: row for row in after["tables"][table]}
        for key in [*old, *(key for key in new if key not in old)]:
            if old.get(key) != new.get(key):
                changes.append(Change(table, key, old.get(key), new.get(key)))
    return changes


def _stripped(value: Json) -> Json:
    return value.strip() if isinstance(value, str) else value
