"""Rows of data files, read one at a time: JSON by the offsets of its rows, other formats through memory-mapped Arrow.

No format is held in memory. Parquet and CSV are converted to an Arrow file once; see docs/guides/data.md for its place.
"""

from __future__ import annotations

import bisect
import difflib
import glob
import hashlib
import json
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from roost.config.findings import Findings, Where
from roost.net.hub import Answer, check_data_set, offline

CACHE_VARIABLE = "ROOST_DATA_CACHE"
LINES, JSON, CSV, PARQUET, ARROW = "lines", "json", "csv", "parquet", "arrow"
FORMATS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": JSON,
    ".csv": CSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".ipc": ARROW,
}
SAVED = ("dataset_dict.json", "dataset_info.json")  # files of a folder that `save_to_disk` wrote
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
BATCH_ROWS = 8192  # of a converted file; one of its batches is the unit of a read
BLOCK = 1 << 24  # bytes that are looked through at a time
NAMED = 8  # files in a message
CHECKED_ROWS = 100  # rows whose keys are the columns of a JSON file

Row = dict[str, Any]


class DataError(ValueError):
    """Data that cannot be used; `code` is the finding's, `key` the key of `train.data` that names it, if one does."""

    def __init__(self, code: str, what: str, why: str = "", fix: str = "", key: str = "") -> None:
        super().__init__("; ".join(filter(None, (what, why, fix))))
        self.code, self.what, self.why, self.fix, self.key = code, what, why, fix, key

    def of(self, place: str) -> DataError:
        """The same about a row or a file."""
        return DataError(self.code, f"{place}: {self.what}", self.why, self.fix, self.key)

    def report(self, where: Where, findings: Findings) -> None:
        """Report it at its key: in the section at `where`, or beside it as RLinf (`prompt_key`) and ROLL name it."""
        beside = where.path[:-1]
        keys = ((*where.path, self.key), (*beside, f"{self.key}_key"), (*beside, self.key))
        at = next((path for path in keys if self.key and path in where.positions), None)
        where = where if at is None else Where(*where.positions[at], at, where.positions)
        is_of_verl = at is None and where.path == ("data", "train_files")
        fix = "write data.prompt_key=COLUMN, with one of these" if is_of_verl and self.key == "prompt" else self.fix
        findings.error(self.code, where, self.what, self.why, fix)


class Rows(Protocol):
    """Rows of one file."""

    label: str  # the file, for messages

    @property
    def columns(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def read(self, start: int, end: int) -> list[Row]:
        """Return the rows from `start` to before `end`."""
        ...


class JsonRows:
    """A JSON Lines file, or a JSON file with a list, one object, or several; of a JSON file `most` rows, if given."""

    def __init__(self, path: str, kind: str, most: int | None = None) -> None:
        self.label = path
        with Path(path).open("rb") as file:
            self._bytes: Any = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if Path(path).stat().st_size else b""
            )
        spans = _line_spans(self._bytes) if kind == LINES else _value_spans(self._bytes, path, most)
        self._starts, self._ends = spans

    @property
    def columns(self) -> tuple[str, ...]:
        rows = self.read(0, min(len(self), CHECKED_ROWS))
        return tuple(dict.fromkeys(key for row in rows for key in row))

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, start: int, end: int) -> list[Row]:
        return [self._row(index) for index in range(start, end)]

    def _row(self, index: int) -> Row:
        start = int(self._starts[index])
        return _json_row(self._bytes[start : self._ends[index]], self.label, index, lambda: self._line(start))

    def _line(self, start: int) -> int:
        return sum(bytes(self._bytes[at : min(at + BLOCK, start)]).count(b"\n") for at in range(0, start, BLOCK)) + 1


