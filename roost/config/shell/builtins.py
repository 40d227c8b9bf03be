"""Builtin commands of bash that change what is known of the shell."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from roost.config.shell.conditions import Status, bracket_status
from roost.config.shell.expand import Expander, folder_of
from roost.config.shell.reading import Reading
from roost.config.shell.state import State
from roost.config.shell.values import Unknown, Value, of_unknown, text_value
from roost.config.yaml_events import Position

MAX_NESTED = 10  # scripts, functions and `bash -c` within each other


class Builtins(ABC):
    """Each method `_do_NAME` takes the arguments, the place and the shell, and returns the exit status."""

    environ: Mapping[str, str]
    expander: Expander
    reading: Reading
    depth: int
    doubts: int  # conditions around this place that are not known
    conditions: list[tuple[str, ...]]  # variables of the conditions that are true here

    @abstractmethod
    def _file(self, path: str, state: State) -> bool: ...

    @abstractmethod
    def _text(self, value: Value, position: Position, state: State) -> None: ...

    @abstractmethod
    def _let(self, text: str, state: State, position: Position) -> Status: ...

    def _do_source(self, arguments: list[Value], position: Position, state: State) -> Status:
        path = arguments[0].tested if arguments else None
        if path is None or self.depth >= MAX_NESTED:
            self.reading.missing.append((arguments[0].shown if arguments else "", position))
            return None
        outer = state.arguments
        if len(arguments) > 1:
            state.arguments = tuple(arguments[1:])
        if not self._file(path, state):
            self.reading.missing.append((path, position))
        state.arguments = outer
        return None

    def _declare(self, command: str, words: Sequence[Value], names: Sequence[str], state: State) -> None:
        """What `export`, `local`, `declare` and their like say of names, before they are assigned."""
        texts = [word.prefix for word in words]
        options = "".join(text[1:] for text in texts if text.startswith(("-", "+")))
        is_unset = any(text.startswith("+") for text in texts)
        plain = [text for text in texts if re.fullmatch(r"[A-Za-z_]\w*", text)]
        given = [match[1] for text in texts if (match := re.match(r"([A-Za-z_]\w*)=", text))]
        if command == "local" or (command in ("declare", "typeset") and "g" not in options):
            for name in (*plain, *given, *names):
                state.make_local(name)
            if state.locals is not None:
                for name in plain:
                    state.variables.pop(name, None)
        if "A" in options:
            state.associative = state.associative.union(plain, given, names)
        if command == "export" or "x" in options:
            changed = [f"{name}()" for name in plain] if "f" in options else [*plain, *given, *names]
            is_gone = is_unset or "n" in options
            state.exported = state.exported.difference(changed) if is_gone else state.exported.union(changed)

    def _do_declare(self, arguments: list[Value], position: Position, state: State) -> Status:
        for argument in arguments:  # one whose name or value came from an expansion
            match = re.match(r"([A-Za-z_]\w*)=", argument.prefix)
            if match is not None:
                state.variables[match[1]] = argument.after(match.end())
        return True

    def _do_unset(self, arguments: list[Value], position: Position, state: State) -> Status:
        for argument in arguments:
            state.variables.pop(argument.known or "", None)
        return True

    def _do_read(self, arguments: list[Value], position: Position, state: State) -> Status:
        for argument in arguments:
            name = argument.known or ""
            if re.fullmatch(r"[A-Za-z_]\w*", name):
                unknown = Unknown(f"${name}", "it is read while the script runs", position, name, is_list=True)
                given = self.environ.get(name)
                state.variables[name] = of_unknown(unknown) if given is None else text_value(given, position)
        return None

    def _do_set(self, arguments: list[Value], position: Position, state: State) -> Status:
        names = [argument.known for argument in arguments]
        for at, name in enumerate(names[: names.index("--") if "--" in names else None]):
            is_named = name is not None and name[1:].endswith("o") and names[at + 1 : at + 2] == ["allexport"]
            if name is not None and (is_named or re.fullmatch(r"[-+][a-zA-Z]*a[a-zA-Z]*", name)):
                state.exports_all = name.startswith("-")
        if "--" in names:
            state.arguments = tuple(arguments[names.index("--") + 1 :])
        return True

    def _do_shift(self, arguments: list[Value], position: Position, state: State) -> Status:
        count = arguments[0].known if arguments else "1"
        if count is None or not count.isdecimal() or len(count) > 4:
            return None
        if int(count) > len(state.arguments):
            return False
        self.reading.reads_arguments = True
        state.arguments = state.arguments[int(count) :]
        return True

    def _do_cd(self, arguments: list[Value], position: Position, state: State) -> Status:
        paths = [argument.tested for argument in arguments if argument.known not in ("--", "-P", "-L")]
        path = paths[0] if paths else self.environ.get("HOME")
        state.folder = None if path is None or path == "-" else _normal(folder_of(state, path))
        return True

    def _do_exit(self, arguments: list[Value], position: Position, state: State) -> Status:
        """An exit with an error in a branch that is taken is reported, and the reading goes on."""
        code = arguments[0].known if arguments else "0"
        if code != "0" and not self.doubts and self.conditions:
            values = {name: state.scalar(name) for name in self.conditions[-1]}
            names = [name for name, value in values.items() if value is None or value.tested == ""]
            self.reading.stops.append((position, tuple(names)))
            return None
        state.flow = "exit"
        return None

    def _do_return(self, arguments: list[Value], position: Position, state: State) -> Status:
        state.flow = "return"
        return {"0": True, None: None}.get(arguments[0].known, False) if arguments else None

    def _do_break(self, arguments: list[Value], position: Position, state: State) -> Status:
        state.flow = "break"
        return True

    def _do_continue(self, arguments: list[Value], position: Position, state: State) -> Status:
        state.flow = "continue"
        return True

    def _do_test(self, arguments: list[Value], position: Position, state: State) -> Status:
        return bracket_status(arguments, state, self.expander)

    def _do_bracket(self, arguments: list[Value], position: Position, state: State) -> Status:
        closed = arguments[:-1] if arguments and arguments[-1].known == "]" else arguments
        return bracket_status(closed, state, self.expander)

    def _do_true(self, arguments: list[Value], position: Position, state: State) -> Status:
        return True

    def _do_false(self, arguments: list[Value], position: Position, state: State) -> Status:
        return False

    def _do_eval(self, arguments: list[Value], position: Position, state: State) -> Status:
        parts = [part for at, one in enumerate(arguments) for part in ([" "] if at else []) + list(one.parts)]
        if self.depth >= MAX_NESTED:
            self.reading.is_cut = True
        else:
            self._text(Value(tuple(parts), position), position, state)
        return None

    def _do_let(self, arguments: list[Value], position: Position, state: State) -> Status:
        status: Status = True
        for argument in arguments:
            text = argument.tested
            status = None if text is None else self._let(text, state, position)
        return status

    def _do_exec(self, arguments: list[Value], position: Position, state: State) -> Status:
        return True  # of redirections; one with a command is followed as that command


def _normal(path: Path) -> Path:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] not in ("..", "/"):
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


BUILTINS = {
    "source": "source",
    ".": "source",
    "[": "bracket",
    ":": "true",
    "typeset": "declare",
    "export": "declare",
    "local": "declare",
    "readonly": "declare",
    "declare": "declare",
    "mapfile": "read",
    "readarray": "read",
    "command": "exec",
    **{
        name: name
        for name in ("unset", "read", "set", "shift", "cd", "exit", "return", "break", "continue", "test", "true")
    },
    **{name: name for name in ("false", "eval", "let", "exec")},
}
