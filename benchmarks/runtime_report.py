"""The results of the runtime measurements as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from runtime_results import ONES, WAYS, Missing, Overhead, Ratio, Throughput


def print_overheads(rows: Sequence[Overhead], console: Console) -> None:
    table = _table("Launching and calling workers", "", "", "time", "bare Ray", "ratio", "middle half", "rounds")
    for row in rows:
        times = duration(row.seconds), duration(row.bare_seconds)
        table.add_row(row.side, ONES[row.what], *times, *_spread(row.ratio, 2), str(row.ratio.rounds))
    console.print(table)
    console.print("Each ratio compares two times measured one after the other in the same Ray.\n")


def print_throughputs(rows: Sequence[Throughput], console: Console) -> None:
    table = _table(
        "Streams between two workers", "", "", "", "size", "an item", "rate", "Ray's queue", "copy",
        "times the queue", "middle half", "of a copy", "middle half",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.side,
            WAYS[row.way],
            row.kind,
            size(row.nbytes),
            duration(row.seconds),
            f"{row.megabytes_a_second:,.0f} MB/s",
            duration(row.queue_seconds),
            duration(row.copy_seconds),
            *_spread(row.to_queue, 1),
            *_spread(row.to_copy, 2),
        )
    console.print(table)
    console.print("The copy is between two arrays of that size in the sending process.\n")


def print_missing(rows: Sequence[Missing], console: Console) -> None:
    for row in rows:
        console.print(f"No result of {row.side} for {(ONES | WAYS)[row.what]}: {row.why}\n", markup=False)


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} µs"


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def _spread(ratio: Ratio, places: int) -> tuple[str, str]:
    return f"{ratio.middle:.{places}f}", f"{ratio.low:.{places}f} to {ratio.high:.{places}f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    return table