def _json_row(text: bytes, label: str, index: int, line: Callable[[], int]) -> Row:
    """A row from its JSON. Raise DataError with the line in its file if it is no object."""
    try:
        row = json.loads(text)
    except ValueError as error:
        first = getattr(error, "lineno", 1) - 1  # of the error in this row
        what = f"row {index} of {label}, line {line() + first}, is not JSON"
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise DataError("RST-T068", what, why, "correct the row, or remove it") from None
    if not isinstance(row, dict):
        what = f"row {index} of {label}, line {line()}, is a {type(row).__name__}"
        raise DataError("RST-T068", what, "", "write an object for each row")
    return row


Offsets = npt.NDArray[np.int64]


def _line_spans(data: Any) -> tuple[Offsets, Offsets]:
    """Start and end of each line that is not empty."""
    found = []
    for begin in range(0, len(data), BLOCK):
        block = np.frombuffer(data[begin : begin + BLOCK], np.uint8)
        found.append(np.flatnonzero(block == ord("\n")) + begin)
    breaks = np.concatenate([*found, [len(data)]]).astype(np.int64)
    starts = np.concatenate([[0], breaks[:-1] + 1]).astype(np.int64)
    is_filled = breaks - starts > 1  # one byte is a carriage return
    return starts[is_filled], breaks[is_filled]


BETWEEN = re.compile(r"[\s,]*")


def _value_spans(data: Any, path: str, most: int | None) -> tuple[Offsets, Offsets]:
    """Start and end of each value of a list, or of each object of a file without one. Blocks are decoded in turn."""
    decoder = json.JSONDecoder()
    spans: list[tuple[int, int]] = []
    head = len(data[:BLOCK]) - len(data[:BLOCK].lstrip())
    is_list = data[head : head + 1] == b"["
    read = head + is_list  # bytes decoded so far
    text, at, offset = "", 0, read  # `offset` is the byte at which text[at:] begins
    while most is None or len(spans) < most:
        between = BETWEEN.match(text, at)
        at, offset = (between.end(), offset + between.end() - at) if between else (at, offset)
        try:
            if text[at : at + 1] in ("", "]"):
                raise ValueError("no value here")
            _, end = decoder.raw_decode(text, at)
            if end == len(text) and read < len(data):
                raise ValueError("the value may go on in the next block")
        except ValueError as error:
            if read < len(data):
                last = min(read + BLOCK, len(data))
                while last < len(data) and data[last] & 0xC0 == 0x80:  # not inside a character
                    last += 1
                text, at, read = text[at:] + bytes(data[read:last]).decode(), 0, last
                continue
            if text[at:].strip() != ("]" if is_list else ""):
                line = bytes(data[:offset]).count(b"\n") + 1 + text[at:].count("\n", 0, getattr(error, "pos", at) - at)
                what = f"row {len(spans)} of {path}, line {line}, is not JSON"
                raise DataError(
                    "RST-T068", what, getattr(error, "msg", str(error)), "correct the row, or remove it"
                ) from None
            break
        size = len(text[at:end].encode())
        spans.append((offset, offset + size))
        at, offset = end, offset + size
    table = np.array(spans, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


class ArrowRows:
    """A memory-mapped Arrow file; `label` is the file it was made of."""

    def __init__(self, path: str, label: str) -> None:
        import pyarrow as pa

        self.label = label
        mapped = pa.memory_map(path)
        try:
            file = pa.ipc.open_file(mapped)
            self._batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        except pa.ArrowInvalid:
            mapped.seek(0)
            file = pa.ipc.open_stream(mapped)
            self._batches = list(file)
        self._columns = tuple(file.schema.names)
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, end: int) -> list[Row]:
        found: list[Row] = []
        while start < end:
            number = bisect.bisect_right(self._ends, start)
            batch, last = self._batches[number], min(end, self._ends[number])
            first = self._ends[number] - batch.num_rows
            found += batch.slice(start - first, last - start).to_pylist()
            start = last
        return found


class HubRows:
    """A data set of `datasets`, which keeps it as Arrow."""

    def __init__(self, dataset: Any, label: str) -> None:
        self.label, self._dataset = label, dataset

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, start: int, end: int) -> list[Row]:
        return [dict(self._dataset[index]) for index in range(start, end)]


