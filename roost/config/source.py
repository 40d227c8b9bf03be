"""YAML with positions, and typed reading of its mappings: each wrong value becomes a finding with its place."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roost.config.findings import MAX_ACCELERATORS, Findings, KeyPath, Position, Where, did_you_mean, listed_keys, shown
from roost.config.yaml_events import MAX_BITS, MAX_DEPTH, Refused, ValueBuilder

MAX_GIVEN_VALUES = 5_000_000
MAX_FILE_BYTES = 1 << 20  # real configs are some tens of kilobytes; a longer list is better written as an expression
_EventLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of a script that starts the job."""

    framework: str  # the name of its notation
    program: str  # the module or file that is started
    position: Position
    written: Mapping[Path, str] = field(default_factory=dict)  # files that the script writes first
    added: frozenset[KeyPath] = frozenset()  # keys that a user adds to the program's own: +a.b=c


@dataclass(frozen=True, slots=True)
class Source:
    """The values of one config and where each of its keys stands."""

    values: dict[Any, Any]
    file: str | None = None
    positions: Mapping[KeyPath, Position] = field(default_factory=dict)
    launch: Launch | None = None  # for a script

    def where(self, path: KeyPath = ()) -> Where:
        """The place of a key, or of its nearest enclosing key that has one (aliases and overrides have none)."""
        whole = self.positions.get((), (self.file, None, None))
        return Where(*whole, (), self.positions).under(*path)


def read_yaml(file: Path, findings: Findings) -> Source | None:
    """Read a YAML file; None if it is wrong, which is reported to `findings`."""
    text = read_text(file, findings)
    return None if text is None else parse_yaml(text, str(file), findings)


def read_text(
    file: Path,
    findings: Findings,
    kind: str = "a YAML file",
    too_long: str = "write long device lists as an expression such as list(range(0,64))",
    max_bytes: int = MAX_FILE_BYTES,
) -> str | None:
    """The text of a file; None if it cannot be read, which is reported to `findings`."""
    here = Where(str(file))
    try:
        with open(_opened(file), "rb") as stream:
            content = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or str(error)
        hint = "; overrides come after it" if "=" in file.name else ""
        findings.error("RST-C001", here, f"cannot be read: {reason}", fix=f"give the path of {kind}{hint}")
        return None
    if len(content) > max_bytes:
        findings.error("RST-C002", here, f"is larger than {max_bytes:,} bytes", fix=too_long)
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = f"save it as UTF-8, or give the path of {kind}"
        findings.error("RST-C003", here, "is not UTF-8 text", f"byte {error.start} is not", fix)
        return None


