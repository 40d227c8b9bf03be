"""YAML with positions: the values a person wrote and, for each key, the line and column where it stands.

The values are built from libyaml's event stream, without recursion and with caps, because a config may be anything:
binary, ten megabytes, nested a thousand deep, or an alias bomb. Each of these is a finding, in well under a second.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roost.config.findings import Findings, Where, shown
from roost.config.yaml_events import MAX_BITS, MAX_DEPTH, KeyPath, Position, Refused, ValueBuilder

MAX_GIVEN_VALUES = 5_000_000
MAX_FILE_BYTES = 1 << 20  # real configs are some tens of kilobytes; a longer list is better written as an expression
_EventLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of a script that starts the job."""

    framework: str  # the name of its notation
    program: str  # the module or file that is started
    position: Position


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
    """Read a YAML file; what is wrong with it goes to `findings`, and the answer is then None."""
    text = read_text(file, findings)
    return None if text is None else parse_yaml(text, str(file), findings)


def read_text(
    file: Path,
    findings: Findings,
    kind: str = "a YAML file",
    too_long: str = "write long device lists as an expression such as list(range(0,64))",
    max_bytes: int = MAX_FILE_BYTES,
) -> str | None:
    """The text of a file of some kind; what is wrong with it goes to `findings`, and the answer is then None."""
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
    """A descriptor of a file; pipes and devices, which may never end, are refused unless the caller opened them."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer blocks otherwise
    mode = os.fstat(descriptor).st_mode
    is_given = str(file).startswith(("/dev/fd/", "/dev/stdin", "/proc/"))  # as of <(command)
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


def is_tame(values: Mapping[Any, Any], findings: Findings) -> bool:
    """Return True if values given by a program could stand in a file: no cycles, no unreasonable depth or size."""
    level: list[Any] = [values]
    count = 0
    for _ in range(MAX_DEPTH):
        inner = [part for value in level for part in (value.values() if isinstance(value, Mapping) else value)]
        if any(isinstance(part, int) and part.bit_length() > MAX_BITS for part in inner):
            findings.error(
                "RST-C010", Where(), "the config holds a number that is beyond all reason", fix="write a smaller number"
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