class ManyRows:
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> tuple[int, int]:
        """Number of the file that has a row, and the row's number in it."""
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number] - len(self.parts[number]))

    def row(self, index: int) -> Row:
        number, inside = self.place(index)
        return self.parts[number].read(inside, inside + 1)[0]

    def spelled(self, index: int) -> str:
        """The place of a row, for messages."""
        number, inside = self.place(index)
        return f"row {inside} of {self.parts[number].label}"


# Opening ------------------------------------------------------------------------------------------------------------


def open_rows(path: str, name: str | None, split: str) -> list[Rows]:
    """Open a file, the files of a folder or a pattern, or a data set of the hub."""
    found = files_of(path)
    if found is None:
        return [_from_hub(path, name, split)]
    if Path(path).is_dir() and not found:
        return [_from_disk(path, split)]
    return [_opened(file) for file in found]


def files_of(path: str) -> list[str] | None:
    """Data files at a path; empty for a folder of `save_to_disk`, None for a name of the hub.

    Raise DataError if there is none.
    """
    here = Path(path)
    if here.is_dir():
        if any((here / name).is_file() for name in SAVED):
            return []
        files = sorted(str(file) for file in here.rglob("*") if file.suffix in FORMATS and file.is_file())
        return _known(files, path, f"it has no {', '.join(FORMATS)} file")
    if here.is_file():
        return _known([path] if here.suffix in FORMATS else [], path, f"known are {', '.join(FORMATS)}")
    if glob.has_magic(path):
        matching = glob.iglob(path, recursive=True)  # noqa: PTH207 - Path takes no absolute patterns
        files = sorted(file for file in matching if Path(file).suffix in FORMATS)
        return _known(files, path, "no data file matches the pattern")
    if HUB_NAME.fullmatch(path) and here.suffix not in FORMATS and not _is_local(here):
        return None
    fix = "name a file, a folder or a data set of the hub"
    raise DataError("RST-T063", f"there is no {path}", _near(here), fix, "path")


def _is_local(path: Path) -> bool:
    """Return True if the folder around a relative path exists: the path is a slip, not a name of the hub."""
    return path.parent != Path() and path.parent.is_dir()


def _known(files: list[str], path: str, why: str) -> list[str]:
    if not files:
        raise DataError("RST-T063", f"{path} has no data that can be read", why, "name a file or a folder of them")
    return files


def _near(path: Path) -> str:
    """Files of the nearest folder above a path that exists, those of the most similar names first."""
    above = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    wanted = path.absolute().relative_to(above).parts[0]
    names = sorted(file.name for file in above.iterdir() if not file.name.startswith("."))
    names.sort(key=lambda name: difflib.SequenceMatcher(None, wanted, name).ratio(), reverse=True)
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{above} has {', '.join(names[:NAMED]) or 'no files'}{more}"


class FirstRows(NamedTuple):
    """The first rows of a file, and its columns."""

    label: str
    columns: tuple[str, ...]
    rows: list[Row]


def first_rows(path: str, count: int) -> FirstRows | None:
    """Rows of the first file of a path that has any, without converting it; None for a data set to load."""
    found = None
    for file in files_of(path) or ():
        found = _first_of(file, count)
        if found.rows:
            break
    return found


def _first_of(file: str, count: int) -> FirstRows:
    kind = FORMATS[Path(file).suffix]
    if kind == LINES:
        rows = _first_lines(file, count)
        return FirstRows(file, tuple(dict.fromkeys(key for row in rows for key in row)), rows)
    if kind in (CSV, PARQUET):
        schema, batches = _readable(file, lambda: _csv(file) if kind == CSV else _parquet(file, count))
        batch = _readable(file, lambda: next(batches, None))
        return FirstRows(file, tuple(schema.names), [] if batch is None else batch.slice(0, count).to_pylist())
    return first_of(JsonRows(file, kind, count) if kind == JSON else _opened(file), count)


def first_of(rows: Rows, count: int) -> FirstRows:
    return FirstRows(rows.label, rows.columns, rows.read(0, min(count, len(rows))))