def _opened(file: Path) -> int:
    """A descriptor of a file; pipes and devices, which may never end, are refused unless the shell opened them."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer blocks otherwise
    mode = os.fstat(descriptor).st_mode
    is_given = str(file).startswith(("/dev/fd/", "/dev/stdin", "/proc/"))  # as with <(command)
    if not stat.S_ISREG(mode) and not is_given:
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "It is not a file, but a pipe or a device")
    os.set_blocking(descriptor, True)
    return descriptor


def parse_yaml(text: str, file: str | None, findings: Findings) -> Source | None:
    """Read YAML text into values with positions.

    >>> source = parse_yaml("cluster:\\n  num_nodes: 2", "job.yaml", Findings())
    >>> source.values, str(source.where(("cluster", "num_nodes")))
    ({'cluster': {'num_nodes': 2}}, 'job.yaml:2:3 cluster.num_nodes')
    """
    builder = ValueBuilder(file, findings)
    try:
        values = builder.build(yaml.parse(text, Loader=_EventLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Where(file, mark.line + 1, mark.column + 1) if mark else Where(file)
        problem = error.problem or error.context or "cannot be parsed"
        findings.error(
            "RST-C004",
            place,
            f"is not valid YAML: {problem}",
            fix="check the indentation and the quotes near this line",
        )
        return None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0]
        findings.error(
            "RST-C004", Where(file), f"is not valid YAML: {reason}", fix="give the path of a text file in YAML"
        )
        return None
    except Refused as refused:
        findings.error(refused.code, refused.where, refused.what, fix=refused.fix)
        return None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        findings.error(
            "RST-C005",
            Where(file),
            f"holds {shown(values)}, not a mapping of keys to values",
            fix="write key: value lines; a shell script is named run.sh or begins with #!/bin/bash",
        )
        return None
    return Source(values, file, builder.positions)


def is_within_limits(values: Mapping[Any, Any], findings: Findings) -> bool:
    """Return True if a mapping given from Python has no cycles, and its depth and size are reasonable."""
    level: list[Any] = [values]
    count = 0
    for _ in range(MAX_DEPTH):
        inner = [part for value in level for part in (value.values() if isinstance(value, Mapping) else value)]
        if any(isinstance(part, int) and part.bit_length() > MAX_BITS for part in inner):
            findings.error(
                "RST-C010", Where(), "the config has a number that is too large", fix="write a smaller number"
            )
            return False
        level = [part for part in inner if isinstance(part, Mapping | list | tuple)]
        count += len(inner)
        if not level:
            return True
        if count > MAX_GIVEN_VALUES:
            break
    findings.error(
        "RST-C013",
        Where(),
        f"the config is nested more than {MAX_DEPTH} deep or contains itself",
        fix="flatten the config",
    )
    return False


MAX_NUMBER = 1e12  # no setting that Roost reads is larger
# YAML 1.1 reads 2e-05 as text: a number needs a point there, and a sign in its exponent.
EXPONENT = re.compile(r"\d+(\.\d*)?[eE][+-]?\d{1,3}")
# A number followed by one stray character that is not a unit: 1e-6x, but neither 10% nor 5k.
LEADING_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*[^\d\s.%eEkKmMgGbBtT_+-]?\s*", re.ASCII)
NEAR_MISS = 0.85  # similarity at which a word counts as a misspelling of another


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value whose interpolation could not be resolved; a finding only if the value is used."""

    text: str
    reason: str
    fix: str = "write the value itself, or define what it refers to"
    is_empty: bool = False  # the text is empty: a flag with it has no value, and is true


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
        """A key with a value, spelled as in this config: YAML, TOML, or a flag or override of a script."""
        if self.source.launch is None:
            is_toml = (self.source.file or "").endswith(".toml")
            return f"{key} = {value}" if is_toml else f"{key}: {value}"
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
            is_alone = value is True and key.startswith("--")
            said = "has no value" if is_alone else f"is {shown(value)}"
            what = f"{said}; it must be a whole number of at least {minimum}"
            is_quoted = isinstance(value, str) and value.strip().isdecimal() and len(value) < 10
            is_whole = is_quoted or (isinstance(value, float) and value.is_integer() and value < MAX_ACCELERATORS)
            meant = max(minimum, int(value)) if is_whole else max(minimum, 1)
            self.error("RST-C024", key, what, fix=f"write {self.spell(key, meant)}")
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
            meant = LEADING_NUMBER.fullmatch(value) if isinstance(value, str) else None
            fix = f"write {self.spell(key, meant[1])}" if meant else "write a plain number, or leave it out"
            self.error("RST-C026", key, f"is {shown(value)}; it must be a number that is not negative", fix=fix)
            return None
        return float(value)

    def flag(self, key: str, default: bool = False, words: Sequence[str] = ()) -> bool:
        """True or false; `words` are other values that the caller accepts, for the error."""
        written = self.values.get(key)
        value = True if isinstance(written, Unresolved) and written.is_empty else self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            possible = ("true", "false", *words)
            must = f"it must be {', '.join(possible[:-1])} or {possible[-1]}"
            fix = " or ".join(self.spell(key, word) for word in possible)
            self.error("RST-C027", key, f"is {shown(value)}; {must}", fix=f"write {fix}")
            return default
        return value

    def text(self, key: str) -> str | None:
        """A word; numbers are read as words too (a node group may be labelled 4090)."""
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
        """A nested mapping; an empty one if any of the keys is absent or not a mapping.

        For optional settings in sections of other programs, which Roost does not check.
        """
        values: Any = self.values
        for key in keys:
            values = values.get(key) if isinstance(values, Mapping) else None
        found = values if isinstance(values, Mapping) else {}
        return Section(found, (*self.path, *keys), self.source, self.findings)

    def mappings(self, key: str, fix: str) -> list[Section]:
        """A list of mappings; anything else is an error."""
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
        """Warn of keys that are nearly one of the known; for sections of other programs, which may hold anything."""
        known = list(known)
        for key in self.values:
            hint = did_you_mean(key, known, NEAR_MISS) if key not in known else ""
            if hint:
                self.findings.warn(
                    "RST-C023", self.where(str(key)), "is not a key Roost knows", hint, "correct the key"
                )

    def refuse_unknown_keys(self, known: Iterable[str], fix: str = "") -> None:
        """Report an error with a hint for each unknown key; for sections that Roost owns."""
        known = list(known)
        for key in self.values:
            if key not in known:
                hint = did_you_mean(key, known)
                remedy = "correct the key, or remove it" if hint else fix or listed_keys(key, known)
                self.findings.error("RST-C023", self.where(str(key)), "is not a key Roost knows", hint, remedy)
