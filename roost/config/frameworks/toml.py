"""TOML with positions: the values of a file and the line and column of each key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from roost.config.findings import Findings, KeyPath, Position, Where
from roost.config.source import Source, is_within_limits, read_text

_KEY_PART = re.compile(r'\s*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|\'([^\']*)\')\s*')
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_AT = re.compile(r"\(at line (\d+), column (\d+)\)")


def read_toml(file: Path, findings: Findings) -> Source | None:
    """Read a TOML file; None, with a finding, if it cannot be read."""
    text = read_text(file, findings, "a TOML file", "give the config of the job")
    return None if text is None else parse_toml(text, str(file), findings)


def parse_toml(text: str, file: str, findings: Findings) -> Source | None:
    """Read TOML text into values with positions."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        at = _AT.search(str(error))
        where = Where(file, int(at[1]), int(at[2])) if at else Where(file)
        problem = _AT.sub("", str(error)).strip() or "it is nested too deeply"
        findings.error("RST-C050", where, f"is not valid TOML: {problem}", fix="check the quotes and brackets there")
        return None
    if not is_within_limits(values, findings):
        return None
    return Source(values, file, _Keys(text.replace("\r\n", "\n"), file).found())


@dataclass(slots=True)
class _Keys:
    """Finds the keys of a valid TOML text."""

    text: str
    file: str
    at: int = 0
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    counts: dict[KeyPath, int] = field(default_factory=dict)  # of tables in arrays

    def found(self) -> dict[KeyPath, Position]:
        table: KeyPath = ()
        while self._skip_blank():
            start = self.at
            if self.text[self.at] == "[":
                is_array = self.text.startswith("[[", self.at)
                self.at += 2 if is_array else 1
                table = self._table(tuple(self._key()), is_array)
                self.positions.setdefault(table, self._place(start))
                self.at += 2 if is_array else 1
            else:
                self._pair(table)
        return self.positions

    def _table(self, path: KeyPath, is_array: bool) -> KeyPath:
        """The path of a table, with the index of each array of tables on the way."""
        whole: KeyPath = ()
        for index, part in enumerate(path):
            whole = (*whole, part)
            is_last = index == len(path) - 1
            if is_array and is_last:
                self.counts[whole] = self.counts.get(whole, -1) + 1
            if whole in self.counts:
                whole = (*whole, self.counts[whole])
        return whole

    def _pair(self, table: KeyPath) -> None:
        start = self.at
        path = (*table, *self._key())
        self.positions[path] = self._place(start)
        self.at += 1  # =
        self._value(path)

    def _key(self) -> Iterator[str]:
        while (match := _KEY_PART.match(self.text, self.at)) is not None:
            self.at = match.end()
            yield next(part for part in match.groups() if part is not None)
            if self.text[self.at : self.at + 1] != ".":
                return
            self.at += 1

    def _value(self, path: KeyPath) -> None:
        """Skip a value, noting the keys of inline tables."""
        ends: list[str] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "\"'":
                match = _STRING.match(self.text, self.at)
                self.at = match.end() if match else len(self.text)
                continue
            if character == "#":
                self._skip_line()
                continue
            if not ends and character in "\n,]}":
                return
            self.at += 1
            if character == "{" and not ends:
                self._inline(path)
            elif character in "[{":
                ends.append(character)
            elif character in "]}" and ends:
                ends.pop()

    def _inline(self, path: KeyPath) -> None:
        """The pairs of an inline table, after its opening brace."""
        while self._skip_blank() and self.text[self.at] != "}":
            if self.text[self.at] == ",":
                self.at += 1
            else:
                before = self.at
                self._pair(path)
                self.at = max(self.at, before + 1)
        self.at += 1

    def _skip_blank(self) -> bool:
        """Skip blanks and comments; False at the end."""
        while self.at < len(self.text):
            if self.text[self.at] == "#":
                self._skip_line()
            elif self.text[self.at].isspace():
                self.at += 1
            else:
                return True
        return False

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _place(self, at: int) -> Position:
        before = self.text[:at]
        return self.file, before.count("\n") + 1, at - before.rfind("\n")
