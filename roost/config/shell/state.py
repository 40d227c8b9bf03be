"""Known state of a shell while a script is read: variables, arguments, functions and working folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from roost.config.shell.syntax import Statement
from roost.config.shell.values import Unknown, Value, of_unknown
from roost.config.yaml_events import Position

Array = dict[str, Value]  # by index or key, in order


@dataclass(slots=True)
class State:
    """One shell; a copy is a subshell, or what holds if a condition is true."""

    variables: dict[str, Value | Array]
    arguments: tuple[Value, ...] = ()
    functions: dict[str, Statement] = field(default_factory=dict)
    folder: Path | None = None
    script: str = ""  # $0
    file: str = ""  # BASH_SOURCE
    flow: str = ""  # exit, return, break or continue, where one of them was reached
    levels: int = 1  # of loops that break or continue leaves
    exported: frozenset[str] = frozenset()  # names of variables, and of functions with "()"
    exports_all: bool = False  # set -a
    associative: frozenset[str] = frozenset()  # names of arrays with text as keys
    integers: frozenset[str] = frozenset()  # names of declare -i
    option_at: int = 1  # the letter of the argument that getopts reads next
    locals: dict[str, Value | Array | None] | None = None  # of a function, with their values outside of it

    def copy(self) -> State:
        # Arrays are never changed in place, so that copies may share them.
        own = None if self.locals is None else dict(self.locals)
        return replace(self, variables=dict(self.variables), functions=dict(self.functions), locals=own)

    def child(self) -> State:
        """A shell that this one starts: it has what is exported."""
        variables: dict[str, Value | Array] = {
            name: value
            for name, value in self.variables.items()
            if name in self.exported and not isinstance(value, dict)
        }
        functions = {name: body for name, body in self.functions.items() if f"{name}()" in self.exported}
        exported = self.exported
        return State(variables, self.arguments, functions, self.folder, self.script, self.file, exported=exported)

    def become(self, other: State) -> None:
        """Take over another state."""
        for slot in fields(self):
            setattr(self, slot.name, getattr(other, slot.name))

    def make_local(self, name: str) -> None:
        """Keep the value of a variable for the end of the function."""
        if self.locals is not None:
            self.locals.setdefault(name, self.variables.get(name))

    def end_function(self) -> None:
        """Give local variables back what they were."""
        for name, value in (self.locals or {}).items():
            self.put(name, value)

    def put(self, name: str, value: Value | Array | None) -> None:
        """Set a variable, or unset it."""
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value

    def array(self, name: str) -> Array:
        """The values of a variable as an array; of one that is not set, none."""
        value = self.variables.get(name)
        return value if isinstance(value, dict) else {} if value is None else {"0": value}

    def in_order(self, name: str, array: Array) -> Array:
        """An array by index, as bash lists it; one with text as keys as it is."""
        if name in self.associative or not all(key.isdecimal() for key in array):
            return array
        return {key: array[key] for key in sorted(array, key=int)}

    def scalar(self, name: str) -> Value | None:
        """The value of a variable; the first of an array."""
        value = self.variables.get(name)
        return value.get("0") if isinstance(value, dict) else value


def initial_state(environ: Mapping[str, str], arguments: tuple[Value, ...], file: str) -> State:
    """A shell that was just started by the caller."""
    variables: dict[str, Value | Array] = {name: Value((text,) if text else ()) for name, text in environ.items()}
    variables.pop("IFS", None)  # a shell begins with its own
    exported = frozenset(variables)
    return State(variables, arguments, folder=Path.cwd(), script=file, file=file, exported=exported)


@dataclass(frozen=True, slots=True)
class Doubt:
    """A condition that is not known: its place, the reason that values give, and the variable it looks at."""

    position: Position
    reason: str
    variable: str = ""

    @classmethod
    def of_rounds(cls, position: Position) -> Doubt:
        """A loop with an unknown number of rounds."""
        line = f"line {position[1]}" if position[1] else "another line"
        return cls(position, f"it depends on the rounds of the loop in {line}, which only a run tells")

    def about(self, name: str) -> Unknown:
        return Unknown(f"${name}", self.reason, self.position, self.variable)  # giving `name` itself decides nothing


def going_on(states: list[State]) -> tuple[list[State], list[State]]:
    """Branches that go on together, and those that left a function or loop.

    Branches that end the script are left out unless all do.
    """
    alive = [state for state in states if state.flow != "exit"] or states
    flow = next((state.flow for state in alive if not state.flow), alive[0].flow)
    return [state for state in alive if state.flow == flow], [state for state in alive if state.flow != flow]


def join(states: list[State], doubt: Doubt) -> State:
    """Join the states of several branches, of which one is taken; values that differ become unknown."""
    first, *others = states
    result = first.copy()
    result.associative = first.associative.union(*(state.associative for state in others))
    result.integers = first.integers.union(*(state.integers for state in others))
    result.exported = first.exported.union(*(state.exported for state in others))
    names = dict.fromkeys(name for state in states for name in state.variables)
    for name in names:
        value = first.variables.get(name)
        if all((other := state.variables.get(name)) is value or other == value for state in others):
            continue
        values = [state.variables.get(name) for state in states]
        if not any(isinstance(value, dict) for value in values):
            result.variables[name] = of_unknown(doubt.about(name))
        elif name in result.associative:
            result.variables[name] = _joined_keys([state.array(name) for state in states], doubt.about(name))
        else:
            result.variables[name] = _joined_array([state.array(name) for state in states], doubt.about(name))
    if any(state.arguments != first.arguments for state in others):
        unknown = Unknown("$@", doubt.reason, doubt.position, doubt.variable, is_list=True)
        result.arguments = (of_unknown(unknown),)
    for state in others:
        result.functions |= state.functions
        if result.locals is not None:
            result.locals |= {name: old for name, old in (state.locals or {}).items() if name not in result.locals}
        if state.folder != first.folder:
            result.folder = None
    return result


def uncertain(state: State, before: State, doubt: Doubt) -> None:
    """Make what changed since `before` unknown."""
    state.become(join([state, before], doubt))


def _joined_keys(arrays: list[Array], unknown: Unknown) -> Array:
    """An associative array with the values that all have; those that differ are not known."""
    keys = dict.fromkeys(key for array in arrays for key in array)
    first, *others = arrays
    return {
        key: first[key]
        if key in first and all(array.get(key) == first[key] for array in others)
        else of_unknown(unknown)
        for key in keys
    }


def _joined_array(arrays: list[Array], unknown: Unknown) -> Array:
    """The elements that all begin with, one that is not known, and those that all end with."""
    lists = [list(array.values()) for array in arrays]
    shortest = min(len(one) for one in lists)
    head = next((at for at in range(shortest) if any(one[at] != lists[0][at] for one in lists)), shortest)
    tail = 0
    while tail < shortest - head and all(one[-1 - tail] == lists[0][-1 - tail] for one in lists):
        tail += 1
    kept = [*lists[0][:head], of_unknown(replace(unknown, is_list=True)), *lists[0][len(lists[0]) - tail :]]
    return {str(at): value for at, value in enumerate(kept)}
