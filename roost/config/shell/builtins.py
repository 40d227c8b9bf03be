"""Assignments and builtin commands of bash."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from roost.config.findings import Position
from roost.config.shell.arithmetic import NotKnown
from roost.config.shell.children import SCRIPT, Child
from roost.config.shell.conditions import Status, bracket_status, known_texts, printed
from roost.config.shell.effects import unset_names
from roost.config.shell.expand import Expander, TooMuch, merged, resolved_path, word_separators
from roost.config.shell.filters import filtered
from roost.config.shell.getopts import next_option
from roost.config.shell.slurm import batch_variables
from roost.config.shell.state import (
    Array,
    Doubt,
    Reading,
    State,
    Unknown,
    Value,
    next_index,
    of_unknown,
    text_value,
    unknown_elements,
)
from roost.config.shell.syntax import Assignment, Input, Literal, Word

_SCHEDULER_PREFIXES = ("SLURM_", "PBS_", "LSB_", "PMI_", "OMPI_")  # of variables that only a scheduler sets
MAX_NESTED = 10  # scripts, functions and `bash -c` within each other


class Builtins(ABC):
    """Builtin commands: `_do_NAME` takes the arguments, the position and the shell, and returns the exit status."""

    environ: Mapping[str, str]
    read_text: Callable[[Path], str | None]
    expander: Expander
    reading: Reading
    depth: int
    files: list[Path]  # being read, each sourced by the one before
    steps: int
    loops: int  # around this statement, within its function
    doubts: int  # unknown conditions around this statement
    exits: list[int]  # the doubts at each `exit` that this shell reached
    subshells: int  # and child scripts, around this statement
    conditions: list[tuple[str, ...]]  # variables of the conditions that are true here
    # States that left a function or loop under an unknown condition; they continue after its end.
    left: list[tuple[State, Doubt]]
    stdin: Value | None  # the unread input of commands; None if it is not known
    printed: list[Value | None] | None = None  # by what `$(...)` runs; None where it is not known

    @abstractmethod
    def _file(self, path: str, state: State, is_program: bool = False) -> bool: ...

    @abstractmethod
    def _text(self, value: Value, position: Position, state: State) -> Status: ...

    @abstractmethod
    def _let(self, text: str, state: State, position: Position) -> Status: ...

    def _count(self, array: Array) -> None:
        """Count an assigned array as steps, by its length."""
        self.steps += len(array) // 1000
        if len(array) > 20_000:
            raise TooMuch("an array is too long")

    def _of_input(self, given: Input, words: Sequence[str], state: State) -> str | None:
        """The output of a filter that reads a here-string or here-document."""
        text = self.expander.one(given.body, state).tested if given.body is not None else None
        return None if text is None else filtered(text if given.delimiter else f"{text}\n", words)

    def _child_file(self, child: Child, position: Position, state: State) -> None:
        """Read the file of a child script, or note that it is missing."""
        is_read = self._file(child.path, state, child.is_program)
        is_script = not child.is_program or SCRIPT.fullmatch(child.path) is not None
        if not is_read and is_script and self.read_text(resolved_path(state, child.path)) is None:
            self.reading.missing_scripts.append((child.path, position))

    def _add_slurm_variables(self, child: Child, state: State) -> None:
        """Give a script that sbatch starts the variables of Slurm."""
        if child.options is not None:
            text = child.text or state.written.get(file := resolved_path(state, child.path))
            script = (self.read_text(file) or "").replace("\r\n", "\n") if text is None else text.shown
            state.add_slurm_variables(batch_variables(script, child.path or None, child.options), self.environ)

    def _do_source(self, arguments: list[Value], position: Position, state: State) -> Status:
        path = arguments[0].tested if arguments else None
        if path is None:
            self.reading.missing_sources.append((arguments[0].shown if arguments else "", position))
            return None
        if self.depth >= MAX_NESTED:
            is_circle = resolved_path(state, path) in self.files
            why = "sources itself" if is_circle else f"is nested more than {MAX_NESTED} deep"
            self.reading.not_followed.append((path, position, why))
            return None
        outer = state.arguments
        if len(arguments) > 1:
            state.arguments = tuple(arguments[1:])
        if not self._file(path, state) and Path(path).name != "activate":  # of a virtual environment
            self.reading.missing_sources.append((path, position))
        state.arguments = outer
        return None

    def _declare(self, command: str, words: Sequence[Value], assigned: Sequence[Assignment], state: State) -> None:
        """Apply the attributes that `export`, `local`, `declare` and the like give to names, before assigning."""
        texts = [word.prefix for word in words]
        options = "".join(text[1:] for text in texts if text.startswith(("-", "+")))
        is_unset = any(text.startswith("+") for text in texts)
        plain = [text for text in texts if re.fullmatch(r"[A-Za-z_]\w*", text)]
        given = [match[1] for text in texts if (match := re.match(r"([A-Za-z_]\w*)=", text))]
        names = [one.name for one in assigned]
        if command == "local" or (command in ("declare", "typeset") and "g" not in options):
            lists = [one.name for one in assigned if not isinstance(one.value, Word)]  # may have the outer elements
            for name in (*plain, *given, *names):
                if state.make_local(name) and name not in lists:
                    state.variables.pop(name, None)
        changed = {*plain, *given, *names}
        if "n" in options and command != "export":
            state.references = state.references - changed if is_unset else state.references | changed
        if "i" in options:
            state.integers = state.integers - changed if is_unset else state.integers | changed
        if "A" in options:
            state.associative = state.associative | changed
        if command == "export" or "x" in options:
            changed = {f"{name}()" for name in plain} if "f" in options else changed
            is_gone = is_unset or "n" in options
            state.exported = state.exported.difference(changed) if is_gone else state.exported.union(changed)

    def _do_declare(self, arguments: list[Value], position: Position, state: State) -> Status:
        for argument in arguments:  # one whose name or value came from an expansion
            match = re.match(r"([A-Za-z_]\w*)=", argument.prefix)
            if match is not None:
                state.variables[match[1]] = argument.after(match.end())
            elif argument.is_open and not argument.prefix and argument.unknown is not None:  # export $(cat .env)
                unknown = argument.unknown
                reason = f"{unknown.shown}, which is not known, may give it"
                state.fallback = replace(unknown, reason=reason, variable="")
                self.reading.missing_sources.append((unknown.shown, position))
        return True

    def _do_unset(self, arguments: list[Value], position: Position, state: State) -> Status:
        options = "".join(one.prefix[1:] for one in arguments if one.prefix.startswith("-"))
        for argument in arguments:
            name = argument.known or ""
            if "f" in options:
                self._unset_function(name, state)
                continue
            element = re.fullmatch(r"([A-Za-z_]\w*)\[(.+)\]", name, re.DOTALL)
            if element is not None and element[2] not in ("@", "*"):
                self._unset_element(element[1], element[2], position, state)
                continue
            target = element[1] if element else name if "n" in options else state.target(name)
            if not options and target not in state.variables and target in state.functions:
                self._unset_function(target, state)
            state.unset(target)
        return True

    def _unset_function(self, name: str, state: State) -> None:
        state.functions.pop(name, None)
        state.exported = state.exported - {f"{name}()"}

    def _unset_element(self, name: str, index: str, position: Position, state: State) -> None:
        key = self.expander.key(name, Word((Literal(index, True),), position), state)
        if key is None:
            state.variables[name] = {"0": unknown_elements(name, position)}
        else:
            array = dict(state.array(name))
            array.pop(key, None)
            self._count(array)
            state.variables[name] = array

    def _do_printf(self, arguments: list[Value], position: Position, state: State) -> Status:
        if len(arguments) > 2 and arguments[0].known == "-v" and (name := arguments[1].known):
            texts = known_texts(arguments[2:])
            text = printed(texts) if texts is not None else None
            unknown = next((one.unknown for one in arguments[2:] if one.unknown), None)
            unknown = unknown or Unknown(f"${name}", "its format is not read", position, name)
            state.variables[name] = of_unknown(unknown) if text is None else text_value(text, position)
        return True

    def _do_getopts(self, arguments: list[Value], position: Position, state: State) -> Status:
        """The next option of the arguments, while they are known."""
        name = arguments[1].known if len(arguments) > 1 else None
        if name is None:
            return None
        given = list(state.arguments)
        if len(arguments) > 2:
            given = arguments[2:]
        else:
            self.reading.reads_arguments = True
        at = state.scalar("OPTIND")
        number = at.known if at is not None else "1"
        form = arguments[0].known
        if form is None or number is None or not number.isdecimal() or any(one.known is None for one in given):
            for one in (name, "OPTARG", "OPTIND"):
                unknown = Unknown(f"${one}", "the arguments of getopts are not known", position, is_list=True)
                state.variables[one] = of_unknown(unknown)
            return None
        found = next_option(form, [one.known or "" for one in given], int(number), state.option_at)
        state.option_at = found.letter
        state.variables["OPTIND"] = text_value(str(found.index), position)
        state.variables[name] = text_value(found.name, position)
        state.put("OPTARG", None if found.argument is None else text_value(found.argument, position))
        return not found.is_end

    def _do_read(self, arguments: list[Value], position: Position, state: State) -> Status:
        texts = [argument.known or "" for argument in arguments]
        options = "".join(text[1:] for text in texts if text.startswith("-"))
        names = [text for text in texts if re.fullmatch(r"[A-Za-z_]\w*", text)]
        given, fields = self.stdin.known if self.stdin is not None else None, word_separators(state)
        if self.stdin is not None and set(options) == set("rd") and texts[-2:] == ["", *names]:  # read -r -d '' NAME
            is_stripped = fields is not None and fields.fullmatch("\n")
            state.variables[names[0]] = self.stdin.stripped() if is_stripped else self.stdin
            self.stdin = None
            return False  # there is no delimiter before the end of the input
        if given is not None and fields is not None and not set(options) - set("ra") and len(texts) - len(names) < 3:
            line, _, rest = given.partition("\n")
            self.stdin = text_value(rest, position)
            if "r" in options or "\\" not in line:
                if names:
                    self._read_line(line, names, "a" in options, fields, position, state)
                else:
                    state.variables["REPLY"] = text_value(line, position)
                return bool(given)
        inner = self.stdin.unknown if self.stdin is not None else None
        for name in names:
            variable = inner.variable if inner is not None else "" if "a" in options else name
            unknown = Unknown(f"${name}", "it is read while the script runs", position, variable, is_list=True)
            own = self.environ.get(name) if "a" not in options else None
            state.variables[name] = of_unknown(unknown) if own is None else text_value(own, position)
        return None

    def _read_line(
        self, line: str, names: list[str], is_array: bool, fields: re.Pattern[str], position: Position, state: State
    ) -> None:
        """Give the fields of a line to variables: the last one has the rest, without the delimiter of a last field."""
        blanks = "".join(one for one in " \t" if fields.fullmatch(one))
        line = line.strip(blanks) if blanks else line
        if is_array:
            values = fields.split(line)
            values = values if values[-1] else values[:-1]
            state.variables[names[-1]] = {str(at): text_value(one, position) for at, one in enumerate(values)}
            return
        found = fields.split(line, maxsplit=len(names) - 1) if len(names) > 1 else [line]
        last, *rest = fields.split(found[-1], maxsplit=2)
        found[-1] = last if rest == [""] else found[-1]
        for at, name in enumerate(names):
            state.variables[name] = text_value(found[at] if at < len(found) else "", position)

    def _do_mapfile(self, arguments: list[Value], position: Position, state: State) -> Status:
        """Lines of the input as an array, with -t without their ends."""
        texts = [argument.known or "" for argument in arguments]
        name = next((text for text in texts if re.fullmatch(r"[A-Za-z_]\w*", text)), "MAPFILE")
        given = self.stdin.known if self.stdin is not None else None
        if given is not None and texts in (["-t"], ["-t", name]):
            state.variables[name] = {str(at): text_value(one, position) for at, one in enumerate(given.splitlines())}
            return True
        inner = self.stdin.unknown if self.stdin is not None else None
        variable = inner.variable if inner is not None else ""
        unknown = Unknown(f"${{{name}[@]}}", "it is read while the script runs", position, variable, is_list=True)
        state.variables[name] = {"0": of_unknown(unknown)}
        return None

    def _do_set(self, arguments: list[Value], position: Position, state: State) -> Status:
        waiting = list(arguments)
        while waiting:
            text, prefix = waiting[0].tested, waiting[0].prefix
            if text is None and not prefix.startswith(("-", "+")) and prefix:
                break  # it begins with a known text
            if text is None:
                if len(waiting) > 1 or not prefix:
                    state.arguments = _any_arguments(waiting[0])
                return True
            if text in ("-", "--"):
                state.arguments = tuple(waiting[1:]) if text == "--" or waiting[1:] else state.arguments
                return True
            if not text.startswith(("-", "+")):
                break
            del waiting[0]
            names = list(text[1:])
            for at, letter in enumerate(names):
                value = waiting[0].prefix if letter == "o" and waiting else ""
                if value and not value.startswith(("-", "+")):
                    names[at] = {"allexport": "a", "nounset": "u"}.get(value, "o")
                    del waiting[0]
            state.exports_all = text.startswith("-") if "a" in names else state.exports_all
            state.stops_at_unset = text.startswith("-") if "u" in names else state.stops_at_unset
        if waiting:
            state.arguments = tuple(waiting)
        return True

    def _do_shift(self, arguments: list[Value], position: Position, state: State) -> Status:
        self.reading.reads_arguments = True
        count = arguments[0].tested if arguments else "1"
        if count is None:
            state.arguments = _any_arguments(arguments[0])
            return None
        if not count:  # of a variable without a value
            count = "1"
        if not count.isdecimal() or len(count) > 4:
            return False
        open_list = next((at for at, one in enumerate(state.arguments) if one.is_open), int(count))
        if open_list < int(count):
            state.arguments = _any_arguments(state.arguments[open_list])
            return None
        if int(count) > len(state.arguments):
            return False
        state.arguments = state.arguments[int(count) :]
        return True

    def _do_cd(self, arguments: list[Value], position: Position, state: State) -> Status:
        paths = [argument.tested for argument in arguments if argument.known not in ("--", "-P", "-L")]
        path = paths[0] if paths else None
        if not paths or path == "-":
            named = state.scalar("OLDPWD" if paths else "HOME")
            path = None if named is None else named.known
        return self._go(None if path is None else _normal(resolved_path(state, path)), position, state)

    def _go(self, folder: Path | None, position: Position, state: State) -> Status:
        state.put("OLDPWD", None if state.folder is None else text_value(str(state.folder), position))
        state.folder = folder
        return True

    def _do_pushd(self, arguments: list[Value], position: Position, state: State) -> Status:
        names = [one.known for one in arguments if one.known != "-n"]
        if names and not re.fullmatch(r"[-+]\d+", names[0] or ""):
            state.folders = (state.folder, *state.folders)
            return self._do_cd(arguments, position, state)
        folder = state.folders[0] if state.folders and not names else None  # alone, it changes the first two
        state.folders = () if names else (state.folder, *state.folders[1:])
        return self._go(folder, position, state)

    def _do_popd(self, arguments: list[Value], position: Position, state: State) -> Status:
        folder, state.folders = next(iter(state.folders), None), state.folders[1:]
        return self._go(folder, position, state)

    def _do_exit(self, arguments: list[Value], position: Position, state: State) -> Status:
        """Note an exit with an error in a branch that is taken, and continue after it.

        An exit of a subshell or a child script ends only that.
        """
        code = arguments[0].known if arguments else None
        is_own = not self.doubts and not self.subshells
        if code not in ("0", None) and is_own and self.conditions:
            values = {name: state.scalar(name) for name in self.conditions[-1]}
            names = [_name_to_give(name, values[name]) for name in values if _is_empty(name, values[name], state)]
            self.reading.stops.append((position, tuple(dict.fromkeys(names))))
            return None
        if is_own:
            self.reading.ended = position
        self.exits.append(self.doubts)
        state.flow = "exit"
        return {"0": True, None: None}.get(code, False)

    def _stop_at_unset(self, words: Sequence[Word], state: State) -> None:
        """Note unset variables that stop the script, unless a missing file may set them."""
        names = [*unset_names(words, state)]
        if names and self.printed is not None:
            self.printed.append(None)
        if self.doubts or self.reading.missing_sources:
            return
        for name, position in names:
            if not name.startswith(_SCHEDULER_PREFIXES) and (name,) not in [names for _, names in self.reading.stops]:
                self.reading.stops.append((position, (name,)))

    def _do_return(self, arguments: list[Value], position: Position, state: State) -> Status:
        state.flow = "return"
        return {"0": True, None: None}.get(arguments[0].known, False) if arguments else None

    def _do_break(self, arguments: list[Value], position: Position, state: State) -> Status:
        return self._leave("break", arguments, state)

    def _do_continue(self, arguments: list[Value], position: Position, state: State) -> Status:
        return self._leave("continue", arguments, state)

    def _leave(self, flow: str, arguments: list[Value], state: State) -> Status:
        count = arguments[0].known if arguments else "1"
        levels = int(count) if count is not None and re.fullmatch(r"[1-9]\d{0,3}", count) else 1
        if self.loops:
            state.flow, state.levels = flow, min(levels, self.loops)
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
            return None
        return self._text(Value(tuple(parts), position), position, state)

    def _do_let(self, arguments: list[Value], position: Position, state: State) -> Status:
        status: Status = True
        for argument in arguments:
            text = argument.tested
            status = None if text is None else self._let(text, state, position)
        return status

    def _do_exec(self, arguments: list[Value], position: Position, state: State) -> Status:
        return True  # of redirections; one with a command is followed as that command


def _any_arguments(value: Value) -> tuple[Value, ...]:
    """Arguments of which nothing is known because of a value."""
    unknown = value.unknown
    return () if unknown is None else (of_unknown(replace(unknown, is_list=True, is_unset=False)),)


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
    "mapfile": "mapfile",
    "readarray": "mapfile",
    "command": "exec",
    **{name: name for name in ("unset", "read", "set", "shift", "cd", "pushd", "popd", "exit", "return", "break")},
    **{name: name for name in ("continue", "test", "true", "false", "eval", "let", "exec", "printf", "getopts")},
}


class Assignments(Builtins):
    """Sets variables as a script assigns them."""

    def _assign(
        self, assignment: Assignment, state: State, is_declared: bool = False, expanded: Value | None = None
    ) -> None:
        """Set a variable or an element; `expanded` is the value if it was expanded before."""
        name = assignment.name if is_declared else state.target(assignment.name)
        if state.exports_all:
            state.exported = state.exported.union((name,))
        if not isinstance(assignment.value, Word):
            self._assign_array(name, assignment.value, assignment, state)
            return
        value = expanded if expanded is not None else self.expander.one(assignment.value, state)
        value = self._given(name, value, assignment)
        if name in state.integers:
            value = self._computed(assignment, state, value.unknown)
        if assignment.index is not None:
            self._assign_element(name, assignment.index, value, assignment, state)
            return
        old = state.scalar(name)
        if assignment.appends and name in state.integers:
            state.variables[name] = value
        elif assignment.appends and isinstance(state.variables.get(name), dict):
            array = state.array(name)
            first = merged([*array.get("0", Value()).parts, *value.parts], value.position)
            state.variables[name] = {**array, "0": first}
        elif assignment.appends and old is not None:
            state.variables[name] = merged([*old.parts, *value.parts], old.position)
        elif isinstance(state.variables.get(name), dict):
            state.variables[name] = self._with_first(name, value, state)
        else:
            state.variables[name] = value

    def _assign_element(self, name: str, index: Word, value: Value, assignment: Assignment, state: State) -> None:
        """`A[index]=value`."""
        key = self.expander.key(name, index, state)
        array = dict(state.array(name))
        several = [at for at, one in array.items() if one.unknown is not None and one.unknown.is_list]
        is_listed = bool(several) and name not in state.associative
        is_behind = is_listed and key not in [*array][: [*array].index(several[0])]
        if key is None or is_behind:  # any element may be this one
            array = {"0": unknown_elements(name, assignment.position)}
        elif assignment.appends and key in array:
            array[key] = merged([*array[key].parts, *value.parts], value.position)
        else:
            is_keyed = name in state.associative or not key.isdecimal()
            is_in_order = is_keyed or key in array or int(key) >= next_index(array)
            array[key] = value
            self._count(array)
            if not is_in_order:
                self.steps += len(array) // 10
                array = state.in_order(name, array)
        state.variables[name] = array

    def _assign_array(
        self, name: str, items: Sequence[tuple[Word | None, Word]], assignment: Assignment, state: State
    ) -> None:
        """`A=(items)` and `A+=(items)`."""
        array = dict(state.array(name)) if assignment.appends else {}
        following = next_index(array)
        for key_word, word in items:
            if key_word is not None:
                key = self.expander.key(name, key_word, state)
                value = self.expander.one(word, state)
                if key is None:
                    key, value = str(following), unknown_elements(name, assignment.position)
                array[key] = value
                following = int(key) + 1 if key.isdecimal() else following
                continue
            values = self.expander.listed(word, state)
            unset = self.expander.one(word, state).unknown if not values else None
            last = str(following - 1)
            if unset is not None and unset.is_unset and last in array:
                array[last] = replace(array[last], dropped=unset)  # it may be a flag
            for value in values:
                array[str(following)] = value
                following += 1
        self._count(array)
        has_keys = any(key_word is not None for key_word, _ in items)
        state.variables[name] = state.in_order(name, array) if has_keys else array

    def _with_first(self, name: str, value: Value, state: State) -> Array:
        """An array with a new element 0; an unknown one before it may have been several elements."""
        array = state.array(name)
        first = array.get("0")
        self._count(array)
        if first is not None and first.unknown is not None and name not in state.associative:
            return {"0": value, "1": of_unknown(replace(first.unknown, is_list=True))}
        return {"0": value} | array | {"0": value}  # it is listed first

    def _given(self, name: str, value: Value, assignment: Assignment) -> Value:
        """The value that the caller set in place of an unknown one, or the unknown one with the variable to set."""
        unknown = value.unknown
        if unknown is None or value.tested is not None:
            return value
        if name in self.environ:
            self.reading.given[name] = (unknown, self.environ[name])
            return text_value(self.environ[name], assignment.position)
        if len(value.parts) == 1 and not unknown.is_unset:
            return Value((replace(unknown, variable=unknown.variable or name),), value.position)
        return value

    def _computed(self, assignment: Assignment, state: State, part: Unknown | None) -> Value:
        """The value of a variable that `declare -i` made a number; `part` is what is not known of its expression."""
        word = assignment.value
        if isinstance(word, Word) and assignment.appends:
            word = replace(word, parts=(Literal(f"{assignment.name} + ("), *word.parts, Literal(")")))
        try:
            if not isinstance(word, Word) or assignment.index is not None:
                raise NotKnown(assignment.name)
            return text_value(str(self.expander.number(word, state)), assignment.position)
        except NotKnown:
            name, reason = assignment.name, "it is computed from what is not known"
            variable = part.variable if part is not None and part.variable else name
            unknown = Unknown(f"${name}", reason, assignment.position, variable)
            return self._given(name, of_unknown(unknown), assignment)


def _name_to_give(name: str, value: Value | None) -> str:
    """The unset variable, or the argument of the script that gives it a value."""
    if name == "#" or name.isdigit():
        return "$1" if name == "#" else f"${name}"
    argument = value.unknown.argument if value is not None and value.unknown is not None else 0
    return f"${argument}" if argument else name


def _is_empty(name: str, value: Value | None, state: State) -> bool:
    """Return True if a variable or argument, or with `#` all arguments, have no value."""
    if name == "#":
        return not state.arguments
    if name.isdigit():
        return int(name) > len(state.arguments) or state.arguments[int(name) - 1].tested == ""
    return value is None or value.tested == ""
