"""A plan as one SVG picture: the grid with its legend, and the phases under it. No scripts; text can be selected."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from roost.placement.plan import Plan
from roost.view.device_phases import device_phases
from roost.view.grid_model import grid
from roost.view.marks import INK, Mark
from roost.view.svg_drawing import NAMESPACE, Element, add, fitted, width
from roost.view.svg_grid import draw_grid, grid_width
from roost.view.svg_phases import add_hatches, draw_phases
from roost.view.text import machines_line

MARGIN, NARROWEST = 24, 760
# Text on a component's colour has its own fill; all else follows the reader's light or dark.
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
    """The picture of a plan; runs of equal nodes are one row in a large cluster.

    >>> import roost
    >>> picture = plan_to_svg(roost.plan({"num_gpus_per_node": 2, "actor_train": {"device_mapping": "0-1"}}))
    >>> picture.startswith("<svg"), "node 0, accelerator 1: actor 1" in picture
    (True, True)
    """
    made = grid(plan)
    marks = {mark.component: mark for mark in made.marks}
    room = max(NARROWEST, grid_width(made))
    root = Element("svg", {"xmlns": NAMESPACE, "role": "img"})
    file = plan.file or "plan"
    add(root, "title", f"{file}: Roost plan")
    add(root, "style", STYLE)
    add_hatches(add(root, "defs"), made.marks)
    paper = add(root, "rect", class_="paper")
    add(root, "text", fitted(file, room, 18), x=MARGIN, y=MARGIN + 14, class_="title")
    about = f"{plan.notation.value} notation, {plan.mode.value} · {machines_line(plan.inventory)}"
    add(root, "text", about, x=MARGIN, y=MARGIN + 35, class_="dim")
    sizes = [part.world_size for part in plan.components]
    top = _draw_legend(root, made.marks, sizes, MARGIN + 50, room) + 18
    top = draw_grid(root, made, MARGIN, top) + 24
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
    """The size is known when everything is drawn."""
    for element in (root, paper):
        element.set("width", f"{wide:g}")
        element.set("height", f"{high:g}")
    root.set("viewBox", f"0 0 {wide:g} {high:g}")
