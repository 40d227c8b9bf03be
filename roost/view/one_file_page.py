"""Pages that are one HTML file and open from disk: everything inlined, nothing loaded, no text of others run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MARKER = re.compile(r"\{\{(\w+)\}\}")
# What could end a script element, or what older browsers take for a line's end inside one.
_ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def one_file_page(
    read: Callable[[str], str],
    template: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    title: str,
    data: Mapping[str, Any],
) -> str:
    """A page of a template with markers, styles and scripts in the order given, and data for the scripts.

    >>> files = {"page.html": "<title>{{title}}</title><script>{{data}}</script>", "a.css": "", "b.js": ""}
    >>> one_file_page(files.__getitem__, "page.html", ["a"], ["b"], "<me>", {"text": "</script>{{title}}"})
    '<title>&lt;me&gt;</title><script>{"text":"\\\\u003c/script\\\\u003e{{title}}"}</script>'
    """
    style = "\n".join(read(f"{name}.css") for name in styles)
    # A function of its own keeps the page's names out of the browser's.
    script = "\n".join(['"use strict";', "(() => {", *(read(f"{name}.js") for name in scripts), "})();"])
    parts = {
        "policy": html.escape(_policy(style, script)),
        "title": html.escape(_printable(title)),
        "style": style,
        "script": script,
        "data": embedded_json(data),
    }
    # All markers are filled in one pass, so that one inside somebody's text stays text.
    return _MARKER.sub(lambda found: parts[found[1]], read(template))


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
