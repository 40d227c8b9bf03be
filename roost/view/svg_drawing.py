"""Shapes and text of an SVG, with everything a user wrote escaped. Lengths are in pixels."""

from __future__ import annotations

import re
from xml.etree import ElementTree

NAMESPACE = "http://www.w3.org/2000/svg"
Element = ElementTree.Element
# XML 1.0 has no way to write these, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LETTER = 0.6  # of the font size: the width of a letter, on the wide side, since fonts differ


def add(parent: Element, kind: str, words: str | None = None, **attributes: object) -> Element:
    """A new element under `parent`; an attribute's underscores stand for hyphens, None leaves it out.

    >>> root = Element("g")
    >>> _ = add(root, "text", "a<b", x=1.5, font_size=12, class_=None)
    >>> ElementTree.tostring(root, encoding="unicode")
    '<g><text x="1.5" font-size="12">a&lt;b</text></g>'
    """
    named = {
        name.rstrip("_").replace("_", "-"): spell(value) for name, value in attributes.items() if value is not None
    }
    made = ElementTree.SubElement(parent, kind, named)
    if words is not None:
        made.text = printable(words)
    return made


def spell(value: object) -> str:
    """An attribute's value; numbers without noise behind the point."""
    return f"{round(value, 2):g}" if isinstance(value, float) else printable(str(value))


def printable(text: str) -> str:
    """The text with what XML cannot hold replaced.

    >>> printable("a\\x00b") == "a\\ufffdb"
    True
    """
    return _NOT_XML.sub("\ufffd", text)


def width(text: str, size: float) -> float:
    """About how wide a text is."""
    return len(text) * size * _LETTER


def fitted(text: str, room: float, size: float) -> str:
    """The text, cut where it would not fit; the whole of it belongs into a title.

    >>> fitted("rollout", 100, 12), fitted("a very long name", 60, 12)
    ('rollout', 'a very …')
    """
    most = max(1, int(room / (size * _LETTER)))
    return text if len(text) <= most else f"{text[: most - 1]}…"
