"""The grid and the phases on a terminal: a row of cells for each node, readable with and without colour."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from roost.config.ranks import spell_ranks
from roost.placement.memory.phases import Phase
from roost.placement.plan import Plan
from roost.view.grid_model import Grid, Holder, Mark, Run, grid
from roost.view.phases import MemoryRow, memory_rows, phase_rows, unknown_memory

MOST_SINGLE_ROWS = 16  # up to this many nodes get one row each
FREE = "·"


def print_grid(plan: Plan, console: Console) -> None:
    """Print the grid, its legend, and the phases."""
    result = grid(plan)
    console.print(_grid_table(result))
    console.print()
    console.print(_legend(result))
    console.print()
    console.print(_phase_table(plan))
    if memory_rows(plan):
        console.print()
        print_memory(plan, console)
    for engine in plan.routes.engines:
        console.print()
        console.print(Text(f"weights to {engine.component}: {engine.summary}"))


def print_memory(plan: Plan, console: Console) -> None:
    """Print the memory of devices in each phase, and why figures are unknown."""
    rows = memory_rows(plan)
    if rows:
        console.print(_memory_table(rows))
    unknown = unknown_memory(plan, rows)
    if unknown:
        console.print(Text(unknown, "dim"))


def _grid_table(result: Grid) -> Table:
    marks = {mark.component: mark for mark in result.marks}
    rows = result.rows(MOST_SINGLE_ROWS)
    widest = max((len(run.layout.accelerators) for run in rows), default=0)
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("nodes", no_wrap=True)
    table.add_column(f"accelerators 0-{widest - 1}" if widest > 1 else "accelerators")
    if any(run.layout.declared or run.layout.without_device for run in rows):
        table.add_column("robots and CPU processes")
    for run in rows:
        label = run.label.removeprefix("nodes ").removeprefix("node ")
        cells: list[RenderableType] = [label, _cells(run, marks)]
        if len(table.columns) > 2:
            cells.append(_others(run, marks))
        table.add_row(*cells)
    return table


def _cells(run: Run, marks: dict[str, Mark]) -> Text:
    """One block for each accelerator; a shared one is split between its holders."""
    text = Text()
    for index, holders in enumerate(run.layout.accelerators):
        if index:
            text.append(" ")
        if not holders:
            text.append(FREE, "dim")
        for position, holder in enumerate(holders):
            if position:
                text.append("+", "dim")
            text.append(_holder(run, holder, marks), _style(marks[holder.component]))
    return text


def _holder(run: Run, holder: Holder, marks: dict[str, Mark]) -> str:
    """The short name, with the rank where there is one; in a folded row the ranks differ from node to node."""
    short = marks[holder.component].short
    if len(run.nodes) > 1:
        return short if len(holder.offsets) == 1 else f"{short}x{len(holder.offsets)}"
    return short + spell_ranks(run.ranks(holder), limit=4)


def _others(run: Run, marks: dict[str, Mark]) -> Text:
    text = Text()
    for device in run.layout.declared:
        text.append(("  " if text else "") + f"{device.kind} {device.index}:")
        for holder in device.holders:
            text.append(" ")
            text.append(_holder(run, holder, marks), _style(marks[holder.component]))
        if not device.holders:
            text.append(f" {FREE}", "dim")
    for holder in run.layout.without_device:
        text.append("  " if text else "")
        text.append(_holder(run, holder, marks), _style(marks[holder.component]))
    return text


def _style(mark: Mark) -> str:
    return f"{mark.ink} on {mark.colour}"


def _legend(result: Grid) -> Text:
    text = Text()
    for mark in result.marks:
        text.append("  " if text else "")
        text.append(mark.short, _style(mark))
        text.append(f" {mark.component}")
    free = f"  {FREE} free ({result.num_free})" if result.num_free else ""
    return text.append(free, "dim")


def _phase_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("process", *(phase.value for phase in Phase)):
        table.add_column(name)
    rows = phase_rows(plan)
    if any(row.note for row in rows):
        table.add_column("")
    for row in rows:
        note = [Text(row.note)] if len(table.columns) > len(Phase) + 1 else []
        table.add_row(Text(f"{row.component} {row.processes}"), *row.cells, *note)
    return table


def _memory_table(rows: tuple[MemoryRow, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("GiB on each device", *(phase.value for phase in Phase), "of", "decision"):
        table.add_column(name)
    for row in rows:
        used = ["?" if part is None else f"{part:.1f}" for part in row.used]
        total = "?" if row.total is None else f"{row.total:g}"
        owners = Text(f"{row.devices} x {'+'.join(row.components)}")
        table.add_row(owners, *used, total, Text(f"{row.decision}: {row.reason}"))
    return table
