"""Sanitize text from exceptions, models and servers for the terminal."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Escape sequences: CSI (colours, cursor), OSC and the like (titles, links, clipboard) up to their end, and short ones.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_KEPT = "\n\t"


def plain_text(text: str) -> str:
    r"""Remove escape sequences; other control characters become spaces, newlines stay.

    >>> plain_text("\x1b[31mred\x1b[0m \x1b]0;title\x07line\x08\r\nnext\ttab")
    'red line  \nnext\ttab'
    """
    if text.isprintable():
        return text
    text = _ESCAPES.sub("", text)
    return "".join(one if one.isprintable() or one in _KEPT else " " for one in text)


def plain_line(text: str) -> str:
    r"""Like `plain_text`, in one line.

    >>> plain_line("a\n\x1b[2Jb")
    'a b'
    """
    return " ".join(plain_text(text).split("\n")).replace("\t", " ")


class PlainConsole(Console):
    """Console that strips control characters from what is printed; only its own styles apply."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain_text(text), **options)  # whole, before highlighting cuts it into pieces

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_clean = segment.control or segment.text.isprintable()
            yield segment if is_clean else Segment(plain_text(segment.text), segment.style)


class PlainFormatter(logging.Formatter):
    """Formats log lines without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return plain_text(super().format(record))


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback to stderr as Python does, without control characters; for `sys.excepthook`."""
    print(plain_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
