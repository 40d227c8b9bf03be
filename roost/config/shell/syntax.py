"""Syntax tree of a bash script, with the position of each word."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from roost.config.findings import Position


class ShellError(ValueError):
    """A syntax error; the script is not parsed beyond it."""

    def __init__(self, what: str, position: Position) -> None:
        self.what, self.position = what, position
        super().__init__(what)


MAX_PLACES = 5_000  # of one text; with more, only the position of its start is kept
# Source map of a text: offsets in order, the position of the character at each offset, and whether the characters after
# it have that same position, such as those of an environment variable, or the positions that follow it in the file.
Places = tuple[tuple[int, Position, bool], ...]


def line_places(text: str, file: str | None) -> Places:
    """Source map of a whole file, line by line."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    return tuple((start, (file, number, 1), False) for number, start in enumerate(starts, 1))


def position_in(places: Places, at: int) -> Position:
    """Position of the character at an offset."""
    start, (file, line, column), is_fixed = places[bisect.bisect_right(places, at, key=itemgetter(0)) - 1]
    return (file, line, column) if is_fixed else (file, line, (column or 1) + at - start)


def places_between(places: Places, start: int, end: int) -> Places:
    """Source map of the text between two offsets."""
    first = bisect.bisect_right(places, start, key=itemgetter(0))
    last = bisect.bisect_left(places, end, key=itemgetter(0))
    begin = (0, position_in(places, start), places[first - 1][2])
    return (begin, *((at - start, position, is_fixed) for at, position, is_fixed in places[first:last]))


class SourceText(str):
    """Text with its source map, since joined lines and removed backslashes shift it against the file."""

    places: Places

    def __new__(cls, text: str, places: Places) -> SourceText:
        made = super().__new__(cls, text)
        made.places = places
        return made

    def __getitem__(self, index: Any) -> str:
        found = super().__getitem__(index)
        if not isinstance(index, slice) or index.step is not None or not found:
            return found
        start, end, _ = index.indices(len(self))
        return SourceText(found, places_between(self.places, start, end))


def joined_text(texts: Iterable[str]) -> str:
    """Concatenate texts, with the source maps of those that have one."""
    pieces, places, length = [], [], 0
    for text in texts:
        if isinstance(text, SourceText):
            places += [(length + at, position, is_fixed) for at, position, is_fixed in text.places]
        pieces.append(text)
        length += len(text)
    whole = "".join(pieces)
    return SourceText(whole, tuple(places)) if places and places[0][0] == 0 and len(places) <= MAX_PLACES else whole


def places_of(text: str, start: Position) -> Places:
    """Source map of a text; all of a plain text is at `start`."""
    return text.places if isinstance(text, SourceText) else ((0, start, True),)


