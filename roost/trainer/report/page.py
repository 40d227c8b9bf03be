"""The report of a run as one self-contained HTML file; text of models is never executed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from roost.trainer.metrics.json_lines import write_whole
from roost.trainer.report.page_data import page_data
from roost.trainer.run_folder import RunFolder
from roost.view.html import one_file_page

# Order matters: later styles override, and the last script starts the page.
STYLES = ("page", "charts", "timeline", "rollouts")
SCRIPTS = (
    "elements", "numbers", "tip", "chart_frame", "line_chart", "stacked_chart", "header", "charts", "times", "busy",
    "timeline_drawing", "timeline", "rollouts", "page",
)  # fmt: skip


def write_report(run: RunFolder) -> Path:
    """Write the report of a run so far and return its path."""
    write_whole(run.report_file, [run_to_html(page_data(run)).encode()])
    return run.report_file


def run_to_html(data: dict[str, Any]) -> str:
    """Render the page from `page_data`."""
    return one_file_page(page_file, "run.html", STYLES, SCRIPTS, f"{data['name']}: Roost run", data)


def page_file(name: str) -> str:
    """Template, style or script of a page."""
    return (files("roost.trainer.report") / "page" / name).read_text(encoding="utf-8")
