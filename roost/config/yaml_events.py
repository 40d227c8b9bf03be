"""Build values with positions from YAML events, with caps on depth and size, and a stack instead of recursion.

Aliases share their value, so that a YAML bomb takes no memory; its size is counted as if aliases were expanded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from roost.config.findings import Findings, KeyPath, Position, Where, shown

MAX_VALUES = 100_000  # after aliases are expanded
MAX_DEPTH = 64
MAX_DIGITS = 100
MAX_BITS = 333  # of a number with MAX_DIGITS digits
MERGE_KEY = "<<"
SCALAR_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))
KEY_FIX = "quote it; a template such as {{ name }} must be filled in first, and a merge is written <<: *name"
PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Refused(Exception):
    """YAML that Roost does not read, as the parts of a finding."""

    def __init__(self, code: str, where: Where, what: str, fix: str) -> None:
        super().__init__(what)
        self.code, self.where, self.what, self.fix = code, where, what, fix


class _Scalars(yaml.SafeLoader):
    """YAML 1.1 scalars as PyYAML's SafeLoader reads them, except for base-60 integers, dates and exponents.

    `1:30` and `0:0` are placements, not the numbers 90 and 0; `1e-5` is a number.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's name for the rules of a loader)


for _tag, _pattern, _first in (
    ("bool", r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$", "yYnNtTfFoO"),
    ("int", r"^(?:[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
):
    for _character in _first if _tag != "null" else [*"~nN", ""]:
        _Scalars.yaml_implicit_resolvers.setdefault(_character, []).append(
            (f"tag:yaml.org,2002:{_tag}", re.compile(_pattern))
        )


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not been read yet."""

    value: dict[Any, Any] | list[Any]
    path: KeyPath
    anchor: str | None
    first: int  # number of values before it, from which its size follows when it ends
    key: Any = None
    has_key: bool = False


class ValueBuilder:
    """Builds the value of one document, and the position of each key."""

    def __init__(self, file: str | None, findings: Findings) -> None:
        self.file = file
        self.findings = findings
        self.positions: dict[KeyPath, Position] = {}
        self.scalars = _Scalars("")
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.count = 0
        self.stack: list[_Open] = []
        self.root: Any = None
        self.documents = 0

    def build(self, events: Iterator[Any]) -> Any:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                self.documents += 1
                if self.documents > 1:
                    raise self._refusal(
                        "RST-C007", event, "holds more than one YAML document", "keep one document in a file"
                    )
            elif isinstance(event, yaml.ScalarEvent):
                self._place(event, self._scalar(event), event.anchor)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self._open(event)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._close()
        return self.root

    def _scalar(self, event: Any) -> Any:
        if event.implicit[0] and event.value.isdecimal() and event.value.isascii() and not event.value.startswith("0"):
            return self._whole_number(event)  # fast path: long lists of devices are mostly these
        value = self._resolved_scalar(event)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise self._refusal(
                "RST-C010", event, f"{shown(event.value)} is not a value Roost can hold", "write a smaller number"
            )
        return value

    def _resolved_scalar(self, event: Any) -> Any:
        explicit = event.tag if event.tag and event.tag != "!" else None
        if explicit is not None and explicit not in SCALAR_TAGS:
            raise self._refusal(
                "RST-C006", event, f"has the tag {explicit}", "remove the tag; configs hold plain values only"
            )
        tag = explicit or self.scalars.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, event.value, event.implicit
        )
        try:
            return self.scalars.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark))
        except ValueError:
            code, fix = "RST-C010", "write a smaller number, or quote it"
            what = f"{shown(event.value)} is not a value Roost can hold"
            if explicit is not None:
                code, fix = "RST-C009", "remove the tag"
                what = f"{shown(event.value)} is not of its tag {explicit}"
            raise self._refusal(code, event, what, fix) from None

    def _whole_number(self, event: Any) -> int:
        if len(event.value) > MAX_DIGITS:
            raise self._refusal(
                "RST-C010", event, f"{shown(event.value)} is not a value Roost can hold", "write a smaller number"
            )
        return int(event.value)

    def _alias(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            raise self._refusal(
                "RST-C011",
                event,
                f"the alias *{event.anchor} refers to nothing written before it",
                f"define &{event.anchor} first; a value cannot contain itself",
            )
        value, size = self.anchors[event.anchor]
        self.count += size
        self._place(event, value, None)

    def _open(self, event: Any) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise self._refusal("RST-C013", event, f"is nested more than {MAX_DEPTH} deep", "flatten the config")
        if event.tag not in PLAIN_TAGS:
            raise self._refusal(
                "RST-C006", event, f"has the tag {event.tag}", "remove the tag; configs hold plain values only"
            )
        path = self._next_path(event)
        value: dict[Any, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self.stack.append(_Open(value, path, event.anchor, self.count))

    def _close(self) -> None:
        done = self.stack.pop()
        if isinstance(done.value, dict) and MERGE_KEY in done.value:
            done.value = _merged(done.value)
        if done.anchor:
            self.anchors[done.anchor] = (done.value, self.count - done.first + 1)
        self._insert(done.value)

    def _place(self, event: Any, value: Any, anchor: str | None) -> None:
        self.count += 1
        if self.count > MAX_VALUES:
            raise self._refusal(
                "RST-C014",
                event,
                f"holds more than {MAX_VALUES:,} values once aliases are expanded",
                "write long device lists as an expression such as list(range(0,64))",
            )
        if anchor:
            self.anchors[anchor] = (value, 1)
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and not top.has_key:
            self._take_key(event, top, value)
            return
        self._next_path(event)
        self._insert(value)

    def _take_key(self, event: Any, top: _Open, key: Any) -> None:
        if not isinstance(key, str | int | float | bool) and key is not None:
            raise self._refusal("RST-C012", event, "a key must be a word or a number", KEY_FIX)
        path = (*top.path, _path_part(key))
        if key in top.value and key != MERGE_KEY:
            first = self.positions.get(path)
            why = f"it stands at line {first[1]} already" if first else ""
            self.findings.error("RST-C008", self._where(event, path), "is written twice", why, "keep one of the two")
        top.key, top.has_key = key, True
        self._record(event, path)

    def _next_path(self, event: Any) -> KeyPath:
        """The path of the next value; the position of a list item is recorded here."""
        if not self.stack:
            return ()
        top = self.stack[-1]
        if isinstance(top.value, list):
            path = (*top.path, len(top.value))
            self._record(event, path)
            return path
        if not top.has_key:
            raise self._refusal("RST-C012", event, "a key must be a word or a number", KEY_FIX)
        return (*top.path, _path_part(top.key))

    def _insert(self, value: Any) -> None:
        if not self.stack:
            self.root = value
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        else:
            top.value[top.key] = value
            top.has_key = False

    def _record(self, event: Any, path: KeyPath) -> None:
        self.positions[path] = (self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def _where(self, event: Any, path: KeyPath = ()) -> Where:
        return Where(self.file, event.start_mark.line + 1, event.start_mark.column + 1, path)

    def _refusal(self, code: str, event: Any, what: str, fix: str) -> Refused:
        return Refused(code, self._where(event), what, fix)


def _merged(written: dict[Any, Any]) -> dict[Any, Any]:
    """The mapping with the values of its merge key (`<<`); keys of its own take precedence."""
    brought = written[MERGE_KEY]
    merged: dict[Any, Any] = {}
    for other in reversed(brought if isinstance(brought, list) else [brought]):
        if isinstance(other, dict):
            merged.update(other)
    return {**merged, **{key: value for key, value in written.items() if key != MERGE_KEY}}


def _path_part(key: Any) -> str | int:
    return key if isinstance(key, str) else str(key)
