"""The phases of a plan in an SVG: for each class of devices who runs, stays, sleeps or stops, and the memory of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roost.placement.phases import Phase, State
from roost.view.device_phases import ComponentPhases, DevicePhases, MemoryUse, PhaseCell
from roost.view.marks import Mark
from roost.view.svg_drawing import Element, add, fitted, width

NAME, BAR = 188, 26
HATCHED = (State.SLEEPS, State.OFFLOADED)


def draw_phases(
    parent: Element, tables: Sequence[DevicePhases], marks: Mapping[str, Mark], left: float, top: float, room: float
) -> float:
    """Draw the tables from `top` on; returns where they end."""
    for table in tables:
        top = _draw_table(parent, table, marks, left, top, room) + 20
    return top


def add_hatches(parent: Element, marks: Sequence[Mark]) -> None:
    """A hatch in each component's colour: what is not in the device's memory."""
    for number, mark in enumerate(marks):
        hatch = add(
            parent, "pattern", id=f"hatch-{number}", width=8, height=8, patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)",
        )  # fmt: skip
        add(hatch, "rect", width=3, height=8, fill=mark.colour, fill_opacity=0.45)


def _draw_table(
    parent: Element, table: DevicePhases, marks: Mapping[str, Mark], left: float, top: float, room: float
) -> float:
    title = add(parent, "g")
    words = table.title if table.decision is not None else "without an accelerator"
    decided = f"{table.decision.value}: {table.reason}" if table.decision is not None else ""
    add(title, "title", " · ".join(part for part in (words, table.machine, decided) if part))
    shown = fitted(words, room * 0.6, 13)
    add(title, "text", shown, x=left, y=top + 12, class_="head")
    x = left + width(shown, 13) + 16
    add(title, "text", fitted(table.machine, left + room - x, 12), x=x, y=top + 12, class_="dim")
    if decided:
        top += 18
        add(title, "text", fitted(decided, room, 12), x=left, y=top + 12, class_="dim")
    wide = (room - NAME) / len(Phase)
    for number, phase in enumerate(Phase):
        add(parent, "text", phase.value, x=left + NAME + number * wide + 6, y=top + 30, class_="small dim")
    top += 36
    for row in table.rows:
        _draw_component(parent, row, list(marks).index(row.component), marks[row.component], left, top, wide)
        top += BAR + 3
    if table.memory:
        add(parent, "text", "memory of each", x=left, y=top + 12, class_="small dim")
        for number in range(len(Phase)):
            _draw_memory(parent, table, number, marks, left + NAME + number * wide, top + 2, wide - 8)
        top += 30
    return top


def _draw_component(
    parent: Element, row: ComponentPhases, number: int, mark: Mark, left: float, top: float, wide: float
) -> None:
    name = add(parent, "g")
    add(name, "title", row.component)
    add(name, "rect", x=left, y=top + 3, width=26, height=20, rx=4, fill=mark.colour)
    add(name, "text", mark.short, x=left + 13, y=top + 17, fill=mark.ink, class_="small bold middle")
    add(name, "text", fitted(row.component, NAME - 40, 12), x=left + 33, y=top + 17)
    for index, (cell, words) in enumerate(zip(row.cells, row.words, strict=True)):
        x = left + NAME + index * wide
        bar = add(parent, "g")
        add(bar, "title", f"{row.component}, {list(Phase)[index].value}: {words}{_sizes(cell)}")
        add(bar, "rect", x=x, y=top, width=wide - 2, height=BAR, rx=3, **_look(cell.state, number, mark))
        ink = mark.ink if cell.state is State.RUNS else None
        shown = fitted(words, wide - 8, 12)
        if cell.state in HATCHED:
            add(bar, "rect", x=x + 3, y=top + 5, width=width(shown, 12), height=16, rx=3, class_="paper", opacity=0.8)
        add(bar, "text", shown, x=x + 6, y=top + 17, fill=ink)


def _look(state: State, number: int, mark: Mark) -> dict[str, Any]:
    if state is State.RUNS:
        return {"fill": mark.colour}
    if state is State.STAYS:
        return {"fill": mark.colour, "fill_opacity": 0.24}
    if state in HATCHED:
        return {"fill": f"url(#hatch-{number})"}
    return {"class_": "empty"}


def _sizes(cell: PhaseCell) -> str:
    parts = [f"{cell.device_gib:.1f} GiB"] if cell.device_gib else []
    parts += [f"{cell.host_gib:.1f} GiB on the host"] if cell.host_gib else []
    return f", {' and '.join(parts)}" if parts else ""


def _draw_memory(
    parent: Element, table: DevicePhases, number: int, marks: Mapping[str, Mark], left: float, top: float, room: float
) -> None:
    use: MemoryUse = table.memory[number]
    bar = add(parent, "g")
    add(bar, "title", f"{list(Phase)[number].value}: {use.words}")
    whole = max(use.total_gib or 0.0, use.known_gib) or 1.0
    add(bar, "rect", x=left, y=top, width=room, height=9, rx=3, class_="free" if use.is_whole else "empty")
    x = left
    for row in table.rows:
        size = (row.cells[number].device_gib or 0.0) / whole * room
        if size > 0:
            add(bar, "rect", x=x, y=top, width=size, height=9, fill=marks[row.component].colour)
            x += size
    add(bar, "text", fitted(use.words, room, 11), x=left, y=top + 21, class_="small dim")
