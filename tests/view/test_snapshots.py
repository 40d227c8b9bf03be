"""The documents' examples in every view, held against pictures that somebody has looked at."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from roost.view.html import page_data
from roost.view.svg import plan_to_svg
from roost.view.terminal_grid import print_grid
from roost.view.text import print_plan
from tests.view.pictures import PICTURES, ROOT

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "ROOST_UPDATE_SNAPSHOTS"  # set to 1 to write the pictures anew; look at them before keeping them


def terminal(plan):
    console = Console(file=io.StringIO(), width=100, highlight=False, color_system=None)
    print_plan(plan, console)
    console.print()
    print_grid(plan, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def page(plan):
    """Content of the page; its drawing is tested in a browser."""
    return json.dumps(page_data(plan), indent=1) + "\n"


VIEWS = {"svg": plan_to_svg, "txt": terminal, "json": page}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PICTURES)
def test_snapshot(name, view, monkeypatch):
    monkeypatch.chdir(ROOT)
    made, file = VIEWS[view](PICTURES[name]()), SNAPSHOTS / f"{name}.{view}"
    if os.environ.get(UPDATE) == "1":
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(made, encoding="utf-8")
    assert made == file.read_text(encoding="utf-8"), f"it looks different now; {UPDATE}=1 writes {file} anew"
