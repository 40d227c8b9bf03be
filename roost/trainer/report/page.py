"""A run as one HTML file that opens from disk: everything inlined, nothing loaded, nothing of a model's text run."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from roost.trainer.metrics.json_lines import write_whole
from roost.trainer.report.page_data import page_data
from roost.trainer.run_folder import RunFolder
from roost.view.html import embedded_json

# In this order: what comes later overrides, and the last script starts the page.
STYLES = ("page", "charts", "timeline", "rollouts")
SCRIPTS = (
    "elements", "numbers", "tip", "chart_frame", "line_chart", "stacked_chart", "header", "charts", "times", "busy",
    "timeline_drawing", "timeline", "rollouts", "page",
)  # fmt: skip
_MARKER = re.compile(r"\{\{(\w+)\}\}")


def write_report(run: RunFolder) -> Path:
    """Write the page of a run, as far as the run is, and say where it is."""
    write_whole(run.report_file, [run_to_html(page_data(run)).encode()])
    return run.report_file


def run_to_html(data: dict[str, Any]) -> str:
    """The page of a run from what `page_data` says of it."""
    style = "\n".join(_page_file(f"{name}.css") for name in STYLES)
    # A function of its own keeps the page's names out of the browser's.
    script = "\n".join(['"use strict";', "(() => {", *(_page_file(f"{name}.js") for name in SCRIPTS), "})();"])
    allowed = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    title = f"{data['name']}: Roost run".encode("utf-8", "replace").decode()
    parts = {
        "policy": html.escape(allowed),
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": embedded_json(data),
    }
    # All markers are filled in one pass, so that one inside a model's text stays text.
    return _MARKER.sub(lambda found: parts[found[1]], _page_file("run.html"))


def _page_file(name: str) -> str:
    return (files("roost.trainer.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
