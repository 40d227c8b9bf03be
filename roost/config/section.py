"""Typed reading of one mapping of a config: each wrong value becomes a finding with its place, and reading goes on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roost.config.findings import MAX_ACCELERATORS, Findings, Where, did_you_mean, listed_keys, shown
from roost.config.source import Source
from roost.config.yaml_events import MAX_BITS

MAX_NUMBER = 1e12  # no setting that Roost reads is larger
# YAML 1.1 reads 2e-05 as text: a number needs a point there, and a sign in its exponent.
EXPONENT = re.compile(r"\d+(\.\d*)?[eE][+-]?\d{1,3}")
NEAR_MISS = 0.85  # how alike two words must be for one to be taken for a slip of the other


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value whose interpolation could not be resolved; a finding only if the value is used."""

    text: str
    reason: str
    fix: str = "write the value itself, or define what it refers to"
    is_empty: bool = False  # a flag with it has no value, and so is true


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping inside a config, together with its place and the collector of findings."""

    values: Mapping[Any, Any]
    path: tuple[str | int, ...]
    source: Source
    findings: Findings

    @classmethod
    def root(cls, source: Source, findings: Findings) -> Section:
        return cls(source.values, (), source, findings)

    def where(self, *keys: str | int) -> Where:
        return self.source.where((*self.path, *keys))

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def error(self, code: str, key: str, what: str, why: str = "", fix: str = "") -> None:
        self.findings.error(code, self.where(key), what, why, fix)

    def spell(self, key: str, value: object) -> str:
        """A key with a value as the file would have it: in a script, a flag or an override."""
        if self.source.launch is None:
            return f"{key}: {value}"
        return f"{key} {value}" if key.startswith("-") else f"{'.'.join(map(str, (*self.path, key)))}={value}"

    def get(self, key: str) -> Any:
        """The value as written, or None; an unresolved interpolation is reported here, where it is needed."""
        value = self.values.get(key)
        parts = value if isinstance(value, list | tuple) else [value]
        unresolved = next((part for part in parts if isinstance(part, Unresolved)), None)
        if unresolved is None:
            return value
        what = f"{shown(unresolved.text)} cannot be resolved"
        self.error("RST-C022", key, what, unresolved.reason, unresolved.fix)
        return None

    def whole_number(
        self, key: str, minimum: int, default: int | None = None, maximum: int | None = None
    ) -> int | None:
        """A whole number of at least `minimum`; absent or null gives the default."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            what = f"is {shown(value)}; it must be a whole number of at least {minimum}"
            is_quoted = isinstance(value, str) and value.strip().isdecimal() and len(value) < 10
            self.error(
                "RST-C024", key, what, fix=f"write {self.spell(key, int(value) if is_quoted else max(minimum, 1))}"
            )
            return default
        if value > (maximum or MAX_ACCELERATORS):
            what = f"is {shown(value)}, more than the {maximum or MAX_ACCELERATORS:,} that Roost plans for"
            self.error("RST-C025", key, what, fix="write a smaller number")
            return default
        return value

    def number(self, key: str) -> float | None:
        """A number that is not negative; absent or null gives None."""
        value = self.get(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_exponent = isinstance(value, str) and EXPONENT.fullmatch(value.strip())
        if (is_number and value > MAX_NUMBER) or (is_exponent and float(value) > MAX_NUMBER):
            self.error(
                "RST-C025", key, f"is {shown(value)}; it must be at most {MAX_NUMBER:g}", fix="write a smaller number"
            )
            return None
        if is_exponent:  # YAML 1.1 reads 1e-06, without a point, as text
            return float(value)
        if not is_number or not value >= 0:
            digits = re.match(r"\s*(\d+(?:\.\d+)?)", value) if isinstance(value, str) else None
            fix = f"write {self.spell(key, digits[1])}" if digits else "write a plain number, or leave it out"
            self.error("RST-C026", key, f"is {shown(value)}; it must be a number that is not negative", fix=fix)
            return None
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        written = self.values.get(key)
        value = True if isinstance(written, Unresolved) and written.is_empty else self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.error(
                "RST-C027",
                key,
                f"is {shown(value)}; it must be true or false",
                fix=f"write {self.spell(key, 'true')} or {self.spell(key, 'false')}",
            )
            return default
        return value

    def text(self, key: str) -> str | None:
        """A word; numbers are taken as the words people mean by them (a node group may be labelled 4090)."""
        value = self.get(key)
        if value is None:
            return None
        is_huge = isinstance(value, int) and value.bit_length() > MAX_BITS
        if isinstance(value, bool) or not isinstance(value, str | int | float) or is_huge:
            self.error(
                "RST-C028", key, f"is {shown(value)}; it must be a word", fix=f"write {self.spell(key, 'some_name')}"
            )
            return None
        return str(value)

    def mapping(self, key: str) -> Section | None:
        """A nested mapping; absent or null gives None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.error(
                "RST-C029",
                key,
                f"is {shown(value)}; it must be a mapping",
                fix=f"write {key}: and indent its keys below it",
            )
            return None
        return Section(value, (*self.path, key), self.source, self.findings)

    def below(self, *keys: str) -> Section:
        """A mapping reached through several keys; an empty one where any of them is absent or not a mapping.

        For optional settings in sections that belong to other programs: what they hold is not for Roost to judge.
        """
        values: Any = self.values
        for key in keys:
            values = values.get(key) if isinstance(values, Mapping) else None
        found = values if isinstance(values, Mapping) else {}
        return Section(found, (*self.path, *keys), self.source, self.findings)

    def mappings(self, key: str, fix: str) -> list[Section]:
        """A list of mappings; what is not one is a finding."""
        value = self.get(key)
        if value is None:
            return []
        if isinstance(value, Mapping):
            self.error("RST-C030", key, "is a mapping; it must be a list", fix=fix)
            return []
        if not isinstance(value, list | tuple):
            self.error("RST-C030", key, f"is {shown(value)}; it must be a list of mappings", fix=fix)
            return []
        sections = []
        for index, item in enumerate(value):
            if isinstance(item, Mapping):
                sections.append(Section(item, (*self.path, key, index), self.source, self.findings))
            else:
                self.findings.error(
                    "RST-C029", self.where(key, index), f"is {shown(item)}; it must be a mapping", fix=fix
                )
        return sections

    def warn_near_misses(self, known: Iterable[str]) -> None:
        """Keys that are nearly one of those Roost reads; for sections of other programs, which may hold anything."""
        known = list(known)
        for key in self.values:
            hint = did_you_mean(key, known, NEAR_MISS) if key not in known else ""
            if hint:
                self.findings.warn(
                    "RST-C023", self.where(str(key)), "is not a key Roost knows", hint, "correct the key"
                )

    def refuse_unknown_keys(self, known: Iterable[str], fix: str = "") -> None:
        """Each key that is not known is an error with a hint; for sections that Roost owns."""
        known = list(known)
        for key in self.values:
            if key not in known:
                hint = did_you_mean(key, known)
                remedy = "correct the key, or remove it" if hint else fix or listed_keys(key, known)
                self.findings.error("RST-C023", self.where(str(key)), "is not a key Roost knows", hint, remedy)
