"""A plan as one HTML file that opens from disk: everything inlined, nothing loaded, nothing of the user's run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from roost.placement.plan import Plan
from roost.view.page_data import page_data

# One style and one script, in this order: what comes later overrides, and the last script starts the page.
STYLES = ("page", "grid", "details", "sections", "narrow", "print")
SCRIPTS = (
    "elements", "model", "node_filter", "tip", "rows", "cells", "grid", "overview", "details", "phases", "routes",
    "findings", "legend", "page",
)  # fmt: skip
_MARKER = re.compile(r"\{\{(\w+)\}\}")
# What could end a script element, or what older browsers take for a line's end inside one.
_ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def plan_to_html(plan: Plan) -> str:
    """The page of a plan: its grid, details of every process, phases, weight routes and findings.

    >>> import roost
    >>> page = plan_to_html(roost.plan({"num_gpus_per_node": 2, "actor_train": {"device_mapping": "0-1"}}))
    >>> page.startswith("<!doctype html>"), "<link" in page, "http" in page.replace("http-equiv", "")
    (True, False, False)
    """
    style = "\n".join(_page_file(f"{name}.css") for name in STYLES)
    # A function of its own keeps the page's names out of the browser's.
    script = "\n".join(['"use strict";', "(() => {", *(_page_file(f"{name}.js") for name in SCRIPTS), "})();"])
    parts = {
        "policy": html.escape(_policy(style, script)),
        "title": html.escape(_printable(f"{plan.file or 'plan'}: Roost plan")),
        "style": style,
        "script": script,
        "data": embedded_json(page_data(plan)),
    }
    # All markers are filled in one pass, so that one inside the user's text stays text.
    return _MARKER.sub(lambda found: parts[found[1]], _page_file("plan.html"))


def _page_file(name: str) -> str:
    return (files("roost.view") / "page" / name).read_text(encoding="utf-8")


def embedded_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element whatever its strings contain.

    >>> embedded_json({"name": "</script><b>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], text)


def _policy(style: str, script: str) -> str:
    """What the browser may use: this style and this script, by their hashes, and nothing from anywhere else."""
    return f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _printable(text: str) -> str:
    """Text that UTF-8 can hold: paths may have bytes that are no characters."""
    return text.encode("utf-8", "replace").decode()