def _first_lines(path: str, count: int) -> list[Row]:
    found: list[Row] = []
    with Path(path).open("rb") as file:
        for number, text in enumerate(file, start=1):
            if len(found) == count:
                break
            if text.strip():
                found.append(_json_row(text, path, len(found), partial(int, number)))
    return found


def _readable(path: str, read: Any) -> Any:
    import pyarrow as pa

    try:
        return read()
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the latter for the names of columns
        why = " ".join(str(error).split())
        raise DataError("RST-T068", f"{path} cannot be read", why, "write it again, or name another file") from None


def _opened(path: str) -> Rows:
    kind = FORMATS[Path(path).suffix]
    if kind in (LINES, JSON):
        return JsonRows(path, kind)
    if kind == ARROW:
        rows: Rows = _readable(path, lambda: ArrowRows(path, path))
        return rows
    converted: Rows = _readable(path, lambda: ArrowRows(_converted(path, kind), path))
    return converted


def _converted(path: str, kind: str) -> str:
    """The Arrow file made of a Parquet or CSV file; it is made once, for as long as the file does not change."""
    import pyarrow as pa

    about = Path(path).resolve()
    facts = about.stat()
    key = hashlib.sha256(f"{about}:{facts.st_size}:{facts.st_mtime_ns}:1".encode()).hexdigest()[:32]
    folder = cache_folder()
    converted = folder / f"{key}.arrow"
    if converted.exists():
        return str(converted)
    folder.mkdir(parents=True, exist_ok=True)
    schema, batches = _parquet(path) if kind == PARQUET else _csv(path)
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        try:
            with pa.ipc.new_file(part, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        except BaseException:
            Path(part.name).unlink()
            raise
    Path(part.name).replace(converted)
    return str(converted)


def cache_folder() -> Path:
    """Folder of converted files."""
    own = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "roost" / "data"


def _parquet(path: str, rows: int = BATCH_ROWS) -> tuple[Any, Iterator[Any]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, pre_buffer=False)
    return file.schema_arrow, file.iter_batches(rows)


def _csv(path: str) -> tuple[Any, Iterator[Any]]:
    """Every column is text: an answer of 007 must stay what it is."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    parse = arrow_csv.ParseOptions(newlines_in_values=True)
    with arrow_csv.open_csv(path, parse_options=parse) as header:
        types = dict.fromkeys(header.schema.names, pa.string())
    reader = arrow_csv.open_csv(
        path,
        parse_options=parse,
        convert_options=arrow_csv.ConvertOptions(column_types=types, strings_can_be_null=False),
    )
    return reader.schema, iter(reader)


def _from_disk(path: str, split: str) -> Rows:
    from datasets import load_from_disk

    found: Any = load_from_disk(path)
    return HubRows(_split_of(found, path, split), path)


def _from_hub(path: str, name: str | None, split: str) -> Rows:
    from datasets import load_dataset

    answer, unreachable = check_data_set(path)
    try:
        with nullcontext() if answer is Answer.THERE else offline():  # a copy may be in the cache
            return HubRows(load_dataset(path, name, split=split), path)
    except Exception as error:  # of the hub's client, of the network, or of a data set's own code
        if answer is Answer.ABSENT:
            what = f"{path} is neither a local path nor a data set on the Hugging Face hub"
            raise DataError("RST-T063", what, _near(Path(path)), "correct it", "path") from None
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        why = f"{_near(Path(path))}; the hub cannot be reached: {unreachable}" if unreachable else why
        fix = "write the path of local files instead, or of a folder that save_to_disk wrote on a machine with access"
        raise DataError(
            "RST-T068", f"{path} is not a local path, and cannot be loaded from the hub", why, fix
        ) from None


def _split_of(found: Any, path: str, split: str) -> Any:
    if not isinstance(found, Mapping):
        return found
    if split not in found:
        what, why = f"{path} has no split {split}", f"it has {', '.join(found)}"
        raise DataError("RST-T063", what, why, f"write split: {next(iter(found), 'train')}")
    return found[split]
