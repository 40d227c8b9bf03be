"""The frameworks whose jobs Roost plans: the programs that start them, and the modules that read them.

Only the module of the framework in use is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from roost.config.findings import Findings
from roost.config.frameworks.arguments import Arguments, Start, read_overrides
from roost.config.frameworks.signs import (
    starts_areal,
    starts_miles,
    starts_nemo,
    starts_prime,
    starts_skyrl,
    starts_slime,
    starts_verl,
)
from roost.config.job import Job, Notation
from roost.config.shell.state import Reading, Value
from roost.config.source import Section


@dataclass(frozen=True, slots=True)
class Framework:
    """The reader of a framework's jobs: `FRAMEWORK` in its module."""

    read_job: Callable[[Section, Notation], Job]
    placing: Sequence[str]  # patterns of the keys that count for placing
    read: Callable[[Sequence[Value]], Arguments] = read_overrides
    accepts: Callable[[Start], bool] = lambda start: True
    base: Callable[[Start, Findings], Arguments] = lambda start, findings: start.arguments
    # Adds what other commands of the script say about the job, such as the server of TRL.
    beside: Callable[[Arguments, Reading], Arguments] = lambda arguments, reading: arguments


@dataclass(frozen=True, slots=True)
class Entry:
    """How jobs of a framework are recognised, without importing its module."""

    notation: Notation
    module: str
    program: re.Pattern[str]  # of the module or file that is started
    accepts: Callable[[Start], bool] = lambda start: True
    has_flags: bool = False  # its module reads the arguments, which are not overrides `a.b=c`
    job_command: str = ""  # the variable that holds the command of its batch script: COMMAND="..." sbatch ray.sub
    takes_script: bool = False  # the first argument may be the script that its launcher starts

    def load(self) -> Framework:
        framework: Framework = import_module(f"roost.config.frameworks.{self.module}").FRAMEWORK
        return framework

    def started(self, start: Start, rest: Sequence[Value]) -> Start | None:
        """The command with its arguments; None if it does not start a job of the framework."""
        if self.program.fullmatch(start.program) is None:
            return None
        if self.takes_script and rest and (rest[0].known or "").endswith(".py"):
            rest = rest[1:]
        read = self.load().read if self.has_flags else read_overrides
        start = Start(start.command, start.at, read(rest))
        return start if self.accepts(start) and (not self.has_flags or self.load().accepts(start)) else None


_SLIME = re.compile(r"(?:.*/)?train(?:_async)?\.py")
# The first that accepts a command reads it, so frameworks whose program may be any file come last.
ENTRIES = (
    Entry(
        Notation.SKYRL,
        "skyrl",
        re.compile(r"(?:.*[./])?(?:main_\w+|entrypoints[./]\w+|main|serve)(?:\.py)?"),
        starts_skyrl,
    ),
    Entry(
        Notation.VERL,
        "verl",
        re.compile(r".*"),
        starts_verl,
    ),
    Entry(
        Notation.NEMO,
        "nemo",
        re.compile(r"(?:.*/)?run_(?:\w+_)?(?:grpo|gdpo|ppo|dpo|sft|rm|distillation)(?:_\w+)?\.py"),
        starts_nemo,
        job_command="COMMAND",
    ),
    Entry(
        Notation.PRIME,
        "prime",
        re.compile(
            r"(?:.*/)?(?:rl|sft|inference)|(?:.*[./])?prime_rl[./](?:entrypoints[./])?(?:rl|sft|inference)(?:\.py)?"
        ),
        starts_prime,
        has_flags=True,
    ),
    Entry(Notation.MILES, "slime", _SLIME, starts_miles, has_flags=True),
    Entry(Notation.SLIME, "slime", _SLIME, starts_slime, has_flags=True),
    Entry(Notation.OPENRLHF, "openrlhf", re.compile(r"(?:.*[./])?train_ppo_ray(?:_\w+)?(?:\.py)?"), has_flags=True),
    Entry(
        Notation.AREAL,
        "areal",
        re.compile(r"areal[./](?:\w+[./])*launcher[./]\w+(?:\.py)?|.*\.py"),
        starts_areal,
        takes_script=True,
    ),
    Entry(Notation.TRL, "trl", re.compile(r"(?:.*/)?trl|trl\.scripts\.\w+|.*\.py"), has_flags=True),
)
COMMANDS = ("trl",)  # programs started by name
COMMANDS_WITH_FILES = ("rl", "sft", "inference")  # those of prime-rl, recognised by a file: rl @ x.toml


def framework_of(notation: Notation) -> Framework:
    return next(entry for entry in ENTRIES if entry.notation is notation).load()


# Findings about unknown values, and findings that compare numbers, which may be defaults in their place.
UNKNOWN = frozenset(f"RST-{code}" for code in ("C022", "C024", "C025", "C026", "C027", "C028", "N060", "N081"))
COMPARING = frozenset(f"RST-N0{number}" for number in (55, 56, 57, 58, 59, 61, 63, 65, 66, 70, 71, 72, 73, 74, 82, 88))


def read_framework(root: Section, notation: Notation) -> Job:
    """Read a job; if a value is unknown, drop findings that may compare its default."""
    findings, before = root.findings, set(root.findings.collected)
    job = framework_of(notation).read_job(root, notation)
    if any(error.code in UNKNOWN for error in findings.errors):
        for finding in set(findings.collected) - before:
            if finding.code in COMPARING:
                del findings.collected[finding]
    return job
