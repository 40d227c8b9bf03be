"""Verdicts of a benchmark: which targets are met, and a file with them and the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results here.")]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured."""

    target: str
    measured: str
    met: bool


def print_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    table = Table("target", "measured", "", title="Targets", title_justify="left")
    for verdict in verdicts:
        table.add_row(verdict.target, verdict.measured, "[green]met[/]" if verdict.met else "[red]missed[/]")
    console.print(table)


def write_results(file: Path, results: Mapping[str, Any], verdicts: Sequence[Verdict]) -> None:
    everything = {"machine": machine(), **results, "targets": [asdict(verdict) for verdict in verdicts]}
    file.write_text(json.dumps(everything, indent=2) + "\n")


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {"cores": os.cpu_count(), "memory_gb": round(memory), "python": platform.python_version()}
