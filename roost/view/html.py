"""A plan as one HTML file that opens from disk: everything inlined, nothing loaded, nothing of the user's run."""

from __future__ import annotations

from importlib.resources import files

from roost.placement.plan import Plan
from roost.view.one_file_page import one_file_page
from roost.view.page_data import page_data

# One style and one script, in this order: what comes later overrides, and the last script starts the page.
STYLES = ("page", "grid", "details", "sections", "narrow", "print")
SCRIPTS = (
    "elements", "model", "node_filter", "tip", "rows", "cells", "grid", "overview", "details", "phases", "routes",
    "findings", "legend", "page",
)  # fmt: skip


def plan_to_html(plan: Plan) -> str:
    """The page of a plan: its grid, details of every process, phases, weight routes and findings.

    >>> import roost
    >>> page = plan_to_html(roost.plan({"num_gpus_per_node": 2, "actor_train": {"device_mapping": "0-1"}}))
    >>> page.startswith("<!doctype html>"), "<link" in page, "http" in page.replace("http-equiv", "")
    (True, False, False)
    """
    title = f"{plan.file or 'plan'}: Roost plan"
    return one_file_page(_page_file, "plan.html", STYLES, SCRIPTS, title, page_data(plan))


def _page_file(name: str) -> str:
    return (files("roost.view") / "page" / name).read_text(encoding="utf-8")
