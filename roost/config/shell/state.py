"""What is known of a shell while a script is read: variables, arguments, functions, and the folder it is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

    def copy(self) -> State:
        arrays = {name: dict(value) for name, value in self.variables.items() if isinstance(value, dict)}
        return replace(self, variables={**self.variables, **arrays}, functions=dict(self.functions))

    def become(self, other: State) -> None:
        """Take over another state."""
        self.variables, self.arguments, self.functions = other.variables, other.arguments, other.functions
        self.folder, self.flow = other.folder, other.flow

    def array(self, name: str) -> Array:
        """The values of a variable as an array; of one that is not set, none."""
        value = self.variables.get(name)
        return value if isinstance(value, dict) else {} if value is None else {"0": value}

    def scalar(self, name: str) -> Value | None:
        """The value of a variable; the first of an array."""
        value = self.variables.get(name)
        return value.get("0") if isinstance(value, dict) else value


def initial_state(environ: Mapping[str, str], arguments: tuple[Value, ...], file: str) -> State:
    """A shell that was just started by the caller."""
    variables: dict[str, Value | Array] = {name: Value((text,) if text else ()) for name, text in environ.items()}
    return State(variables, arguments, folder=Path.cwd(), script=file, file=file)


def join(states: list[State], position: Position, reason: str, variable: str) -> State:
    """What holds after one of several branches, of which nobody knows which is taken.

    Branches that end the script are left out unless all do. `variable` is what the condition looks at, if one.
    """
    going_on = [state for state in states if not state.flow] or states
    first, *others = going_on
    result = first.copy()
    names = dict.fromkeys(name for state in going_on for name in state.variables)
    for name in names:
        values = [state.variables.get(name) for state in going_on]
        if all(value == values[0] for value in values[1:]):
            continue
        unknown = Unknown(f"${name}", reason, position, variable or name)
        if any(isinstance(value, dict) for value in values):
            result.variables[name] = _joined_array([state.array(name) for state in going_on], unknown)
        else:
            result.variables[name] = of_unknown(unknown)
    if any(state.arguments != first.arguments for state in others):
        result.arguments = (of_unknown(Unknown("$@", reason, position, variable, is_list=True)),)
    for state in others:
        result.functions |= state.functions
    return result


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
