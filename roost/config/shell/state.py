"""State of a shell while a script is read, as far as it is known, and the result of reading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from operator import is_not
from pathlib import Path

from roost.config.findings import Position
from roost.config.shell.syntax import Choice, ShellError, SourceText, Statement, joined_text, places_of, position_in

MAX_SHOWN = 60
MAX_JOINED = 20_000  # characters of values whose words are compared
IFS = " \t\n"  # of a new shell
_PIECES = re.compile(r"\s+|\S+")


@dataclass(frozen=True, slots=True)
class Unknown:
    """A part of a value that is known only when the script runs."""

    text: str  # as the script has it
    reason: str
    position: Position
    variable: str = ""  # a variable that the caller can set to give it
    argument: int = 0  # number of the script's argument that gives it
    is_unset: bool = False  # a variable without a value, which bash expands to nothing
    is_list: bool = False  # it may stand for any number of words
    is_gap: bool = False  # it stands for any words between known ones, with the blanks around them

    def about(self, name: str) -> Value:
        """The value of the variable `name`, unknown for the same reason."""
        return of_unknown(replace(self, text=f"${name}", variable=name))

    @property
    def shown(self) -> str:
        text = " ".join(self.text.split())
        return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


Parts = tuple["str | Unknown", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """Text and unknown parts, and the position of the word they come from."""

    parts: tuple[str | Unknown, ...] = ()
    position: Position = field(default=(None, None, None), compare=False)
    dropped: Unknown | None = field(default=None, compare=False)  # an unset variable after it, which became no word
    is_split: bool = field(default=False, compare=False)  # an unknown part is unquoted: any number of words

    @property
    def known(self) -> str | None:
        """The text, if all of it is known."""
        texts = [part for part in self.parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def tested(self) -> str | None:
        """The text with unset variables as empty, as bash expands them; None if another part is unknown."""
        return Value(tuple(part for part in self.parts if isinstance(part, str) or not part.is_unset)).known

    @property
    def unknown(self) -> Unknown | None:
        """The first part that is not known."""
        return next((part for part in self.parts if isinstance(part, Unknown)), None)

    @property
    def is_open(self) -> bool:
        """Return True for a value that may be any number of words."""
        return self.is_split or (self.unknown is not None and self.unknown.is_list)

    @property
    def shown(self) -> str:
        """The text with the unknown parts as the script has them."""
        return "".join(part if isinstance(part, str) else part.shown for part in self.parts)

    @property
    def prefix(self) -> str:
        """The text before the first unknown part."""
        found = ""
        for part in self.parts:
            if isinstance(part, Unknown):
                break
            found += part
        return found

    def stripped(self) -> Value:
        """The value without blanks at its ends."""
        parts = list(self.parts)
        if parts and isinstance(parts[0], str):
            parts[0] = parts[0][len(parts[0]) - len(parts[0].lstrip()) :]
        if parts and isinstance(parts[-1], str):
            parts[-1] = parts[-1][: len(parts[-1].rstrip())]
        return replace(self, parts=tuple(part for part in parts if part))

    def cut(self, start: tuple[int, int] = (0, 0), end: tuple[int, int] | None = None) -> Value:
        """The value from `start` to `end`, each the index of a part and of a character in it."""
        parts = list(self.parts)
        if end is not None:
            last = parts[end[0]]
            parts[end[0] :] = [last[: end[1]] if isinstance(last, str) else last]
        first = parts[start[0]]
        parts[: start[0] + 1] = [first[start[1] :] if isinstance(first, str) else first]
        return replace(self, parts=tuple(parts))

    def without_trailing_newlines(self) -> Value:
        """The value without newlines at its end, as `$(...)` has it."""
        parts = self.parts
        while parts and isinstance(parts[-1], str) and parts[-1].endswith("\n"):
            text = parts[-1].rstrip("\n")
            parts = (*parts[:-1], text) if text else parts[:-1]
        return replace(self, parts=parts)

    def as_script(self, start: Position) -> tuple[str, dict[str, Value]]:
        """The value as text of a script, with variables in place of its unknown parts, and these variables."""
        pieces: list[str] = [SourceText("", ((0, start, True),))]
        variables = {}
        for number, part in enumerate(self.parts):
            if isinstance(part, str):
                pieces.append(part)
                continue
            if part.position == self.position:  # of the word; the part begins where the text before it ends
                part = replace(part, position=position_in(places_of(pieces[-1], start), len(pieces[-1])))
            name = f"__ROOST_UNKNOWN_{number}"
            variables[name] = of_unknown(part)
            pieces.append(f"${{{name}}}")
        return joined_text(pieces), variables

    def after(self, length: int) -> Value:
        """The value without its first characters, which must be known."""
        parts: list[str | Unknown] = []
        for part in self.parts:
            if isinstance(part, str) and length:
                part, length = part[length:], max(0, length - len(part))
                if not part:
                    continue
            parts.append(part)
        return replace(self, parts=tuple(parts))


def text_value(text: str, position: Position = (None, None, None)) -> Value:
    return Value((text,) if text else (), position)


def is_argument(name: str) -> bool:
    """Return True if a parameter stands for an argument of the script, for all of them or for their number.

    >>> is_argument("1"), is_argument("@"), is_argument("0"), is_argument("NNODES")
    (True, True, False, False)
    """
    return name in ("@", "*", "#") or (name.isdigit() and name != "0")


def of_unknown(unknown: Unknown) -> Value:
    return Value((unknown,), unknown.position)


def unknown_elements(name: str, position: Position) -> Value:
    """All elements of an array, unknown because one was set at an unknown index."""
    return of_unknown(Unknown(f"${{{name}[@]}}", "the index of an element is not known", position, name, is_list=True))


Array = dict[str, Value]  # by index or key, in order


def next_index(array: Array) -> int:
    """The index that an appended element gets."""
    last = next(reversed(array), "-1")
    if last.isdecimal():
        return int(last) + 1
    return max((int(key) for key in array if key.isdecimal()), default=-1) + 1  # with text as keys


ATTRIBUTES = ("exported", "associative", "integers", "references")
Outer = tuple[Value | Array | None, tuple[str, ...]]  # the value of a variable, and its attributes


@dataclass(slots=True)
class State:
    """State of one shell; a copy is that of a subshell, or of one branch of a condition."""

    variables: dict[str, Value | Array]
    arguments: tuple[Value, ...] = ()
    functions: dict[str, Statement | Choice] = field(default_factory=dict)
    folder: Path | None = None
    script: str = ""  # $0
    file: str = ""  # BASH_SOURCE
    flow: str = ""  # exit, return, break or continue, once it is reached
    levels: int = 1  # of loops that break or continue leaves
    exported: frozenset[str] = frozenset()  # names of variables, and of functions with "()"
    exports_all: bool = False  # set -a
    stops_at_unset: bool = False  # set -u
    associative: frozenset[str] = frozenset()  # names of arrays with text as keys
    integers: frozenset[str] = frozenset()  # names of declare -i
    references: frozenset[str] = frozenset()  # names of declare -n, whose values are the names of other variables
    folders: tuple[Path | None, ...] = ()  # that popd goes back to
    option_at: int = 1  # the letter of the argument that getopts reads next
    locals: dict[str, Outer] | None = None  # of a function, with what they are outside of it
    fallback: Unknown | None = None  # for unset variables, which a missing file may set
    written: Mapping[Path, Value] = field(default_factory=dict)  # texts of files that the script writes
    touched: frozenset[Path] = frozenset()  # all files that it writes or changes

    def copy(self) -> State:
        # Arrays are never changed in place, so that copies may share them.
        own = None if self.locals is None else dict(self.locals)
        return replace(self, variables=dict(self.variables), functions=dict(self.functions), locals=own)

    def add_slurm_variables(self, given: Mapping[str, Value], caller: Mapping[str, str]) -> None:
        """Set the variables that Slurm gives a batch script, except those of the caller."""
        own = {name: value for name, value in given.items() if name not in caller}
        if given and self.folder is not None and "SLURM_SUBMIT_DIR" not in caller:
            own["SLURM_SUBMIT_DIR"] = text_value(str(self.folder))
        self.variables |= own
        self.exported = self.exported.union(own)

    def child(self) -> State:
        """State of a shell that this one starts: it has exported variables and functions only."""
        variables: dict[str, Value | Array] = {
            name: value
            for name, value in self.variables.items()
            if name in self.exported and not isinstance(value, dict)
        }
        functions = {name: body for name, body in self.functions.items() if f"{name}()" in self.exported}
        variables["IFS"] = text_value(IFS)
        exported = self.exported
        variables["OPTIND"] = text_value("1")
        own = (self.folder, self.script, self.file)
        child = State(variables, self.arguments, functions, *own, exported=exported, fallback=self.fallback)
        child.written, child.touched = self.written, self.touched
        return child

    @property
    def environment(self) -> frozenset[tuple[str, Value]]:
        """Variables that this shell gives to what it starts."""
        values = ((name, self.variables.get(name)) for name in self.exported)
        return frozenset((name, value) for name, value in values if isinstance(value, Value))

    def become(self, other: State) -> None:
        """Replace this state by another one."""
        for slot in fields(self):
            setattr(self, slot.name, getattr(other, slot.name))

    def make_local(self, name: str) -> bool:
        """Make a variable local, still exported if it was; False outside of functions, or if it already is."""
        if self.locals is None or name in self.locals:
            return False
        kept = tuple(one for one in ATTRIBUTES if name in getattr(self, one))
        self.locals[name] = (self.variables.get(name), kept)
        self._set_attributes(name, tuple(one for one in kept if one == "exported"))
        return True

    def end_function(self) -> None:
        """Restore the variables that were local."""
        for name, (value, kept) in (self.locals or {}).items():
            self.put(name, value)
            self._set_attributes(name, kept)

    def unset(self, name: str) -> None:
        """Remove a variable with its attributes."""
        self.variables.pop(name, None)
        self._set_attributes(name, ())

    def _set_attributes(self, name: str, given: Sequence[str]) -> None:
        for one in ATTRIBUTES:
            names = getattr(self, one)
            if (name in names) != (one in given):
                setattr(self, one, names ^ {name})

    def default_of(self, name: str, is_element: bool, default: Value) -> Value:
        """A default that is not known, with the variable or argument of the script that the caller can set instead."""
        unknown = default.unknown
        if unknown is None or len(default.parts) > 1 or unknown.variable or unknown.argument or unknown.is_unset:
            return default
        if name.isdigit() and self.locals is None:
            return of_unknown(replace(unknown, argument=int(name)))
        is_variable = not is_element and name.isidentifier() and name not in (self.locals or ())
        return of_unknown(replace(unknown, variable=name)) if is_variable else default

    def fallback_for(self, name: str) -> Value | None:
        """The unknown value of an unset variable that a missing file may set; None for other variables."""
        if self.fallback is None or not name.isidentifier() or self.target(name) in self.variables:
            return None
        return self.fallback.about(name)

    def put(self, name: str, value: Value | Array | None) -> None:
        """Set a variable, or unset it."""
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value

    def target(self, name: str) -> str:
        """The variable that a name refers to: itself, or the one that `declare -n` made it refer to."""
        value = self.variables.get(name) if name in self.references else None
        return (value.known or name) if isinstance(value, Value) else name

    def array(self, name: str) -> Array:
        """A variable as an array; empty if it is not set."""
        value = self.variables.get(self.target(name))
        return value if isinstance(value, dict) else {} if value is None else {"0": value}

    def in_order(self, name: str, array: Array) -> Array:
        """An array sorted by index, as bash lists it; an associative one as it is."""
        if name in self.associative or not all(key.isdecimal() for key in array):
            return array
        return {key: array[key] for key in sorted(array, key=int)}

    def scalar(self, name: str) -> Value | None:
        """The value of a variable; the first of an array."""
        value = self.variables.get(self.target(name), self.fallback_for(name))
        return value.get("0") if isinstance(value, dict) else value


def initial_state(environ: Mapping[str, str], arguments: tuple[Value, ...], file: str) -> State:
    """State of a shell that the caller just started."""
    variables: dict[str, Value | Array] = {name: Value((text,) if text else ()) for name, text in environ.items()}
    exported = frozenset(variables) - {"IFS"}
    variables["IFS"] = text_value(IFS)  # not that of the caller
    return State(variables, arguments, folder=Path.cwd(), script=file, file=file, exported=exported)


@dataclass(frozen=True, slots=True)
class Doubt:
    """An unknown condition: its position, the reason for values that depend on it, and the variable it tests."""

    position: Position
    reason: str
    variable: str = ""

    @classmethod
    def of_rounds(cls, position: Position) -> Doubt:
        """A loop with an unknown number of rounds."""
        line = f"line {position[1]}" if position[1] else "another line"
        return cls(position, f"it depends on the rounds of the loop in {line}, which are known only at run time")

    def about(self, name: str) -> Unknown:
        return Unknown(f"${name}", self.reason, self.position, self.variable)  # giving `name` itself decides nothing


def split_by_flow(states: list[State]) -> tuple[list[State], list[State]]:
    """Branches that continue together, and those that leave a function or loop.

    Branches that end the script are left out unless all do.
    """
    alive = [state for state in states if state.flow != "exit"] or states
    flow = next((state.flow for state in alive if not state.flow), alive[0].flow)
    return [state for state in alive if state.flow == flow], [state for state in alive if state.flow != flow]


def join(states: list[State], doubt: Doubt) -> State:
    """The state after one of several branches; values that differ become unknown."""
    first, *others = states
    result = first.copy()
    result.associative = first.associative.union(*(state.associative for state in others))
    result.references = first.references.union(*(state.references for state in others))
    result.integers = first.integers.union(*(state.integers for state in others))
    result.exported = first.exported.union(*(state.exported for state in others))
    result.touched = first.touched.union(*(state.touched for state in others))
    result.fallback = next((state.fallback for state in states if state.fallback is not None), None)
    names = dict.fromkeys(name for state in states for name in state.variables)
    for name in names:
        value = first.variables.get(name)
        if all((other := state.variables.get(name)) is value or other == value for state in others):
            continue
        values = [state.variables.get(name) for state in states]
        if not any(isinstance(value, dict) for value in values):
            given = [value for value in values if isinstance(value, Value)]
            part = doubt.about(name)
            is_set = len(given) == len(values)
            result.variables[name] = _joined_words(given, part) if is_set else of_unknown(part)
        elif name in result.associative:
            result.variables[name] = _joined_keys([state.array(name) for state in states], doubt.about(name))
        else:
            result.variables[name] = _joined_array([state.array(name) for state in states], doubt.about(name))
    if any(state.arguments != first.arguments for state in others):
        unknown = Unknown("$@", doubt.reason, doubt.position, doubt.variable, is_list=True)
        result.arguments = (of_unknown(unknown),)
    for path in dict.fromkeys(path for state in states for path in state.written):
        texts = [state.written.get(path) for state in states]
        if any(text != texts[0] for text in texts):
            result.written = {**result.written, path: of_unknown(doubt.about(path.name))}
    for name in dict.fromkeys(name for state in states for name in state.functions):
        found = [state.functions.get(name) for state in states]
        bodies = [one for body in found for one in (body.bodies if isinstance(body, Choice) else (body,))]
        differing = tuple(one for at, one in enumerate(bodies) if one not in bodies[:at])
        result.functions[name] = (
            differing[0] if differing[0] and not differing[1:] else Choice(differing, doubt.position)
        )
    for state in others:
        if result.locals is not None:
            result.locals |= {name: old for name, old in (state.locals or {}).items() if name not in result.locals}
        if state.folder != first.folder:
            result.folder = None
        if state.folders != first.folders:
            result.folders = ()
    return result


def uncertain(state: State, before: State, doubt: Doubt) -> None:
    """Make what changed since `before` unknown."""
    state.become(join([state, before], doubt))


def _joined_keys(arrays: list[Array], unknown: Unknown) -> Array:
    """An associative array with the values that are equal in all; others become unknown."""
    keys = dict.fromkeys(key for array in arrays for key in array)
    first, *others = arrays
    return {
        key: first[key]
        if key in first and all(array.get(key) == first[key] for array in others)
        else of_unknown(unknown)
        for key in keys
    }


def _joined_array(arrays: list[Array], unknown: Unknown) -> Array:
    """The common first elements, an unknown one, and the common last elements."""
    lists = [list(array.values()) for array in arrays]
    head, tail = _common_ends(lists)
    text = f"a part of {unknown.text}" if head or tail else unknown.text
    differing = of_unknown(replace(unknown, text=text, is_list=True))
    kept = [*lists[0][:head], differing, *lists[0][len(lists[0]) - tail :]]
    return {str(at): value for at, value in enumerate(kept)}


def _joined_words(values: list[Value], unknown: Unknown) -> Value:
    """The common first words, an unknown part, and the common last words."""
    if any(len(value.shown) > MAX_JOINED for value in values):
        return of_unknown(unknown)
    words, *others = ([*_words_of(value)] for value in values)
    head, tail = _common_ends([[one[0] for one in each] for each in (words, *others)])
    if not head and not tail:
        return of_unknown(unknown)
    first = values[0]
    before = first.cut(end=words[head - 1][2]).parts if head else ()
    after = first.cut(start=words[len(words) - tail][1]).parts if tail else ()
    differing = replace(unknown, text=f"a part of {unknown.text}", is_list=True, is_gap=True)
    blanks = ((" ",) if before else ()), ((" ",) if after else ())
    return Value((*before, *blanks[0], differing, *blanks[1], *after), first.position)


Place = tuple[int, int]  # a part of a value, and a character of it


def _words_of(value: Value) -> Iterator[tuple[Parts, Place, Place]]:
    """The words of a text, with their starts and ends."""
    word: list[str | Unknown] = []
    start: Place = (0, 0)
    end: Place = (0, 0)
    for at, part in enumerate(value.parts):
        spans = (
            [(part, 0, 1)] if isinstance(part, Unknown) else [(one[0], *one.span()) for one in _PIECES.finditer(part)]
        )
        for piece, first, last in spans:
            if isinstance(piece, str) and piece.isspace():
                if word:
                    yield tuple(word), start, end
                word = []
                continue
            start = start if word else (at, first)
            end = (at, last)
            word.append(piece)
    if word:
        yield tuple(word), start, end


def _common_ends(lists: Sequence[Sequence[object]]) -> tuple[int, int]:
    """Lengths of the common beginning of lists, and of the common end of what follows it."""
    first, shortest = lists[0], min(len(one) for one in lists)
    head = next((at for at in range(shortest) if any(one[at] != first[at] for one in lists)), shortest)
    tail = 0
    while tail < shortest - head and all(one[-1 - tail] == first[-1 - tail] for one in lists):
        tail += 1
    return head, tail


def widened_gaps(parts: list[str | Unknown]) -> list[str | Unknown]:
    """Parts whose gaps take in a neighbouring word where text touches their other side: `a <gap>-v1` may be `a-v1`."""
    found = list(parts)
    for at, gap in enumerate(found):
        if not isinstance(gap, Unknown) or not gap.is_gap:
            continue
        left, right = found[at - 1] if at else " ", found[at + 1] if at + 1 < len(found) else " "
        is_apart = [isinstance(left, str) and not left[-1:].strip(), isinstance(right, str) and not right[:1].strip()]
        if all(is_apart):
            continue
        found[at] = replace(gap, is_gap=False)
        if not is_apart[0] and at + 1 < len(found) and isinstance(right, str):
            found[at + 1] = right[len(right) - len(re.sub(r"^\s*\S+", "", right)) :]
        if not is_apart[1] and at and isinstance(left, str):
            found[at - 1] = left[: len(re.sub(r"\S+\s*$", "", left))]
    return found


def without_gap(value: Value) -> Value:
    """The value, or all of it unknown where it has a gap."""
    gap = next((part for part in value.parts if isinstance(part, Unknown) and part.is_gap), None)
    return value if gap is None else replace(value, parts=(replace(gap, is_gap=False),))


class Snapshot(Mapping[str, "Value | Array"]):
    """Variables at one moment, stored as changes to an earlier snapshot if these are few."""

    def __init__(self, values: dict[str, Value | Array], earlier: Snapshot | None = None) -> None:
        base: dict[str, Value | Array] = {} if earlier is None else earlier.base
        changed = dict(compress(values.items(), map(is_not, map(base.get, values), values.values())))
        added = sum(name not in base for name in changed)
        gone = base.keys() - values.keys() if len(base) + added > len(values) else set()
        is_near = (len(changed) + len(gone)) ** 2 <= len(base)
        self.base: dict[str, Value | Array] = base if is_near else dict(values)
        self.changed, self.gone = (changed, gone) if is_near else ({}, set())

    def __getitem__(self, name: str) -> Value | Array:
        if name in self.gone:
            raise KeyError(name)
        return self.changed[name] if name in self.changed else self.base[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in {**self.base, **self.changed} if name not in self.gone)

    def __len__(self) -> int:
        return len(self.base.keys() | self.changed.keys()) - len(self.gone)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script would start: its words, its place, and the variables at that moment."""

    words: tuple[Value, ...]
    position: Position
    variables: Mapping[str, Value | Array]
    folder: Path | None
    is_certain: bool  # False if an unknown condition decides whether it is started
    exported: frozenset[str] = frozenset()  # names of the variables that it has
    written: Mapping[Path, Value] = field(default_factory=dict)  # files that the script wrote before
    fallback: Unknown | None = None  # for variables that it lacks, which a missing file may set

    def given(self, name: str) -> Value | Array | None:
        """The value of a variable of its environment; None if it is not there."""
        if name in self.exported:
            return self.variables.get(name)
        return None if self.fallback is None else self.fallback.about(name)


@dataclass(slots=True)
class Reading:
    """Commands, missing files, errors and unknown values of a script."""

    commands: dict[tuple[object, ...], Command] = field(default_factory=dict)
    missing_sources: list[tuple[str, Position]] = field(default_factory=list)
    missing_scripts: list[tuple[str, Position]] = field(default_factory=list)  # that the script starts
    not_followed: list[tuple[str, Position, str]] = field(default_factory=list)  # sourced files, and why
    errors: list[ShellError] = field(default_factory=list)
    # Variables that the caller set in place of an unknown value: that value, and theirs.
    given: dict[str, tuple[Unknown, str]] = field(default_factory=dict)
    reads_arguments: bool = False
    # An `exit` with an error that is always reached, and the variables without a value that lead to it.
    stops: list[tuple[Position, tuple[str, ...]]] = field(default_factory=list)
    # Variables and arguments without a value that conditions look at, by name, with the condition.
    asked: dict[str, Position] = field(default_factory=dict)
    ended: Position | None = None  # an `exit` that is always reached
    is_cut: bool = False  # a limit was reached
    cut_at: Position | None = None  # the command at which it was, if one was
