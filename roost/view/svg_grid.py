"""The grid of a plan in an SVG: a line for each node or run of equal nodes."""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.ranks import spell_ranks
from roost.view.device_phases import machine_words
from roost.view.grid_model import Grid, Holder, NodeLayout, Run
from roost.view.marks import Mark
from roost.view.svg_drawing import Element, add, fitted, width

UNFOLDED_NODES = 32  # a cluster of up to so many nodes is drawn node by node
MOST_ROWS = 64  # an irregular cluster is cut there
COLUMNS = 8  # accelerators side by side; a node with more has several lines
LABEL, CELL, GAP, PILL = 188, 54, 4, 22
STRIPE = 17
MOST_STRIPES = 4  # holders drawn in one cell; the rest are counted


def grid_width(made: Grid) -> float:
    """The room that the grid takes."""
    layouts = [run.layout for run in made.runs]
    columns = min(COLUMNS, max((len(layout.accelerators) for layout in layouts), default=0))
    has_others = any(layout.declared or layout.without_device for layout in layouts)
    return LABEL + columns * (CELL + GAP) + (190 if has_others else 0)


def draw_grid(parent: Element, made: Grid, left: float, top: float) -> float:
    """Draw the rows from `top` on; returns where they end."""
    marks = {mark.component: mark for mark in made.marks}
    rows = made.rows(UNFOLDED_NODES)
    columns = min(COLUMNS, max((len(row.layout.accelerators) for row in rows), default=0))
    for index in range(columns):
        x = left + LABEL + index * (CELL + GAP) + CELL / 2
        add(parent, "text", str(index), x=x, y=top + 10, class_="small dim middle")
    top += 18
    for row in rows[:MOST_ROWS]:
        _draw_row(parent, row, marks, left, top, columns)
        top += _height(row.layout) + 8
    if len(rows) > MOST_ROWS:
        nodes = sum(len(row.nodes) for row in rows[MOST_ROWS:])
        more = f"and {nodes:,} more nodes in {len(rows) - MOST_ROWS:,} rows"
        add(parent, "text", more, x=left, y=top + 12, class_="dim")
        top += 20
    return top


def _cell_height(layout: NodeLayout) -> float:
    most = max((min(len(holders), MOST_STRIPES) for holders in layout.accelerators), default=1)
    return max(2, most) * STRIPE


def _height(layout: NodeLayout) -> float:
    lines = -(-len(layout.accelerators) // COLUMNS)
    others = len(layout.declared) + len(layout.without_device)
    return max(34, lines * (_cell_height(layout) + GAP) - GAP, others * (PILL + GAP) - GAP)


def _draw_row(parent: Element, row: Run, marks: Mapping[str, Mark], left: float, top: float, columns: int) -> None:
    layout = row.layout
    machine = machine_words(layout.machine, layout.machine.accelerators) if layout.machine.accelerators else ""
    about = " · ".join(part for part in (*layout.groups, machine) if part)
    label = add(parent, "g")
    add(label, "title", f"{row.label}: {about}" if about else row.label)
    add(label, "text", fitted(row.label, LABEL, 13), x=left, y=top + 14, class_="head")
    add(label, "text", fitted(about, LABEL, 11), x=left, y=top + 29, class_="small dim")
    for index in range(len(layout.accelerators)):
        x = left + LABEL + index % COLUMNS * (CELL + GAP)
        y = top + index // COLUMNS * (_cell_height(layout) + GAP)
        _draw_cell(parent, row, index, marks, x, y)
    x = left + LABEL + columns * (CELL + GAP) + 8
    for device in layout.declared:
        _draw_pill(parent, row, f"{device.kind} {device.index}", device.holders, marks, x, top)
        top += PILL + GAP
    for holder in layout.without_device:
        _draw_pill(parent, row, "CPU", (holder,), marks, x, top)
        top += PILL + GAP


def _draw_cell(parent: Element, row: Run, index: int, marks: Mapping[str, Mark], x: float, y: float) -> None:
    holders, height = row.layout.accelerators[index], _cell_height(row.layout)
    cell = add(parent, "g")
    add(cell, "title", _in_words(row, f"accelerator {index}", holders))
    if not holders:
        add(cell, "rect", x=x, y=y, width=CELL, height=height, rx=5, class_="free")
        return
    shown = holders if len(holders) <= MOST_STRIPES else holders[: MOST_STRIPES - 1]
    stripes = len(shown) + (len(shown) < len(holders))
    each = height / stripes
    for number, holder in enumerate(shown):
        mark = marks[holder.component]
        add(cell, "rect", x=x, y=y + number * each, width=CELL, height=each - 1, rx=3, fill=mark.colour)
        if _goes_on(row.layout, index, number):
            # A process that holds the next accelerator as well is one bar across both, round at its ends only.
            start, line = x + CELL - 4, y + number * each
            add(cell, "rect", x=start, y=line, width=GAP + 8, height=each - 1, fill=mark.colour)
        words = f"{mark.short} {_ranks(row, holder, 6)}".strip()
        middle, line = x + CELL / 2, y + number * each + (each - 1) / 2 + 4
        add(cell, "text", words, x=middle, y=line, fill=mark.ink, class_="small middle")
    if len(shown) < len(holders):
        line = y + len(shown) * each + each / 2 + 4
        add(cell, "text", f"+{len(holders) - len(shown)}", x=x + CELL / 2, y=line, class_="small dim middle")


def _goes_on(layout: NodeLayout, index: int, number: int) -> bool:
    if (index + 1) % COLUMNS == 0 or index + 1 == len(layout.accelerators):
        return False
    own, other = layout.accelerators[index], layout.accelerators[index + 1]
    return len(own) == len(other) and own[number] == other[number]


def _draw_pill(
    parent: Element, row: Run, name: str, holders: tuple[Holder, ...], marks: Mapping[str, Mark], x: float, y: float
) -> None:
    pill = add(parent, "g")
    add(pill, "title", _in_words(row, name, holders))
    shown = fitted(name, 90, 11)
    room = width(shown, 11) + 14
    add(pill, "rect", x=x, y=y, width=room, height=PILL, rx=4, class_="free")
    add(pill, "text", shown, x=x + 7, y=y + 15, class_="small dim")
    for holder in holders:
        mark = marks[holder.component]
        words = f"{mark.short} {_ranks(row, holder, 11)}".strip()
        x += room + 1
        room = width(words, 11) + 12
        add(pill, "rect", x=x, y=y, width=room, height=PILL, rx=4, fill=mark.colour)
        add(pill, "text", words, x=x + 6, y=y + 15, fill=mark.ink, class_="small")


def _ranks(row: Run, holder: Holder, most: int) -> str:
    """The ranks on one node where they fit; in a row of many nodes they differ, and only their number is told."""
    many = len(holder.offsets)
    words = spell_ranks(row.ranks(holder), limit=4)
    if len(row.nodes) > 1 or len(words) > most:
        return f"×{many}" if many > 1 else ""
    return words


def _in_words(row: Run, device: str, holders: tuple[Holder, ...]) -> str:
    held = [f"{holder.component} {row.spell(holder)}" for holder in holders]
    return f"{row.label}, {device}: {', '.join(held) or 'free'}"