def placed(text: str, start: Position) -> SourceText:
    """The text with a source map: its own, or `start` for all of it."""
    return text if isinstance(text, SourceText) else SourceText(text, places_of(text, start))


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands for itself; what is quoted is neither split nor matched as a pattern."""

    text: str
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$X`, `${X:-word}`, `${#X}`, `${!X}`, `${A[@]}` and the like."""

    name: str
    raw: str
    is_quoted: bool = False
    index: Word | None = None
    operator: str = ""
    argument: Word | None = None
    is_length: bool = False
    is_indirect: bool = False

    @property
    def is_list(self) -> bool:
        """Return True for `$@`, `${A[@]}` and the same with `*`."""
        return self.name in ("@", "*") or (self.index is not None and self.index.text in ("@", "*"))


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(command)`, backquotes, or `<(command)`; no body if it has a syntax error, or stands for a file name."""

    body: tuple[Statement, ...] | None
    raw: str
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((expression))`."""

    expression: Word
    raw: str
    is_quoted: bool = False


Part = Literal | Parameter | Substitution | Arithmetic


@dataclass(frozen=True, slots=True)
class Word:
    """One word before it is expanded."""

    parts: tuple[Part, ...]
    position: Position

    @property
    def text(self) -> str | None:
        """The text of a word without expansions; None for other words."""
        texts = [part.text for part in self.parts if isinstance(part, Literal)]
        return "".join(texts) if len(texts) == len(self.parts) else None


def word_of(parts: list[Part], position: Position) -> Word:
    """A word of these parts, with adjacent literals merged."""
    found: list[Part] = []
    for is_quoted, run in groupby(parts, lambda part: part.is_quoted if isinstance(part, Literal) else None):
        pieces = list(run)
        if is_quoted is None or len(pieces) == 1:
            found += pieces
        else:
            texts = [piece.text for piece in pieces if isinstance(piece, Literal)]
            found.append(Literal(joined_text(texts), is_quoted))
    return Word(tuple(found), position)


@dataclass(frozen=True, slots=True)
class Assignment:
    """`X=value`, `X+=value`, `A[i]=value` or `A=(...)`, whose items may have keys."""

    name: str
    value: Word | tuple[tuple[Word | None, Word], ...]
    position: Position
    index: Word | None = None
    appends: bool = False


@dataclass(eq=False, slots=True)
class Input:
    """Input of a command: text after `<<<`, or the here-document of `<<`; no body if it is a file."""

    body: Word | None = None
    delimiter: str = ""
    strips_tabs: bool = False
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments and the words of a command; `export A=(...)` has both."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    position: Position
    stdin: Input | None = None
    stdout: Word | None = None  # the file that its output goes to
    is_redirected: bool = False  # its output goes to a file or another descriptor
    appends: bool = False  # to that file
    merges_stderr: bool = False  # 2>&1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by `|`; a single one if it is only negated."""

    commands: tuple[Statement, ...]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class AndOr:
    """Commands joined by `&&` and `||`, each with the operator before it."""

    first: Statement
    rest: tuple[tuple[str, Statement], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }`, or a subshell: `( ... )`, or a command that `&` runs in the background.

    Another compound command with redirections is wrapped in a group that has them.
    """

    body: tuple[Statement, ...]
    is_subshell: bool = False
    stdin: Input | None = None
    stdout: Word | None = None
    is_background: bool = False
    is_redirected: bool = False  # its output goes to a file or another descriptor
    merges_stderr: bool = False  # 2>&1, or |&


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with their bodies; the last without a condition is `else`."""

    clauses: tuple[tuple[tuple[Statement, ...], tuple[Statement, ...]], ...]
    otherwise: tuple[Statement, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class Loop:
    """`while` and `until`."""

    condition: tuple[Statement, ...]
    body: tuple[Statement, ...]
    is_until: bool
    position: Position


@dataclass(frozen=True, slots=True)
class For:
    """`for X in words`, or over the arguments if there is no `in`.

    `for ((...))` has no name, and its words are the three expressions.
    """

    name: str
    words: tuple[Word, ...] | None
    body: tuple[Statement, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class Case:
    """`case word in` with patterns, bodies, and what ends each: `;;`, `;&` or `;;&`."""

    subject: Word
    clauses: tuple[tuple[tuple[Word, ...], tuple[Statement, ...], str], ...]
    position: Position


@dataclass(frozen=True, slots=True)
class Function:
    """A function definition."""

    name: str
    body: Statement


@dataclass(frozen=True, slots=True)
class Condition:
    """`[[ ... ]]`: words, and operators as plain text."""

    tokens: tuple[Word | str, ...]
    position: Position


@dataclass(frozen=True, slots=True)
class ArithmeticCommand:
    """`((expression))`."""

    expression: Word
    position: Position


Statement = Simple | Pipeline | AndOr | Group | If | Loop | For | Case | Function | Condition | ArithmeticCommand


@dataclass(frozen=True, slots=True)
class Choice:
    """Bodies that a function may have, depending on an unknown condition; None if it may be undefined."""

    bodies: tuple[Statement | None, ...]
    position: Position
