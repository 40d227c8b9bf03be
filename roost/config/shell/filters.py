"""Filters of a pipeline, such as `sed` and `tr`, on a text that is known."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from roost.config.shell.arithmetic import NotKnown, evaluate
from roost.config.shell.patterns import regular

MAX_TEXT = 400  # that an expression with repetitions is tried on
MAX_REPEATS = 2
MAX_MATCHED = 20_000  # characters that `grep` is tried on
_REPEATS = re.compile(r"(?<!\\)[*+?]")
_SET = re.compile(r"\[\^?\]?(?:\[:\w+:\]|[^\]])*\]")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}
_SETS = {"upper": string.ascii_uppercase, "lower": string.ascii_lowercase, "digit": string.digits, "space": " \t\n"}
_LINES = re.compile(r"(head|tail) (?:-n ?|-)(\d{1,4})")
# Number of fields, and one field, as awk prints them.
_FIELDS = re.compile(r"awk -F ?'?([^\s\\|.*+?^$()\[\]{}])'? \{ ?print NF;? ?\}")
_COLUMN = re.compile(r"awk (?:-F ?'?([^\s\\|.*+?^$()\[\]{}\"])'? )?\{ ?print \$(NF|\d);? ?\}")


def unescaped(text: str) -> str | None:
    r"""A text with `\n`, `\t` and `\\` replaced; None for other escapes."""
    if any(one not in _ESCAPES for one in re.findall(r"\\(.?)", text, re.DOTALL)):
        return None
    return re.sub(r"\\(.)", lambda match: _ESCAPES[match[1]], text)


def filtered(text: str, words: Sequence[str]) -> str | None:
    """Output of a filter such as `wc -w`; None for one that is not known."""
    name, *arguments = words or ("",)
    if words in (["wc", "-w"], ["wc", "--words"]):
        return f"{len(text.split())}\n"
    if words in (["wc", "-l"], ["wc", "--lines"]):
        return f"{text.count(chr(10))}\n"
    if words in (["wc", "-c"], ["wc", "--bytes"]):
        return f"{len(text.encode())}\n"
    if len(words) == 3 and words[:2] == ["grep", "-o"] and re.fullmatch(r"[\w ,:;/=@-]+", words[2]):
        return f"{words[2]}\n" * text.count(words[2])
    if name == "cat" and not arguments:
        return text
    if name == "xargs" and not arguments:
        return f"{' '.join(text.split())}\n" if not re.search(r"[\\'\"]", text) else None
    if name == "tr":
        return _translated(text, arguments)
    if name == "sed":
        return _edited(text, arguments)
    if name == "grep":
        return _matching(text, arguments)
    if name == "bc" and not arguments:
        return computed(text)
    joined, lines = " ".join(words), _lines(text)
    if joined in ("head", "tail"):
        joined += " -10"
    if found := _LINES.fullmatch(joined):
        count = int(found[2])
        kept = re.findall(r"[^\n]*\n|[^\n]+", text)
        return "".join(kept[:count] if found[1] == "head" else kept[max(0, len(kept) - count) :])
    if found := _FIELDS.fullmatch(joined):
        return "".join(f"{len(line.split(found[1])) if line else 0}\n" for line in lines)
    if found := _COLUMN.fullmatch(joined):
        return "".join(f"{_column(line, found[1], found[2])}\n" for line in lines)
    if found := re.fullmatch(r"cut -d ?(.) -f ?(\d)", joined):
        return "".join(f"{_field(line, found[1], int(found[2]))}\n" for line in lines)
    return None


def _lines(text: str) -> list[str]:
    """The lines of a text, which only line feeds end."""
    return text.removesuffix("\n").split("\n") if text else []


def _field(line: str, delimiter: str, number: int) -> str:
    parts = line.split(delimiter)
    if len(parts) == 1:
        return line  # as cut does
    return parts[number - 1] if 0 < number <= len(parts) else ""


def _column(line: str, delimiter: str | None, number: str) -> str:
    """A field as awk counts them: 0 is the line, NF the last."""
    parts = line.split(delimiter) if line else []
    if number == "0" or (number == "NF" and not parts):
        return line
    at = len(parts) if number == "NF" else int(number)
    return parts[at - 1] if at <= len(parts) else ""


def computed(text: str) -> str | None:
    """Output of `bc` and `expr` for whole numbers, with which `bc` computes unless a scale is set."""
    if not re.fullmatch(r"[\d ()*/%+-]+\n?", text) or re.search(r"\*\*|(^|[-+*/%(]) *\+|--|\b0\d|\d +\d", text):
        return None
    try:
        return f"{evaluate(text, lambda name: 0)}\n"
    except NotKnown:
        return None


def _translated(text: str, arguments: Sequence[str]) -> str | None:
    """Output of `tr` for sets of characters, ranges and classes."""
    if len(arguments) != 2:
        return None
    if arguments[0] in ("-d", "-cd", "-dc"):
        named = _set(arguments[1])
        return None if named is None else "".join(one for one in text if (one in named) == ("c" in arguments[0]))
    old, new = _set(arguments[0]), _set(arguments[1])
    if not old or not new or len(set(old)) < len(old):
        return None
    return text.translate(str.maketrans(old, new.ljust(len(old), new[-1])[: len(old)]))


def _set(text: str) -> str | None:
    """The characters that a set of `tr` names; None for a form that is not known."""
    spelled = re.sub(r"\[:(\w+):\]", lambda match: _SETS.get(match[1], "[:"), text)
    plain = unescaped(spelled)
    if plain is None or plain.startswith("-") or re.search(r"\[[:=]|\[.\*", plain):
        return None
    spelled = re.sub(
        r"([a-z])-([a-z])|([A-Z])-([A-Z])|(\d)-(\d)",
        lambda match: "".join(map(chr, range(ord(match[0][0]), ord(match[0][2]) + 1))) or "--",
        plain,
    )
    return None if "-" in spelled[:-1] else spelled or None


def _edited(text: str, arguments: Sequence[str]) -> str | None:
    """Output of `sed s/old/new/`, with basic and extended regular expressions."""
    words = list(arguments)
    is_extended = False
    while words and words[0] in ("-e", "-E", "-r"):
        is_extended |= words.pop(0) != "-e"
    if len(words) != 1:
        return None
    for command in re.split(r"\s*;\s*(?=s\W)", words[0]):
        found = re.fullmatch(r"s([^\w\s\\])((?:\\.|(?!\1)[^\\])+)\1((?:\\.|(?!\1)[^\\])*)\1(g?)", command)
        pattern = None if found is None else _expression(found[2].replace(f"\\{found[1]}", found[1]), is_extended)
        if found is None or pattern is None:
            return None
        repeats = len(_REPEATS.findall(pattern))
        if repeats and (len(text) > MAX_TEXT or repeats > MAX_REPEATS):
            return None
        new = found[3].replace(f"\\{found[1]}", found[1])
        if re.search(r"\\[^./&-]|(?<!\\)&", new):
            return None
        new = re.sub(r"\\(.)", r"\1", new)
        try:
            if found[4] and re.match(pattern, ""):
                return None
            text = "".join(
                re.sub(pattern, lambda _, new=new: new, line, count=0 if found[4] else 1) + ending
                for line, ending in re.findall(r"([^\n]*)(\n|\Z)", text)
                if line or ending
            )
        except re.error:
            return None
    return text


def _matching(text: str, arguments: Sequence[str]) -> str | None:
    """Output of `grep` with a basic or extended regular expression, and of `grep -v`."""
    words = list(arguments)
    options = ""
    while words and re.fullmatch(r"-[vEe]+", words[0]):
        options += words.pop(0)[1:]
    pattern = _expression(words[0], "E" in options) if len(words) == 1 else None
    lines = _lines(text)
    is_long = len(text) > MAX_MATCHED or any(len(line) > MAX_TEXT for line in lines)
    if pattern is None or is_long or "\n" in pattern or len(_REPEATS.findall(pattern)) > 1:
        return None
    try:
        found = [line for line in lines if (re.search(pattern, line) is None) == ("v" in options)]
    except re.error:
        return None
    return "".join(f"{line}\n" for line in found)


def _expression(pattern: str, is_extended: bool) -> str | None:
    """A regular expression of `sed` without groups and choices as one of Python; None for others."""
    outside = _SET.sub("", pattern)
    if re.search(r"(?<!\\)\[", outside) or any(
        re.search(r"--|&&|~~|\|\||\[(?!:)", one[1:]) for one in _SET.findall(pattern)
    ):
        return None
    if re.search(r"\\[^./$*^\[\]-]", outside) or (is_extended and re.search(r"[(){}|]", outside)):
        return None
    plain = re.sub(r"\\.", "", outside)
    if "^" in plain[1:] or re.search(r"^\^?\*|[$^].|[*+?]{2}", plain.removeprefix("^")):
        return None  # an anchor or a star that stands for itself
    if not is_extended:  # where these stand for themselves
        pattern = re.sub(rf"({_SET.pattern})|([+?(){{}}|])", lambda one: one[1] or f"\\{one[2]}", pattern)
    return regular(pattern)
