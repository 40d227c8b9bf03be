"""Brace expansion: the words that `{a,b}` and `{1..4}` stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from roost.config.shell.syntax import Literal, Parameter, Part, Word, word_of

_PIECE = re.compile(r"[{},]|\.\.|[^{},.]+|\.")
_SEQUENCE = re.compile(
    r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,6}))?|([a-z]|[A-Z])\.\.([a-zA-Z])(?:\.\.(-?\d{1,6}))?"
)
_VARIABLE = re.compile(r"\$[A-Za-z_]\w*")


def with_braces(word: Word) -> Iterator[Word]:
    """The words that a word with braces stands for; quoted braces do not count.

    >>> [one.text for one in with_braces(Word((Literal("x{a,b{1..2},}"),), (None, None, None)))]
    ['xa', 'xb1', 'xb2', 'x']
    """
    if not any(isinstance(part, Literal) and not part.is_quoted and "{" in part.text for part in word.parts):
        yield word
        return
    pieces: list[Part] = []
    for part in word.parts:
        if isinstance(part, Literal) and not part.is_quoted:
            pieces += [Literal(part.text[match.start() : match.end()]) for match in _PIECE.finditer(part.text)]
        else:
            pieces.append(part)
    for found in _expanded(pieces):
        yield word_of(list(_joined_names(found)), word.position)


def _is_literal(piece: Part, text: str) -> bool:
    return isinstance(piece, Literal) and not piece.is_quoted and piece.text == text


def _expanded(pieces: list[Part]) -> Iterator[list[Part]]:
    for at, piece in enumerate(pieces):
        is_empty = at == 0 and len(pieces) > 1 and _is_literal(pieces[1], "}")  # {} is a word of its own
        if not _is_literal(piece, "{") or is_empty or (commas := _closed(pieces, at + 1)) is None:
            continue
        inner, after = pieces[at + 1 : commas[-1]], pieces[commas[-1] + 1 :]
        for choice in _choices(pieces, [at, *commas]) if len(commas) > 1 else _sequence(inner):
            for rest in _expanded(after):
                yield [*pieces[:at], *choice, *rest]
        return
    yield pieces


def _closed(pieces: list[Part], start: int) -> list[int] | None:
    """Indexes of the commas and the end of the brace that opened before `start`; None if it is not closed."""
    depth, commas, is_sequence = 0, list[int](), False
    for at in range(start, len(pieces)):
        if _is_literal(pieces[at], "{"):
            depth += 1
        elif depth == 0 and _is_literal(pieces[at], ","):
            commas.append(at)
        elif depth == 0 and _is_literal(pieces[at], ".."):
            is_sequence = True
        elif _is_literal(pieces[at], "}"):
            if depth == 0 and (commas or is_sequence):
                return [*commas, at]
            depth = max(0, depth - 1)
    return None


def _choices(pieces: list[Part], ends: list[int]) -> Iterator[list[Part]]:
    for first, last in pairwise(ends):
        yield from _expanded(pieces[first + 1 : last])


def _sequence(inner: Sequence[Part]) -> Iterator[list[Part]]:
    """The numbers or letters of `{first..last..step}`; other text stays as it is."""
    text = "".join(piece.text if isinstance(piece, Literal) and not piece.is_quoted else " " for piece in inner)
    match = _SEQUENCE.fullmatch(text)
    if match is None:
        yield [Literal("{"), *inner, Literal("}")]
        return
    first, last, step = match.group(1, 2, 3) if match[1] else match.group(4, 5, 6)
    for one in _steps(first, last, step or "1"):
        yield [Literal(one)]


def _steps(first: str, last: str, step: str) -> Iterator[str]:
    """The words of a sequence; numbers that begin with 0 have the same width.

    >>> list(_steps("08", "10", "1")), list(_steps("c", "a", "1")), list(_steps("0", "5", "2"))
    (['08', '09', '10'], ['c', 'b', 'a'], ['0', '2', '4'])
    """
    start, end = (ord(one) if one.isalpha() else int(one) for one in (first, last))
    by = (abs(int(step)) or 1) * (1 if end >= start else -1)
    is_padded = any(re.match(r"-?0\d", one) for one in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    for number in range(start, end + (1 if by > 0 else -1), by):
        yield chr(number) if first.isalpha() else str(number).zfill(width)


def _joined_names(parts: Sequence[Part]) -> Iterator[Part]:
    """Parts with text after `$X` joined to its name, since braces are expanded first: `$X{1,2}` is `$X1 $X2`."""
    name: Parameter | None = None
    for part in parts:
        if name is not None and isinstance(part, Literal) and not part.is_quoted:
            more = re.match(r"\w*", part.text, re.ASCII)
            length = more.end() if more else 0
            name = replace(name, name=name.name + part.text[:length], raw=name.raw + part.text[:length])
            part = Literal(part.text[length:])
            if not part.text:
                continue
        if name is not None:
            yield name
        name = part if isinstance(part, Parameter) and not part.is_quoted and _VARIABLE.fullmatch(part.raw) else None
        if name is None:
            yield part
    if name is not None:
        yield name
