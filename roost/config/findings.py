"""Findings: every mistake in a config, with its place, its numbers and its fix, raised all at once."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

KeyPath = tuple[str | int, ...]
Position = tuple[str | None, int | None, int | None]  # file, line and column

MAX_FINDINGS = 500  # nobody reads more, and a config can be made to have millions


class Severity(StrEnum):
    """Severity of a finding: an error stops the plan; warnings and notes are printed and kept in it.

    A note needs no action.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a config: file, line and column (from 1) as far as they are known, and the key path.

    >>> print(Where("job.yaml", 3, 5, ("cluster", "num_nodes")))
    job.yaml:3:5 cluster.num_nodes
    >>> print(Where(path=("actor", 0)))
    actor[0]
    """

    file: str | None = None
    line: int | None = None
    column: int | None = None
    path: KeyPath = ()
    # Positions of the config's keys, for `under`; not part of the place itself.
    positions: Mapping[KeyPath, Position] = field(default_factory=dict, compare=False, repr=False)

    def under(self, *keys: str | int) -> Where:
        """The place of a key inside this one, at its own line if that is known, else at the nearest enclosing one.

        >>> print(Where("job.yaml", 3, 1, ("actor",), {("actor", "model"): ("model.yaml", 7, 3)}).under("model", "tp"))
        model.yaml:7:3 actor.model.tp
        """
        path = (*self.path, *keys)
        for length in range(len(path), len(self.path), -1):
            if path[:length] in self.positions:
                return Where(*self.positions[path[:length]], path, self.positions)
        return replace(self, path=path)

    @property
    def order(self) -> tuple[str, int, int]:
        """Sort key: position in the files."""
        return self.file or "", self.line or 0, self.column or 0

    @property
    def key_path(self) -> str:
        return spell_path(self.path)

    def __str__(self) -> str:
        position = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return " ".join(part for part in (position, self.key_path) if part)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a config: its code, where it is, what is wrong, why (the numbers) and how to fix it.

    The code names the kind of mistake, such as `RST-C023`; `finding_codes.toml` explains each.
    """

    code: str
    where: Where
    what: str
    why: str = ""
    fix: str = ""
    severity: Severity = Severity.ERROR

    @property
    def heading(self) -> str:
        """The severity and the code, as every message begins; plans saved by older versions have no codes."""
        return f"{self.severity.value} {self.code}" if self.code else self.severity.value

    def __str__(self) -> str:
        lines = [": ".join(part for part in (self.heading, str(self.where), self.what) if part)]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class ConfigError(ValueError, AssertionError):
    """Everything that is wrong with a config, at once.

    It derives from both ValueError and AssertionError, because code written for the systems whose
    notations Roost reads catches one or the other.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Finding, ...]]]:
        # Exceptions pickle by their message; this one must keep its findings when Ray carries it between processes.
        return type(self), (self.findings,)


@dataclass(slots=True)
class Findings:
    """Collects findings while a config is read, so that all of them are reported together.

    >>> findings = Findings()
    >>> findings.error("RST-H001", Where(path=("cluster", "num_nodes")), "is missing", fix="write num_nodes: 1")
    >>> findings.raise_errors()
    Traceback (most recent call last):
        ...
    roost.config.findings.ConfigError: error RST-H001: cluster.num_nodes: is missing
      fix: write num_nodes: 1
    """

    collected: dict[Finding, None] = field(default_factory=dict)  # a set that keeps the order

    def error(self, code: str, where: Where, what: str, why: str = "", fix: str = "") -> None:
        self._add(Finding(code, where, what, why, fix, Severity.ERROR))

    def warn(self, code: str, where: Where, what: str, why: str = "", fix: str = "") -> None:
        self._add(Finding(code, where, what, why, fix, Severity.WARNING))

    def note(self, code: str, where: Where, what: str, why: str = "", fix: str = "") -> None:
        self._add(Finding(code, where, what, why, fix, Severity.NOTE))

    def drop(self, code: str) -> None:
        """Remove the findings of a code, which hold no longer."""
        for finding in [one for one in self.collected if one.code == code]:
            del self.collected[finding]

    def _add(self, finding: Finding) -> None:
        if len(self.collected) < MAX_FINDINGS:
            self.collected[finding] = None
        elif finding not in self.collected:
            more = f"there are more than {MAX_FINDINGS:,} findings; only the first are shown"
            self.collected[Finding("RST-C015", Where(finding.where.file), more, fix="fix these first")] = None

    @property
    def found(self) -> tuple[Finding, ...]:
        """All findings, in the order of the files' lines; what has no line comes first."""
        return tuple(sorted(self.collected, key=lambda finding: finding.where.order))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.found if finding.severity is Severity.ERROR)

    @property
    def has_errors(self) -> bool:
        return any(finding.severity is Severity.ERROR for finding in self.collected)

    @property
    def num_errors(self) -> int:
        """Number of errors so far, to detect whether a step has added any."""
        return sum(finding.severity is Severity.ERROR for finding in self.collected)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.found if finding.severity is Severity.WARNING)

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.found if finding.severity is Severity.NOTE)

    def raise_errors(self) -> None:
        """Raise one `ConfigError` with every error found so far, or do nothing."""
        if self.errors:
            raise ConfigError(self.errors)


