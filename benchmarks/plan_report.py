"""The results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from plan_results import (
    TARGET_FACTOR,
    TARGET_MB,
    TARGET_RATIO,
    TARGET_RATIO_NODES,
    TARGET_SECONDS,
    CommandLine,
    Comparison,
    Growth,
    constant_cost_until,
)
from rich.console import Console
from rich.table import Table


def print_growth(rows: Sequence[Growth], console: Console) -> None:
    table = _table(
        "Growth: actor: all, 8 accelerators a node",
        "nodes",
        "processes",
        "plan",
        "peak memory",
        "times the half",
    )
    for row in rows:
        factor = "" if row.factor is None else f"{row.factor:.2f}"
        table.add_row(f"{row.nodes:,}", f"{row.processes:,}", duration(row.seconds), f"{row.peak_mb:.0f} MB", factor)
    console.print(table)
    limits = f"{TARGET_SECONDS:.0f} s and {TARGET_MB / 1000:.0f} GB at the last size, {TARGET_FACTOR} times a doubling"
    console.print(f"Targets: {limits}.")
    console.print(
        f"Up to {constant_cost_until(rows):,} processes at least half of the time is constant cost "
        f"({duration(rows[0].seconds)} at {rows[0].processes:,}), so factors there say little.\n"
    )


def print_comparisons(rows: Sequence[Comparison], console: Console) -> None:
    title = "Side by side: a list of placements, both sides agreeing on every process"
    table = _table(title, "nodes", "processes", "Roost", "rlinf 0.3.0", "ratio", "import: Roost", "import: rlinf")
    for row in rows:
        table.add_row(
            f"{row.nodes:,}",
            f"{row.processes:,}",
            duration(row.roost_seconds),
            duration(row.peer_seconds),
            f"{row.ratio:,.0f}" if row.ratio >= 10 else f"{row.ratio:.1f}",
            duration(row.roost_import_seconds),
            duration(row.peer_import_seconds),
        )
    console.print(table)
    console.print(
        f"Target: at least {TARGET_RATIO:.0f} times at {TARGET_RATIO_NODES:,} nodes. Imports are not in it.\n"
    )


def print_command_line(result: CommandLine, console: Console) -> None:
    table = _table("Command line: roost plan on a small file", "roost plan", "bare interpreter", "modules", "unwanted")
    table.add_row(
        duration(result.seconds),
        duration(result.interpreter_seconds),
        f"{result.modules:,}",
        ", ".join(result.unwanted) or "none",
    )
    console.print(table)
    console.print("Target: neither Ray nor torch among the modules.\n")


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table
