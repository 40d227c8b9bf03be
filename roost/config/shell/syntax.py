"""The parts of a bash script, as the parser gives them."""

from __future__ import annotations

from dataclasses import dataclass

from roost.config.yaml_events import Position


class ShellError(ValueError):
    """The script cannot be parsed from this place on."""

    def __init__(self, what: str, position: Position) -> None:
        self.what, self.position = what, position
        super().__init__(what)


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands for itself; what is quoted is neither split nor matched as a pattern."""

    text: str
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """`$X`, `${X:-word}`, `${#X}`, `${!X}`, `${A[@]}` and their like."""

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
    """`$(command)`, backquotes, or `<(command)`, whose output is not known; None where it is no valid script."""

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
        """The word itself, where it has no expansion."""
        texts = [part.text for part in self.parts if isinstance(part, Literal)]
        return "".join(texts) if len(texts) == len(self.parts) else None


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
    """Text that a command is given by `<<<`, or by `<<`, whose body stands after its line; None from a file."""

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
    """`{ ...; }`, or `( ... )`, whose variables are its own."""

    body: tuple[Statement, ...]
    is_subshell: bool = False


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
    stdin: Input | None = None


@dataclass(frozen=True, slots=True)
class For:
    """`for X in words`; without words it goes over the arguments.

    `for ((...))` has no name, and its three expressions are the words.
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
    """A definition."""

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
