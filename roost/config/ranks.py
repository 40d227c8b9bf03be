"""Rank ranges and placement strings: `0-3`, `all`, `0-1:0-3,3-5,7-10:7-14`.

placement := segment ("," segment)*        empty segments are skipped
segment   := resources [":" processes]
resources := "all" | range
processes := range
range     := INT | INT "-" INT             inclusive
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roost.config.findings import shown

MAX_RANK = 10**9  # far beyond any cluster, and small enough that arithmetic on ranks never overflows
MAX_TEXT = 100_000
_RANGE = re.compile(r"\s*(\d+(?:_\d+)*)\s*(?:-\s*(\d+(?:_\d+)*)\s*)?", re.ASCII)


class RankSyntaxError(ValueError):
    """A rank range or placement string that cannot be read, with the code of the finding and the fix."""

    def __init__(self, code: str, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.code, self.what, self.fix = code, what, fix


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a placement string: resources (None: `all`) and the processes on them (None: implied)."""

    resources: range | None
    processes: range | None
    text: str


def parse_range(text: str) -> range:
    """An inclusive range of ranks.

    >>> parse_range("0-3")
    range(0, 4)
    >>> parse_range(" 5 ")
    range(5, 6)
    """
    if len(text) > MAX_TEXT:
        raise RankSyntaxError(
            "RST-N020", f"a rank range has {len(text):,} characters; at most {MAX_TEXT:,} are read", "write a-b"
        )
    match = _RANGE.fullmatch(text)
    if match is None:
        raise RankSyntaxError(
            "RST-N017",
            f"{shown(text)} is not a rank or a range of ranks",
            "write a number such as 3, or a-b such as 0-3",
        )
    first, last = (_rank(part, text) for part in (match[1], match[2] or match[1]))
    if first > last:
        raise RankSyntaxError("RST-N018", f"the range {text.strip()} runs backwards", f"write {last}-{first}")
    return range(first, last + 1)


def _rank(digits: str, text: str) -> int:
    if len(digits) > 10 or int(digits) > MAX_RANK:
        raise RankSyntaxError("RST-N019", f"{shown(text)} is beyond any cluster", f"use ranks below {MAX_RANK:,}")
    return int(digits)


def parse_placement(text: str) -> tuple[Segment, ...]:
    """The segments of a placement string.

    >>> [(s.resources, s.processes) for s in parse_placement("0-1:0-3,4")]
    [(range(0, 2), range(0, 4)), (range(4, 5), None)]
    """
    if len(text) > MAX_TEXT:
        raise RankSyntaxError(
            "RST-N020",
            f"a placement has {len(text):,} characters; at most {MAX_TEXT:,} are read",
            "use ranges such as 0-63, or all",
        )
    segments = tuple(_segment(part.strip()) for part in text.split(",") if part.strip())
    if not segments:
        raise RankSyntaxError("RST-N021", "the placement is empty", "write all, or ranks such as 0-3")
    return segments


def _segment(text: str) -> Segment:
    resources, *processes = text.split(":")
    if len(processes) > 1:
        raise RankSyntaxError(
            "RST-N022", f"{shown(text)} has more than one colon", "write resources:processes, such as 0-3:0-7"
        )
    if processes and processes[0].strip().lower() == "all":
        raise RankSyntaxError(
            "RST-N023", f"in {shown(text)} the processes are 'all'", "name the process ranks, such as 0-3:0-7"
        )
    return Segment(
        resources=None if resources.strip().lower() == "all" else parse_range(resources),
        processes=parse_range(processes[0]) if processes else None,
        text=text,
    )


def parse_rank_list(value: object) -> tuple[range, ...] | None:
    """Ranks written as a number, as `0-3,7`, as `all` (None), or as a YAML list of numbers and ranges.

    >>> parse_rank_list("0-1,4"), parse_rank_list([0, "2-3"]), parse_rank_list("all")
    ((range(0, 2), range(4, 5)), (range(0, 1), range(2, 4)), None)
    """
    if isinstance(value, str) and value.strip().lower() == "all":
        return None
    items = value if isinstance(value, list | tuple) else str(value).split(",") if isinstance(value, str) else [value]
    ranges = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise RankSyntaxError(
                "RST-N017", f"{shown(item)} is not a rank", "write ranks such as 0-3, or a list such as [0, 1]"
            )
        if isinstance(item, str) and not item.strip():
            continue
        ranges.append(parse_range(str(item) if isinstance(item, str) or item.bit_length() < 64 else "9" * 11))
    return tuple(ranges)


def spell_ranks(ranks: list[int] | tuple[int, ...] | range, limit: int = 12) -> str:
    """Ranks with runs as ranges; the middle is left out if there are more than `limit` runs.

    >>> spell_ranks([0, 1, 2, 3, 8, 9])
    '0-3,8-9'
    """
    if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 1:
        return f"{ranks[0]}-{ranks[-1]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spelled = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(spelled) > limit:
        spelled = [*spelled[: limit // 2], "...", *spelled[-limit // 2 :]]
    return ",".join(spelled)


def spell_nodes(ranks: list[int] | tuple[int, ...]) -> str:
    """Node ranks with their noun.

    >>> spell_nodes([3]), spell_nodes([0, 1, 2])
    ('node 3', 'nodes 0-2')
    """
    return f"{'node' if len(ranks) == 1 else 'nodes'} {spell_ranks(ranks)}"
