"""A JSON lines file that can be read while it is appended to, and survives a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = dict[str, Any]
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class JsonLines:
    """Records of a run, one per line, each with its step.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = JsonLines(Path(folder) / "metrics.jsonl")
    ...     lines.append([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": float("nan")}])
    ...     list(lines)
    [{'step': 1, 'reward/mean': 0.5}, {'step': 2, 'reward/mean': None}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records, visible to readers at once."""
        text = b"".join(_line(record) for record in records)
        if not text:
            return
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # end a line that a crash cut off
                    text = b"\n" + text
            file.write(text)

    def __iter__(self) -> Iterator[Record]:
        """Yield records in order; broken lines and lines without a step are skipped, a missing file is empty."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            for line in file:
                record = _record(line)
                if record is not None:
                    yield record

    def cut_back(self, step: int) -> None:
        """Remove records of later steps and broken lines, atomically."""
        if not self.path.exists():
            return
        kept = (_line(record) for record in self if record["step"] <= step)
        write_whole(self.path, kept)


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically: readers never see a part of it, even after a crash."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def number_of(record: Record, key: str) -> float | None:
    """Return a finite number of a record, or None; files may have been edited by hand.

    >>> number_of({"step": 1, "reward/mean": "high"}, "reward/mean"), number_of({"step": 1}, "step")
    (None, 1)
    """
    value = record.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _line(record: Mapping[str, Any]) -> bytes:
    return _JSON.encode(_plain(record)).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Convert to JSON types: other libraries' numbers to floats, non-finite numbers to None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "__float__"):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value)


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record
