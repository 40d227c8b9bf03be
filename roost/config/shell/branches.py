"""Outputs of command substitutions, loops, and branches of conditions that are not known."""

from __future__ import annotations

import os.path
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from roost.config.findings import Position
from roost.config.shell.builtins import Assignments
from roost.config.shell.conditions import Status, echo_of, is_folder_change, known_texts, negated, output_of, piped
from roost.config.shell.effects import submits
from roost.config.shell.expand import resolved_path
from roost.config.shell.filters import filtered
from roost.config.shell.state import Doubt, State, Value, join, of_unknown, split_by_flow, text_value, uncertain
from roost.config.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    For,
    Loop,
    Pipeline,
    Simple,
    Statement,
    Substitution,
    Word,
)

_FILE_FILTERS = "cat grep sed awk cut head tail"
_OF_MACHINE = re.compile(r"/+(proc|sys|dev|etc|run|var)/")  # files that may differ where the script runs
# Builtins and commands that print nothing.
_SILENT = """[ : unset read mapfile readarray shift cd exit return break continue test true false let getopts sleep wait
    mkdir rm"""
_DECLARING = "export local readonly declare typeset set"
RUNS_TEXT = ("eval", "source", ".")
MAX_ROUNDS = 500  # of one loop
MAX_DOUBTFUL_ROUNDS = 20  # that a condition which is not known may have ended


class Outputs(Assignments):
    """The output of command substitutions, and the text of files that commands are given."""

    read_text: Callable[[Path], str | None]
    output_status: Status = True  # of the last `$(...)`

    @abstractmethod
    def _output_of_body(self, statements: Sequence[Statement], state: State) -> Value | None: ...

    @abstractmethod
    def _in_subshell(self, statements: Sequence[Statement], state: State) -> Status: ...

    @abstractmethod
    def _note_arguments(self, *words: Word) -> None: ...

    def _content(self, path: str, state: State) -> Value | None:
        """The text of a file, with its place; None if it does not exist."""
        file = resolved_path(state, path)
        text = self.read_text(file) if file not in state.written else None
        return state.written.get(file) if text is None else text_value(text, (path, 1, 1))

    def _of_file(self, words: Sequence[str], state: State) -> str | None:
        """The output of a command such as `cat` or `grep` for a file that is here."""
        if len(words) < 2 or words[0] not in _FILE_FILTERS.split():
            return None
        file = Path(os.path.normpath(resolved_path(state, words[-1])))
        is_changed = any(one == file or one in file.parents for one in state.touched) and file not in state.written
        content = None if is_changed or _OF_MACHINE.match(str(file)) else self._content(words[-1], state)
        text = None if content is None else content.known
        return None if text is None or "\0" in text else filtered(text, words[:-1])

    def _output(self, part: Substitution, state: State) -> Value | None:
        """The output of `$(...)`; None if it is not known without running it."""
        if part.body is None:
            return None
        if any(submits(statement) for statement in part.body):
            self._in_subshell(part.body, state)  # the number that it prints is not known
            return None
        is_body = len(part.body) != 1 or not isinstance(part.body[0], Simple | Pipeline | AndOr)
        found = self._output_of_body(part.body, state) if is_body else self._output_of_list(part.body[0], state.copy())
        return None if found is None else found.without_trailing_newlines()

    def _output_of_list(self, statement: Statement, inner: State) -> Value | None:
        """The output of a pipeline, also behind `cd folder &&`."""
        changed = is_folder_change(statement)
        if changed is not None:
            change, statement = changed
            words = [value for word in change.words[1:] for value in self.expander.words(word, inner)]
            self._do_cd(words, change.position, inner)
        return self._output_of_pipeline(statement, inner)

    def _output_of_pipeline(self, statement: Statement, state: State) -> Value | None:
        """The output of a command, or of one and the filters behind it."""
        first, *filters = piped(statement)
        found: Value | None = None
        texts = None
        if isinstance(first, Simple) and not first.is_redirected:
            self._note_arguments(*first.words)
            words = [value for word in first.words for value in self.expander.words(word, state)]
            texts = known_texts(words)
        is_function = isinstance(first, Simple) and bool(texts) and texts is not None and texts[0] in state.functions
        status: Status = True
        if not isinstance(first, Simple) or is_function:
            found, status = self._output_of_body((first,), state), self.output_status
        elif texts:
            if first.stdin is None:
                text = output_of(texts, state)
                text = self._of_file(texts, state) if text is None else text
            else:
                text = self._of_input(first.stdin, texts, state)
            found = None if text is None else text_value(text)
            status = None if texts[0] == "grep" else True
        for one in filters:
            text = None if found is None else found.known
            texts = None
            if isinstance(one, Simple) and not one.is_redirected and one.stdin is None:
                texts = known_texts([value for word in one.words for value in self.expander.words(word, state)])
            text = filtered(text, texts) if text is not None and texts else None
            found = None if text is None else text_value(text)
            status = None if not texts or texts[0] == "grep" else True
        self.output_status = status
        return found

    def _printed_by(self, statement: Simple, words: Sequence[Value], state: State) -> Value | None:
        """Output of one command; None where it is not known. Functions print by the commands in them."""
        name = words[0].tested or ""
        if name == "exec":  # its redirections are those of what follows
            return None
        if statement.is_redirected or name in (*state.functions, *RUNS_TEXT):
            return Value()
        if name in ("echo", "printf"):
            found = echo_of(words, state)
            is_line = name == "echo" and found is not None and found.known is None
            return replace(found, parts=(*found.parts, "\n")) if is_line and found is not None else found
        options = [one.prefix for one in words[1:] if one.prefix.startswith("-")]
        if name in ("rm", "mkdir") and any("v" in one for one in options):
            return None
        is_declared = name in _DECLARING.split() and bool(words[1:] or statement.assignments)
        if name in _SILENT.split() or (is_declared and not any(one in text for text in options for one in "pfF")):
            return None if name == "cd" and "-" in options else Value()
        texts = known_texts(words)
        text = None if not texts or statement.stdin is not None else output_of(texts, state)
        return None if text is None else text_value(text)


