"""Reads a script statement by statement, follows its variables, and collects the commands it would start.

Nothing is executed: a command is only recorded, and its output and effects are mostly unknown.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roost.config.findings import Position
from roost.config.shell.arithmetic import NotKnown
from roost.config.shell.branches import RUNS_TEXT, Branches
from roost.config.shell.builtins import BUILTINS, MAX_NESTED
from roost.config.shell.children import Child, child_of, started
from roost.config.shell.conditions import (
    Status,
    both,
    condition_status,
    echo_of,
    either,
    negated,
)
from roost.config.shell.effects import (
    behind_options,
    changes,
    is_command,
    is_test,
    position_of,
    succeeds,
    variables_of,
    with_fallthrough,
    without_value,
)
from roost.config.shell.expand import OUTPUT, Expander, TooMuch, merged, resolved_path
from roost.config.shell.parser import Parser
from roost.config.shell.patterns import matches_pattern
from roost.config.shell.state import (
    Array,
    Command,
    Doubt,
    Reading,
    Snapshot,
    State,
    Unknown,
    Value,
    is_argument,
    of_unknown,
)
from roost.config.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Case,
    Choice,
    Condition,
    For,
    Function,
    Group,
    If,
    Input,
    Loop,
    Parameter,
    Pipeline,
    ShellError,
    Simple,
    Statement,
    Word,
    places_of,
)

MAX_STEPS = 30_000  # statements of one reading
MAX_OUTPUT_STEPS = 1_000  # of one `$(...)`
MAX_ALL_OUTPUT_STEPS = 5_000  # of all
MAX_COMMANDS = 2_000
_OTHER_KIND = re.compile(r"#!(?!.*\b(ba|z|da|k)?sh\b)|[^\n]*\0")  # first line of a file that is no shell script
_CHANGING = "sed mv rm tee cp ln truncate patch"  # commands that change files among their arguments
# Commands that are not recorded.
_QUIET = "echo printf sleep mkdir rm trap ulimit wait pkill kill pip pip3 true :"


class _Stop(Exception):
    """A limit was reached."""


class Interpreter(Branches):
    """Reads statements in a state; `environ` is the caller's environment.

    `job_commands` are the variables that hold the command of a batch script, such as COMMAND of NeMo-RL.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        read_text: Callable[[Path], str | None],
        job_commands: Sequence[str] = (),
    ) -> None:
        self.environ, self.read_text, self.job_commands = environ, read_text, job_commands
        self.expander, self.reading = Expander(self._output), Reading()
        self.stdin: Value | None = None
        self.snapshot: Snapshot | None = None  # of the last command
        self.files: list[Path] = []
        self.steps, self.depth, self.doubts, self.loops, self.subshells = 0, 0, 0, 0, 0
        self.limit, self.output_steps = MAX_STEPS, 0
        self.exits: list[int] = []
        self.conditions: list[tuple[str, ...]] = []  # variables of the conditions that are true here
        self.left: list[tuple[State, Doubt]] = []
        self.scripts: list[object] = []  # that are being read, each with its arguments and environment

    def read(self, text: str, file: str, state: State) -> Reading:
        """Read a whole script."""
        statements, error = Parser(text, file).parse()
        if error is not None:
            self.reading.errors.append(error)
        self.scripts.append((resolved_path(state, file), state.arguments, state.environment))
        try:
            self._run_all(statements, state)
        except (_Stop, TooMuch, RecursionError):
            self.reading.is_cut = True
        self.reading.reads_arguments = self.reading.reads_arguments or self.expander.reads_arguments
        return self.reading

    # --- statements

    def _run_all(self, statements: Sequence[Statement], state: State) -> Status:
        status: Status = True
        for statement in statements:
            status = self._run(statement, state)
            if state.flow:
                break
        return status

    def _run(self, statement: Statement, state: State) -> Status:
        self.steps += 1
        if self.steps > self.limit:
            self.reading.cut_at = self.reading.cut_at or getattr(statement, "position", None)
            raise _Stop
        if isinstance(statement, Simple):
            return self._simple(statement, state)
        if isinstance(statement, AndOr):
            return self._and_or(statement, state)
        if isinstance(statement, Pipeline):
            return self._pipeline(statement, state)
        if isinstance(statement, Group):
            outer = self._take_input(statement.stdin, state)
            if self.printed is not None and statement.merges_stderr:
                self.printed.append(None)
            with self._muted(statement.is_redirected):
                status = (self._in_subshell if statement.is_subshell else self._run_all)(statement.body, state)
            self.stdin = self.stdin if statement.stdin is None else outer
            if statement.stdout is not None:
                self._note_writes(Simple((), (), statement.stdout.position, None, statement.stdout), (), state)
            return statement.is_background or status
        if isinstance(statement, If):
            return self._if(statement, 0, state)
        if isinstance(statement, Loop):
            return self._loop(statement, state)
        if isinstance(statement, For):
            return self._for(statement, state)
        if isinstance(statement, Case):
            return self._case(statement, state)
        if isinstance(statement, Function):
            state.functions[statement.name] = statement.body
            return True
        if isinstance(statement, Condition):
            return condition_status(statement, state, self.expander)
        return self._arithmetic(statement, state)

    def _and_or(self, statement: AndOr, state: State) -> Status:
        status = self._run(statement.first, state)
        last, is_tested = statement.first, is_test(statement.first)
        for operator, following in statement.rest:
            if state.flow:
                break
            wanted = operator == "&&"
            if status is not None and is_tested:
                self._note_asked(variables_of((last,)), position_of(statement), state)
            is_free = succeeds(last) or not changes(following, (*BUILTINS, *state.functions))
            if status is None and not is_tested and is_free and is_command(last, state.functions):
                status = True  # a command is taken to succeed
            if status is None:
                status = self._in_doubt(
                    [partial(self._run, following), lambda _: True],
                    state,
                    position_of(statement),
                    variables_of((statement.first,)),
                )
            elif status is wanted:
                self.conditions.append(variables_of((statement.first,)))
                after = self._run(following, state)
                self.conditions.pop()
                status = both(status, after) if wanted else either(status, after)
                last, is_tested = following, is_test(following)
        return status

    def _in_subshell(self, statements: Sequence[Statement], state: State) -> Status:
        """Run statements in a subshell."""
        before, exits = len(self.left), len(self.exits)
        self.subshells += 1
        inner = state.copy()
        status = self._run_all(statements, inner)
        self.subshells, state.written, state.touched = self.subshells - 1, inner.written, inner.touched
        is_open = len(self.left) > before or any(doubts > self.doubts for doubts in self.exits[exits:])
        if is_open and self.printed is not None:
            self.printed.append(None)  # what follows an end that is not certain is not always printed
        del self.left[before:], self.exits[exits:]
        return None if is_open else status

    def _pipeline(self, statement: Pipeline, state: State) -> Status:
        if len(statement.commands) == 1:
            status = self._run(statement.commands[0], state)
            return negated(status) if statement.is_negated else status
        outer, given = self.stdin, None
        if self.printed is not None:
            self.printed.append(self._output_of_pipeline(statement, state))
        with self._muted(True):
            for command in statement.commands:
                self.stdin = given
                given = self._piped_output(command, state) if command is not statement.commands[-1] else None
                self._in_subshell((command,), state)
        self.stdin = outer
        return None

    def _piped_output(self, command: Statement, state: State) -> Value | None:
        """Output that the next command of a pipeline reads; None if it is not known."""
        if not isinstance(command, Simple) or command.is_redirected:
            return None
        name, body = command.words[0].text if command.words else "", command.stdin.body if command.stdin else None
        if name in ("cat", "tee"):
            is_all = name == "tee" or len(command.words) == 1
            return self.expander.one(body, state) if body is not None else self.stdin if is_all else None
        return echo_of(self.expander.arguments(command.words, state), state) if name in ("echo", "printf") else None

    def _if(self, statement: If, at: int, state: State) -> Status:
        if at == len(statement.clauses):
            return self._run_all(statement.otherwise, state)
        condition, body = statement.clauses[at]
        status = self._run_all(condition, state)
        if state.flow:
            return status
        if status is not None:
            self._note_asked(variables_of(condition), statement.position, state)
        if status is True:
            self.conditions.append(variables_of(condition))
            status = self._run_all(body, state)
            self.conditions.pop()
            return status
        if status is False:
            return self._if(statement, at + 1, state)
        branches = [lambda branch: self._run_all(body, branch), lambda branch: self._if(statement, at + 1, branch)]
        return self._in_doubt(branches, state, statement.position, variables_of(condition))

    def _take_input(self, given: Input | None, state: State) -> Value | None:
        """Set the input of commands; returns what it was before."""
        outer = self.stdin
        if given is not None:
            self.stdin = self.expander.one(given.body, state) if given.body is not None else None
        return outer

    def _case(self, statement: Case, state: State) -> Status:
        status: Status = True
        subject = self.expander.one(statement.subject, state).tested
        self._note_arguments(statement.subject)
        names = [part.name for part in statement.subject.parts if isinstance(part, Parameter)]
        if subject is not None:
            self._note_asked(names, statement.position, state)
        possible: list[Callable[[State], object]] = []
        for at, (patterns, _, end) in enumerate(statement.clauses):
            found = [self.expander.pattern(pattern, state) for pattern in patterns]
            run = partial(self._run_all, with_fallthrough(statement, at))
            if subject is not None and None not in found:
                if not any(matches_pattern(subject, pattern) for pattern in found if pattern is not None):
                    continue
                if not possible:
                    status = run(state)
                    if end != ";;&" or state.flow:
                        return status
                    continue
                possible.append(run)
                break
            possible.append(run)
        if not possible:
            return status
        return self._in_doubt([*possible, lambda _: True], state, statement.position, names)

    def _arithmetic(self, statement: ArithmeticCommand, state: State) -> Status:
        self._note_arguments(statement.expression)
        try:
            return self.expander.number(statement.expression, state) != 0
        except NotKnown:
            return None

    def _let(self, text: str, state: State, position: Position) -> Status:
        try:
            word = Parser(text, None)._inner(0, len(text))
        except ShellError:
            word = Word((), position)
        return self._arithmetic(ArithmeticCommand(replace(word, position=position), position), state)

    # --- simple commands

    def _note_arguments(self, *words: Word) -> None:
        """Note whether the script looks at its arguments."""
        for word in words:
            for part in word.parts:
                if is_argument(getattr(part, "name", "")):
                    self.reading.reads_arguments = True
                argument = getattr(part, "argument", None)
                if argument is not None:
                    self._note_arguments(argument)

    def _note_asked(self, names: Sequence[str], position: Position, state: State) -> None:
        """Note the variables and arguments without a value that a condition looks at."""
        for name in without_value(names, state):
            self.reading.asked.setdefault(name, position)

    def _simple(self, statement: Simple, state: State) -> Status:
        for assignment in statement.assignments:
            items = [assignment.value] if isinstance(assignment.value, Word) else [word for _, word in assignment.value]
            self._note_arguments(*items)
            self._stop_at_unset(items, state)
        self._note_arguments(*statement.words)
        self._stop_at_unset(statement.words, state)
        words = self.expander.arguments(statement.words, state)
        outer = self._take_input(statement.stdin, state)
        prints_inside = bool(words) and words[0].tested in (*state.functions, *RUNS_TEXT)
        with self._muted(statement.is_redirected and prints_inside):
            status = self._assign_and_call(statement, words, state)
        if self.printed is not None and statement.merges_stderr and prints_inside:
            self.printed.append(None)
        if statement.stdin is not None:
            self.stdin = outer
        return status

    def _note_writes(self, statement: Simple, words: Sequence[Value], state: State) -> None:
        """Note the text that `cat` writes to a file; files that other commands change become unknown."""
        name = words[0].tested if words else ""
        is_read = name == "sed" and not any(one.prefix.startswith(("-i", "--in-place")) for one in words)
        paths = [one.known for one in words[1:]] if name in _CHANGING.split() and not is_read else []
        paths = paths[-1:] if name in ("cp", "ln") else paths
        if statement.stdout is not None:
            path = self.expander.one(statement.stdout, state).tested
            if path is not None and name == "cat" and len(words) == 1 and self.stdin is not None:
                before = self._content(path, state) if statement.appends else None
                end = ("\n",) if statement.stdin is not None and not statement.stdin.delimiter else ()
                text = replace(self.stdin, parts=(*(before.parts if before else ()), *self.stdin.parts, *end))
                state.touched |= {Path(os.path.normpath(resolved_path(state, path)))}
                state.written = {**state.written, resolved_path(state, path): text}
            else:
                paths.append(path)
        changed = [resolved_path(state, path) for path in paths if path]
        state.touched |= {Path(os.path.normpath(file)) for file in changed}
        for file in state.written:
            if any(one == file or one in file.parents for one in changed):
                unknown = Unknown(file.name, "a command changes it while the script runs", statement.position)
                state.written = {**state.written, file: of_unknown(unknown)}

    def _output_of_body(self, statements: Sequence[Statement], state: State) -> Value | None:
        """The output of statements in a subshell; None if it is not known without running a command."""
        self.output_status = None
        if self.depth >= MAX_NESTED or self.output_steps > MAX_ALL_OUTPUT_STEPS:
            return None
        counts, stdin = (self.depth, self.doubts, self.loops, self.subshells), self.stdin
        lists: tuple[list[Any], ...] = (self.left, self.exits, self.conditions, self.files, self.scripts)
        lengths = [len(one) for one in lists]
        outer, limit, begun = self.printed, self.limit, self.steps
        self.printed, self.limit = [], min(limit, begun + MAX_OUTPUT_STEPS)
        self.depth += 1
        status: Status = None
        try:
            status = self._in_subshell(statements, state)
        except _Stop:
            if self.steps > limit:
                raise
            self.printed = [None]
        found, self.printed, self.limit = self.printed, outer, limit
        self.depth, self.doubts, self.loops, self.subshells = counts
        for one, length in zip(lists, lengths, strict=True):
            del one[length:]
        if outer is None:
            self.output_steps += self.steps - begun
            self.steps = begun + 1
        if None in found:
            self.stdin = stdin
            return None
        self.output_status = status
        return merged([part for one in found if one is not None for part in one.parts], (None, None, None))

    @contextmanager
    def _muted(self, is_redirected: bool) -> Iterator[None]:
        """Ignore what commands print inside if their output is redirected."""
        outer = self.printed
        self.printed = [] if is_redirected and outer is not None else outer
        yield
        self.printed = outer

    def _assign_and_call(self, statement: Simple, words: list[Value], state: State) -> Status:
        """Run the assignments of a simple command, then the command; assignments before a command hold only in it."""
        name = words[0].tested if words else ""
        if self.printed is not None and words:
            self.printed.append(self._printed_by(statement, words, state))
        self._note_writes(statement, words, state)
        is_prefix = bool(words) and name not in ("export", "declare", "local", "readonly", "typeset")
        names = [assignment.name for assignment in statement.assignments]
        if is_prefix and name not in ("source", "."):
            inner = state.copy() if names else state
            inner.exported = inner.exported.union(names)
            for assignment in statement.assignments:
                self._assign(assignment, inner)
                if isinstance(assignment.value, Word) and assignment.index is None:  # no element of an array
                    inner.put(assignment.name, inner.scalar(assignment.name))
            return self._call(words, statement.position, state, inner, names)
        given: list[Value | None] = [None for _ in names]
        self.output_status = True
        if words:  # export and its like have their arguments expanded before the first is assigned
            values = [one.value for one in statement.assignments]
            given = [self.expander.one(one, state) if isinstance(one, Word) else None for one in values]
            self._declare(name or "", words[1:], statement.assignments, state)
        for assignment, value in zip(statement.assignments, given, strict=True):
            self._assign(assignment, state, is_declared=bool(words), expanded=value)
        if words:
            return self._call(words, statement.position, state, state)
        assigned = [state.scalar(one) for one in names]
        is_output = any(value is not None and value.unknown and value.unknown.reason == OUTPUT for value in assigned)
        return None if is_output else self.output_status  # of the command

    def _call(
        self, words: list[Value], position: Position, state: State, inner: State, names: Sequence[str] = ()
    ) -> Status:
        """A function, a builtin, or a command that is recorded; `inner` has the assignments of `names` before it."""
        name, arguments = words[0].tested if words else "", words[1:]
        if not name:
            if words and words[0].unknown is not None:
                self._record(words, position, inner)
            return None
        if name in state.functions:
            if self.depth >= MAX_NESTED:
                raise _Stop
            body = state.functions[name]
            if isinstance(body, Choice):
                branches = [partial(self._call_one_body, one, words, position, inner, names) for one in body.bodies]
                return self._in_doubt(branches, state, body.position)
            return self._function(body, arguments, state, {one: inner.variables[one] for one in names})
        return self._execute(words, position, state, inner, names)

    def _call_one_body(
        self,
        body: Statement | None,
        words: list[Value],
        position: Position,
        inner: State,
        names: Sequence[str],
        state: State,
    ) -> None:
        """Call a function with one of the bodies that it may have; without one, run the command of its name."""
        given = {one: inner.variables[one] for one in names}
        if body is not None:
            self._function(body, words[1:], state, given)
        else:
            self._execute(words, position, state, inner if names else state, names)

    def _execute(
        self, words: list[Value], position: Position, state: State, inner: State, names: Sequence[str]
    ) -> Status:
        """A builtin, or a command that is recorded."""
        name, arguments = words[0].tested or "", words[1:]
        found: Status = None
        if BUILTINS.get(name) == "exec" and arguments:
            arguments = behind_options(words)
            found = self._execute(arguments, position, state, inner, names) if arguments else None
            if name == "exec" and arguments:  # nothing comes back from it
                self.exits.append(self.doubts)
                state.flow = "exit"
            return found
        builtin = getattr(self, f"_do_{BUILTINS[name]}", None) if name in BUILTINS else None
        if builtin is not None:
            outer = {one: state.variables.get(one) for one in names}
            state.variables |= {one: inner.variables[one] for one in names}
            found = builtin(arguments, position, state)
            for one, value in outer.items():
                state.put(one, value)
            return found
        how = started(words)
        inner = how.environment.applied(inner, self.environ, self._content)
        child = child_of(words, how, self.stdin)
        if how.by == "sbatch":
            given = (inner.scalar(one) for one in self.job_commands if one in inner.exported)
            child = next((Child(value) for value in given if value is not None), child)
        if child is not None:
            self._child(child, position, inner)
        if name not in _QUIET.split():
            self._record(words, position, inner)
        return True if name == "echo" else None

    def _child(self, child: Child, position: Position, state: State) -> None:
        """Read a script that a command starts, in a shell of its own."""
        if self.depth >= MAX_NESTED:
            self.reading.is_cut = True
            return
        inner, before, exits = state.child(), len(self.left), len(self.exits)
        self.subshells += 1
        inner.arguments, inner.script = child.arguments, child.path or inner.script
        self._add_slurm_variables(child, inner)
        script = (resolved_path(inner, child.path), inner.arguments, inner.environment)
        if child.text is not None:
            self._text(child.text, position, inner)
        elif child.path and script not in self.scripts:  # not a job that submits itself again
            self.scripts.append(script)
            self._child_file(child, position, inner)
            self.scripts.pop()
        self.subshells, state.written, state.touched = self.subshells - 1, inner.written, inner.touched
        del self.left[before:], self.exits[exits:]

    def _record(self, words: list[Value], position: Position, state: State) -> None:
        if self.printed is not None:
            return  # of what `$(...)` starts, only the output counts
        key = (position, tuple(word.parts for word in words))
        if key not in self.reading.commands and len(self.reading.commands) < MAX_COMMANDS:
            self.steps += len(state.variables) // 1000  # each is compared
            self.snapshot = Snapshot(state.variables, self.snapshot)
            here = (state.folder, self.doubts == 0, state.exported, state.written, state.fallback)
            self.reading.commands[key] = Command(tuple(words), position, self.snapshot, *here)

    def _function(
        self, body: Statement, arguments: list[Value], state: State, given: Mapping[str, Value | Array]
    ) -> Status:
        """Run a function; `given` are the assignments before its name, which hold only inside."""
        self.depth += 1
        before, outer, outer_locals = len(self.left), state.arguments, state.locals
        loops, self.loops = self.loops, 0
        state.arguments, state.locals = tuple(arguments), {}
        exported = state.exported
        state.exported = exported.union(given)
        for name, value in given.items():
            state.make_local(name)
            state.variables[name] = value
        status = self._run(body, state)
        if state.flow == "return":
            state.flow = ""
        for one in (state, *(left for left, _ in self.left[before:])):
            one.end_function()
            one.arguments, one.locals, one.exported = outer, outer_locals, one.exported - (set(given) - exported)
        if self._rejoin(state, before, ("return", "break", "continue")):
            status = None
        self.depth, self.loops = self.depth - 1, loops
        return status

    def _text(self, value: Value, position: Position, state: State) -> Status:
        """Read the text of `bash -c` or `eval`; its unknown parts stand in variables."""
        start = value.position if value.position[1] else position
        text, unknowns = value.as_script(start)
        self.steps += len(text) // 100  # parsing takes longer than a statement
        state.variables |= unknowns
        statements, error = Parser(text, start[0], places_of(text, start)).parse()
        if error is not None:
            self.reading.errors.append(error)
        self.depth += 1
        status = self._run_all(statements, state)
        self.depth -= 1
        return status if error is None else None

    def _file(self, path: str, state: State, is_program: bool = False) -> bool:
        """Read another script in this state; False if it does not exist, or is a program of another kind."""
        file = resolved_path(state, path)
        if (written := state.written.get(file)) is not None:
            if len(written.parts) == 1 and written.unknown is not None:
                state.fallback = written.unknown
                return True
            self._text(written, written.position, state)
            return True
        text = self.read_text(file)
        if text is None or (is_program and _OTHER_KIND.match(text)):
            return False
        text = text.replace("\r\n", "\n")
        statements, error = Parser(text, str(file) if file.is_absolute() else path).parse()
        if error is not None:
            self.reading.errors.append(error)
        self.depth += 1
        outer, state.file, before = state.file, str(file), len(self.left)
        self.files.append(file)
        self._run_all(statements, state)
        self.files.pop()
        self.depth -= 1
        if state.flow == "return":
            state.flow = ""
        self._rejoin(state, before, ("return",))
        state.file = outer
        return True
