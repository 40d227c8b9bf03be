"""A plan as SVG. Lengths are in pixels; all text is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from roost.config.ranks import spell_ranks
from roost.placement.memory.phases import Phase, State
from roost.placement.plan import Plan
from roost.view.grid_model import INK, Grid, Holder, Mark, NodeLayout, Run, grid
from roost.view.phases import ComponentPhases, DevicePhases, MemoryUse, PhaseCell, device_phases, machine_text
from roost.view.text import machines_line

NAMESPACE = "http://www.w3.org/2000/svg"
Element = ElementTree.Element
# XML 1.0 cannot represent these characters, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CHARACTER = 0.6  # width of a character as a fraction of the font size, estimated high because fonts differ


def add(parent: Element, kind: str, words: str | None = None, **attributes: object) -> Element:
    """Add an element to `parent`. Underscores in attribute names become hyphens; attributes that are None are omitted.

    >>> root = Element("g")
    >>> _ = add(root, "text", "a<b", x=1.5, font_size=12, class_=None)
    >>> ElementTree.tostring(root, encoding="unicode")
    '<g><text x="1.5" font-size="12">a&lt;b</text></g>'
    """
    named = {
        name.rstrip("_").replace("_", "-"): spell(value) for name, value in attributes.items() if value is not None
    }
    result = ElementTree.SubElement(parent, kind, named)
    if words is not None:
        result.text = printable(words)
    return result


def spell(value: object) -> str:
    """Format an attribute's value; floats without trailing noise."""
    return f"{round(value, 2):g}" if isinstance(value, float) else printable(str(value))


def printable(text: str) -> str:
    """Replace characters that XML cannot contain.

    >>> printable("a\\x00b") == "a\\ufffdb"
    True
    """
    return _NOT_XML.sub("\ufffd", text)


def width(text: str, size: float) -> float:
    """Estimate the width of a text."""
    return len(text) * size * _CHARACTER


def fitted(text: str, room: float, size: float) -> str:
    """Cut a text that does not fit; the full text belongs in a title.

    >>> fitted("rollout", 100, 12), fitted("a very long name", 60, 12)
    ('rollout', 'a very …')
    """
    most = max(1, int(room / (size * _CHARACTER)))
    return text if len(text) <= most else f"{text[: most - 1]}…"


UNFOLDED_NODES = 32  # up to this many nodes are drawn node by node
MOST_ROWS = 64  # an irregular cluster is cut there
COLUMNS = 8  # accelerators side by side; a node with more has several lines
LABEL, CELL, GAP, PILL = 188, 54, 4, 22
STRIPE = 17
MOST_STRIPES = 4  # holders drawn in one cell; the rest are counted


def grid_width(result: Grid) -> float:
    """Width of the grid."""
    layouts = [run.layout for run in result.runs]
    columns = min(COLUMNS, max((len(layout.accelerators) for layout in layouts), default=0))
    has_others = any(layout.declared or layout.without_device for layout in layouts)
    return LABEL + columns * (CELL + GAP) + (190 if has_others else 0)


def draw_grid(parent: Element, result: Grid, left: float, top: float) -> float:
    """Draw the rows from `top`; return the end position."""
    marks = {mark.component: mark for mark in result.marks}
    rows = result.rows(UNFOLDED_NODES)
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
    machine = machine_text(layout.machine, layout.machine.accelerators) if layout.machine.accelerators else ""
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
    add(cell, "title", _tooltip(row, f"accelerator {index}", holders))
    if not holders:
        add(cell, "rect", x=x, y=y, width=CELL, height=height, rx=5, class_="free")
        return
    shown = holders if len(holders) <= MOST_STRIPES else holders[: MOST_STRIPES - 1]
    stripes = len(shown) + (len(shown) < len(holders))
    each = height / stripes
    for number, holder in enumerate(shown):
        mark = marks[holder.component]
        add(cell, "rect", x=x, y=y + number * each, width=CELL, height=each - 1, rx=3, fill=mark.colour)
        if _spans_next(row.layout, index, number):
            # A process that holds the next accelerator as well is one bar across both, round at its ends only.
            start, line = x + CELL - 4, y + number * each
            add(cell, "rect", x=start, y=line, width=GAP + 8, height=each - 1, fill=mark.colour)
        words = f"{mark.short} {_ranks(row, holder, 6)}".strip()
        middle, line = x + CELL / 2, y + number * each + (each - 1) / 2 + 4
        add(cell, "text", words, x=middle, y=line, fill=mark.ink, class_="small middle")
    if len(shown) < len(holders):
        line = y + len(shown) * each + each / 2 + 4
        add(cell, "text", f"+{len(holders) - len(shown)}", x=x + CELL / 2, y=line, class_="small dim middle")


def _spans_next(layout: NodeLayout, index: int, number: int) -> bool:
    if (index + 1) % COLUMNS == 0 or index + 1 == len(layout.accelerators):
        return False
    own, other = layout.accelerators[index], layout.accelerators[index + 1]
    return len(own) == len(other) and own[number] == other[number]


def _draw_pill(
    parent: Element, row: Run, name: str, holders: tuple[Holder, ...], marks: Mapping[str, Mark], x: float, y: float
) -> None:
    pill = add(parent, "g")
    add(pill, "title", _tooltip(row, name, holders))
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
    """Ranks of a holder if they fit; only their count for a row of several nodes, whose ranks differ."""
    many = len(holder.offsets)
    words = spell_ranks(row.ranks(holder), limit=4)
    if len(row.nodes) > 1 or len(words) > most:
        return f"×{many}" if many > 1 else ""
    return words