class Branches(Outputs):
    """Follows the rounds of loops, and every branch that a condition may take."""

    @abstractmethod
    def _run_all(self, statements: Sequence[Statement], state: State) -> Status: ...

    @abstractmethod
    def _arithmetic(self, statement: ArithmeticCommand, state: State) -> Status: ...

    def _in_doubt(
        self,
        branches: Sequence[Callable[[State], object]],
        state: State,
        position: Position,
        names: Sequence[str] = (),
    ) -> Status:
        """Follow several branches when it is unknown which is taken; values that differ become unknown.

        `names` are the variables that the condition tests.
        """
        self.doubts += 1
        self.steps += len(state.variables) // 100  # each is compared
        unknowns = [value.unknown for name in names if (value := state.scalar(name)) is not None]
        variable = next((one.variable for one in unknowns if one is not None and one.variable), "")
        states, given, inputs = [], self.stdin, []
        printed = len(self.printed or ())
        for branch in branches:
            copy, self.stdin = state.copy(), given
            branch(copy)
            states.append(copy)
            inputs.append(self.stdin)
        self.stdin = given if all(one == given for one in inputs) else None
        if self.printed is not None and any(one is None or one.parts for one in self.printed[printed:]):
            self.printed[printed:] = [None]
        self.doubts -= 1
        line = f"line {position[1]}" if position[1] else "another line"
        doubt = Doubt(position, f"it depends on the condition in {line}, which only a run decides", variable)
        continuing, left = split_by_flow(states)
        self.left += [(one, doubt) for one in left]
        state.become(join(continuing, doubt))
        return None

    def _rejoin(self, state: State, before: int, flows: Sequence[str]) -> bool:
        """Join the states that left by one of `flows` since `before` into this one; False if there are none."""
        left = self.left[before:]
        ended = [one for one in left if one[0].flow in flows and one[0].levels == 1]
        self.left[before:] = [one for one in left if one[0].flow not in flows or one[0].levels > 1]
        for one, _ in ended:
            one.flow = ""
        if ended:
            doubt = ended[0][1]
            if self.printed is not None:
                self.printed.append(None)  # what follows is not always reached
            if state.flow not in ("", "exit"):  # this one left farther
                self.left.append((state.copy(), doubt))
            here = [] if state.flow else [state]
            state.become(join([*here, *(one for one, _ in ended)], doubt))
        return bool(ended)

    def _loop(self, statement: Loop, state: State) -> Status:
        def is_over(state: State) -> Status:
            status = self._run_all(statement.condition, state)
            return status if statement.is_until else negated(status)

        return self._rounds(is_over, statement.body, state, statement.position)

    def _rounds(
        self, is_over: Callable[[State], Status], body: Sequence[Statement], state: State, position: Position
    ) -> Status:
        """Run a loop: `is_over` runs before each round."""
        before, begun, doubtful = len(self.left), state.copy(), 0
        status: Status = True
        self.loops += 1
        for _ in range(MAX_ROUNDS):
            over = is_over(state)
            if over is True or state.flow:
                status = None if state.flow else status
                break
            if over is None:
                status = self._some_rounds(is_over, body, state, position)
                break
            left = len(self.left)
            is_left, status = self._round(body, state)
            if is_left:
                break
            doubtful += len(self.left) > left
            if doubtful > MAX_DOUBTFUL_ROUNDS:
                uncertain(state, begun, Doubt.of_rounds(position))
                status = None
                break
        else:
            uncertain(state, begun, Doubt.of_rounds(position))
            status = None
        self.loops -= 1
        if self._rejoin(state, before, ("break",)):
            status = None
        for one, _ in self.left[before:]:
            one.levels = max(1, one.levels - 1)
        return status

    def _some_rounds(
        self, is_over: Callable[[State], Status], body: Sequence[Statement], state: State, position: Position
    ) -> Status:
        """Run a loop whose number of rounds is not known: once, and again with what a round changes unknown."""

        def run(branch: State) -> None:
            if not self._round(body, branch)[0]:
                is_over(branch)

        begun = state.copy()
        self._in_doubt([run, lambda _: True], state, position)
        if state != begun:
            now = state.variables.items()
            changed = {
                name: value
                for name, value in now
                if isinstance(value, Value) and value.prefix == "" and value != begun.variables.get(name)
            }
            self._in_doubt([run, lambda _: True], state, position)
            state.variables |= changed
        return None

    def _round(self, body: Sequence[Statement], state: State) -> tuple[bool, Status]:
        """Run the body of a loop once; True where the loop is left, and the status."""
        before = len(self.left)
        status = self._run_all(body, state)
        is_outer = state.levels > 1  # an outer loop is meant
        if state.flow == "continue" and not is_outer:
            state.flow = ""
        if self._rejoin(state, before, ("continue",)):
            status = None
        is_left = bool(state.flow)
        if state.flow == "break" and state.levels == 1:
            state.flow = ""
        elif state.flow in ("break", "continue"):
            state.levels -= 1
        return is_left, status

    def _for(self, statement: For, state: State) -> Status:
        if not statement.name:
            return self._counted_for(statement, state)
        words = list(state.arguments)
        if statement.words is not None:
            words = [value for word in statement.words for value in self.expander.listed(word, state)]
        else:
            self.reading.reads_arguments = True
        unknown = next((value.unknown for value in words if value.known is None), None)
        if unknown is not None:
            state.variables[statement.name] = of_unknown(replace(unknown, variable=""))
            return self._rounds(lambda _: None, statement.body, state, statement.position)
        waiting = iter(words)

        def is_over(state: State) -> Status:
            value = next(waiting, None)
            if value is not None:
                state.variables[statement.name] = value
            return value is None

        return self._rounds(is_over, statement.body, state, statement.position)

    def _counted_for(self, statement: For, state: State) -> Status:
        """`for ((first; condition; step))`."""
        first, condition, step = statement.words or ()
        self._arithmetic(ArithmeticCommand(first, statement.position), state)
        is_first = True

        def is_over(state: State) -> Status:
            nonlocal is_first
            if not is_first:
                self._arithmetic(ArithmeticCommand(step, statement.position), state)
            is_first = False
            if not condition.parts:
                return False
            return negated(self._arithmetic(ArithmeticCommand(condition, statement.position), state))

        return self._rounds(is_over, statement.body, state, statement.position)