def spell_path(path: Iterable[str | int]) -> str:
    """A key path as people write it: `cluster.node_groups[2].label`.

    >>> spell_path(["train", "engine_options", None])  # what YAML has for an empty key
    'train.engine_options.None'
    """
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            # A key may hold anything; what would move a terminal's cursor is shown as Python writes it.
            word = part if isinstance(part, str) and part.isprintable() else repr(part)
            spelled += f".{word}" if spelled else word
    return spelled


def did_you_mean(word: object, known: Iterable[str], cutoff: float = 0.7) -> str:
    """A hint for a misspelt word, or an empty string when nothing is near.

    >>> did_you_mean("num_node", ["num_nodes", "node_groups"])
    'did you mean num_nodes?'
    """
    close = difflib.get_close_matches(str(word)[:64], list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else ""


MOST_LISTED = 16  # keys in a message


def listed_keys(word: object, known: Iterable[str]) -> str:
    """The known keys, for the fix of an unknown one; the nearest three if there are many.

    >>> listed_keys("batch", ["name", "path"])
    'known keys: name, path'
    >>> listed_keys("batch", [*map(str, range(20)), "minibatches", "micro_batch_tokens", "patch"])
    'write one of the 23 keys, such as minibatches, micro_batch_tokens, patch, or remove it'
    """
    names, written = list(known), str(word)[:64].lower()
    if len(names) <= MOST_LISTED:
        return f"known keys: {', '.join(names)}"

    def likeness(name: str) -> float:
        initials = "".join(part[:1] for part in name.split("_"))
        contains = len(written) > 1 and written in name
        return difflib.SequenceMatcher(None, written, name).ratio() + contains + 2 * (written == initials)

    nearest = sorted(names, key=likeness, reverse=True)[:3]
    return f"write one of the {len(names)} keys, such as {', '.join(nearest)}, or remove it"


def bug(what: str) -> RuntimeError:
    """Error for a state that only a bug in Roost can reach.

    >>> bug("no plan and no error")
    RuntimeError('no plan and no error: this is a bug in Roost, please report it')
    """
    return RuntimeError(f"{what}: this is a bug in Roost, please report it")


def counted(number: int, word: str) -> str:
    """A number with its noun.

    >>> counted(1, "node"), counted(1200, "node"), counted(2, "process")
    ('1 node', '1,200 nodes', '2 processes')
    """
    return f"{number:,} {word if number == 1 else plural(word)}"


def plural(word: str) -> str:
    return f"{word}es" if word.endswith("s") else f"{word}s"


def remainder(count: int, size: int) -> str:
    """Why a size does not divide a number.

    >>> remainder(12, 8), remainder(16, 32)
    ('12 % 8 = 4', '16 is less than 32')
    """
    return f"{count} is less than {size}" if 0 < count < size else f"{count} % {size} = {count % size}"


def shown(value: object, limit: int = 60) -> str:
    """A user's value for a message: short, on one line, and with YAML's spelling of true, false and null.

    >>> from roost.config.train_choices import AdvantageEstimator
    >>> shown(True), shown(None), shown("x"), shown(AdvantageEstimator.GRPO)
    ('true', 'null', "'x'", 'grpo')
    """
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    try:
        text = short.repr(value)
    except ValueError:  # Python refuses to print integers of more than some 4,300 digits.
        return "a huge number"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


MAX_NODES = 1_048_576
MAX_ACCELERATORS_PER_NODE = 1_024
MAX_ACCELERATORS = 8_388_608
MAX_PROCESSES = 4_194_304  # of one component
MAX_COMPONENTS = 500