def _tooltip(row: Run, device: str, holders: tuple[Holder, ...]) -> str:
    held = [f"{holder.component} {row.spell(holder)}" for holder in holders]
    return f"{row.label}, {device}: {', '.join(held) or 'free'}"


NAME, BAR = 188, 26
HATCHED = (State.SLEEPS, State.OFFLOADED)


def draw_phases(
    parent: Element, tables: Sequence[DevicePhases], marks: Mapping[str, Mark], left: float, top: float, room: float
) -> float:
    """Draw the tables from `top`; return the end position."""
    for table in tables:
        top = _draw_table(parent, table, marks, left, top, room) + 20
    return top


def add_hatches(parent: Element, marks: Sequence[Mark]) -> None:
    """Add a hatch in each component's colour, for memory that is not on the device."""
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
    for index, (cell, words) in enumerate(zip(row.cells, row.text, strict=True)):
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
    add(bar, "title", f"{list(Phase)[number].value}: {use.text}")
    whole = max(use.total_gib or 0.0, use.known_gib) or 1.0
    add(bar, "rect", x=left, y=top, width=room, height=9, rx=3, class_="free" if use.is_whole else "empty")
    x = left
    for row in table.rows:
        size = (row.cells[number].device_gib or 0.0) / whole * room
        if size > 0:
            add(bar, "rect", x=x, y=top, width=size, height=9, fill=marks[row.component].colour)
            x += size
    add(bar, "text", fitted(use.text, room, 11), x=left, y=top + 21, class_="small dim")


MARGIN, NARROWEST = 24, 760
# Text on a component's colour has its own fill; everything else follows the reader's light or dark theme.
STYLE = f"""
text {{ font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }}
text:not([fill]) {{ fill: {INK}; }}
text.small {{ font-size: 11px; }}
text.bold {{ font-weight: 700; }}
text.head {{ font-size: 13px; font-weight: 700; }}
text.title {{ font-size: 18px; font-weight: 700; }}
text.middle {{ text-anchor: middle; }}
text.dim {{ fill: #5c6673; }}
.paper {{ fill: #ffffff; }}
.free {{ fill: #e8ebf0; }}
.empty {{ fill: none; stroke: #cfd5dd; }}
@media (prefers-color-scheme: dark) {{
  text:not([fill]) {{ fill: #e7eaef; }}
  text.dim {{ fill: #99a4b3; }}
  .paper {{ fill: #14181d; }}
  .free {{ fill: #2a313b; }}
  .empty {{ stroke: #3a434f; }}
}}
"""


def plan_to_svg(plan: Plan) -> str:
    """Draw a plan as SVG; in a large cluster, runs of equal nodes are one row.

    >>> import roost
    >>> picture = plan_to_svg(roost.plan({"num_gpus_per_node": 2, "actor_train": {"device_mapping": "0-1"}}))
    >>> picture.startswith("<svg"), "node 0, accelerator 1: actor 1" in picture
    (True, True)
    """
    result = grid(plan)
    marks = {mark.component: mark for mark in result.marks}
    room = max(NARROWEST, grid_width(result))
    root = Element("svg", {"xmlns": NAMESPACE, "role": "img"})
    file = plan.file or "plan"
    add(root, "title", f"{file}: Roost plan")
    add(root, "style", STYLE)
    add_hatches(add(root, "defs"), result.marks)
    paper = add(root, "rect", class_="paper")
    add(root, "text", fitted(file, room, 18), x=MARGIN, y=MARGIN + 14, class_="title")
    about = f"{plan.notation.value} notation, {plan.mode.value} · {machines_line(plan.inventory)}"
    add(root, "text", about, x=MARGIN, y=MARGIN + 35, class_="dim")
    sizes = [part.world_size for part in plan.components]
    top = _draw_legend(root, result.marks, sizes, MARGIN + 50, room) + 18
    top = draw_grid(root, result, MARGIN, top) + 24
    top = draw_phases(root, device_phases(plan), marks, MARGIN, top, room)
    _set_size(root, paper, room + 2 * MARGIN, top)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _draw_legend(parent: Element, marks: Sequence[Mark], sizes: Sequence[int], top: float, room: float) -> float:
    x: float = MARGIN
    for mark, size in zip(marks, sizes, strict=True):
        words = fitted(f"{mark.component} {size:,}", room / 2, 12)
        wide = 33 + width(words, 12) + 16
        if x > MARGIN and x + wide > MARGIN + room:
            x, top = MARGIN, top + 26
        entry = add(parent, "g")
        add(entry, "title", f"{mark.component}, {size:,} processes")
        add(entry, "rect", x=x, y=top, width=26, height=20, rx=4, fill=mark.colour)
        add(entry, "text", mark.short, x=x + 13, y=top + 14, fill=mark.ink, class_="small bold middle")
        add(entry, "text", words, x=x + 33, y=top + 14)
        x += wide
    return top + 20


def _set_size(root: Element, paper: Element, wide: float, high: float) -> None:
    """Set the size of the picture, which is known once everything is drawn."""
    for element in (root, paper):
        element.set("width", f"{wide:g}")
        element.set("height", f"{high:g}")
    root.set("viewBox", f"0 0 {wide:g} {high:g}")
