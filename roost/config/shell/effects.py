"""Possible effects of a statement, from its text: whether it tests, succeeds, or changes the shell's state."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from roost.config.findings import Position
from roost.config.shell.state import State, Value
from roost.config.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Case,
    Condition,
    Function,
    Group,
    Parameter,
    Pipeline,
    Simple,
    Statement,
    Word,
)

# Commands whose failure a script is not written for: what follows `&&` is taken to run.
_SUCCEED = """mkdir cd pushd popd pip pip3 uv conda module ray export declare local readonly typeset wget curl source .
    cp mv rm ln chmod touch tar unzip echo printf sleep set ulimit wait apt apt-get hf huggingface-cli"""
_GIT = "clone pull fetch checkout switch init add commit push submodule lfs reset config apply am worktree stash tag"
_REPLACED = (":-", "-", ":=", "=", ":+", "+", ":?", "?")  # operators for variables that may be unset
# Variables that bash has a value for without an assignment.
_OWN = """BASH_SOURCE PWD OLDPWD RANDOM SECONDS EPOCHSECONDS HOSTNAME BASHPID PPID UID EUID LINENO FUNCNAME BASH
    BASH_VERSION BASH_REMATCH DIRSTACK GROUPS HOSTTYPE IFS MACHTYPE OPTARG OPTIND OSTYPE PIPESTATUS REPLY SHELLOPTS
    SHLVL USER HOME PATH LOGNAME SHELL TERM LANG TMPDIR"""
_HARMLESS = ("true", ":", "false", "[", "test", "command", "exec", "echo", "printf")


def is_test(statement: Statement) -> bool:
    """Return True for statements that only test something."""
    if isinstance(statement, Pipeline):
        return len(statement.commands) == 1 and is_test(statement.commands[0])
    if isinstance(statement, Simple):
        return bool(statement.words) and statement.words[0].text in ("[", "test")
    return isinstance(statement, Condition | ArithmeticCommand)


def succeeds(statement: Statement) -> bool:
    """Return True for a command that is taken to succeed."""
    if isinstance(statement, Pipeline):
        return not statement.is_negated and succeeds(statement.commands[-1])
    if isinstance(statement, Group):
        return bool(statement.body) and succeeds(statement.body[-1])
    if isinstance(statement, Simple):
        name, *texts = (word.text for word in statement.words) if statement.words else (None,)
        if name == "git":
            while texts and (texts[0] or "").startswith("-"):
                del texts[: 2 if texts[0] in ("-C", "-c") else 1]
            return bool(texts) and texts[0] in _GIT.split()
        return name in _SUCCEED.split()
    return False


def is_command(statement: Statement, functions: Collection[str]) -> bool:
    """Return True if the status is that of commands that are only recorded: no test, branch or function decides it."""
    if isinstance(statement, Simple):
        return not is_test(statement) and not (statement.words and statement.words[0].text in functions)
    if isinstance(statement, Pipeline):
        return not statement.is_negated and is_command(statement.commands[-1], functions)
    if isinstance(statement, Group):
        return bool(statement.body) and is_command(statement.body[-1], functions)
    if isinstance(statement, AndOr):
        return all(is_command(one, functions) for one in (statement.first, *(one for _, one in statement.rest)))
    return False


def submits(statement: Statement) -> bool:
    """Return True for a command that submits a job and prints its number: sbatch, or ray job submit."""
    if isinstance(statement, Pipeline):
        return any(submits(one) for one in statement.commands)
    if isinstance(statement, AndOr):
        return any(submits(one) for one in (statement.first, *(one for _, one in statement.rest)))
    if isinstance(statement, Group):
        return any(submits(one) for one in statement.body)
    if not isinstance(statement, Simple):
        return False
    texts = [word.text or "" for word in statement.words]
    while texts and (texts[0] in ("env", "sudo") or "=" in texts[0]):
        del texts[0]
    name = texts[0].rpartition("/")[2] if texts else ""
    return name == "sbatch" or (name == "ray" and texts[1:3] == ["job", "submit"])


def changes(statement: Statement, builtins: Collection[str]) -> bool:
    """Return True if a statement may change the shell's state, as assignments and `builtins` do."""
    if isinstance(statement, Simple):
        name = statement.words[0].text if statement.words else None
        return bool(statement.assignments and not statement.words) or (name in builtins and name not in _HARMLESS)
    if isinstance(statement, Group):
        return any(changes(one, builtins) for one in statement.body)
    if isinstance(statement, AndOr):
        return any(changes(one, builtins) for one in (statement.first, *(one for _, one in statement.rest)))
    if isinstance(statement, Pipeline):
        return len(statement.commands) == 1 and changes(statement.commands[0], builtins)
    return not isinstance(statement, Condition | Function)


def variables_of(statements: Sequence[Statement]) -> tuple[str, ...]:
    """Names of the variables and arguments that simple conditions look at; `#` for their number."""
    found: list[str] = []
    for statement in statements:
        inner = statement.commands[0] if isinstance(statement, Pipeline) else statement
        if isinstance(inner, AndOr):
            found += variables_of((inner.first, *(following for _, following in inner.rest)))
        words = inner.words if isinstance(inner, Simple) else inner.tokens if isinstance(inner, Condition) else ()
        for word in words:
            parts = word.parts if isinstance(word, Word) else ()
            found += [part.name for part in parts if isinstance(part, Parameter) and re.fullmatch(r"\w+|#", part.name)]
    return tuple(found)


def unset_names(words: Sequence[Word], state: State) -> Iterator[tuple[str, Position]]:
    """Variables and arguments without a value at which a shell stops: those of `${X:?}`, and with `set -u` all of them.

    Empty arrays do not count.
    """
    for part, position in ((part, word.position) for word in words for part in word.parts):
        if not isinstance(part, Parameter) or part.is_list or part.index is not None or part.is_indirect:
            continue
        stops = part.operator in (":?", "?") or (state.stops_at_unset and part.operator not in _REPLACED)
        if part.name.isdigit():
            is_given = int(part.name) <= len(state.arguments) or any(one.is_open for one in state.arguments)
            if stops and not is_given:
                yield f"${part.name}", position
        elif stops and part.name.isidentifier() and not _may_be_set(part.name, state):
            yield part.name, position


def without_value(names: Sequence[str], state: State) -> Iterator[str]:
    """Those of some variables and arguments that the caller could give a value, and has not."""
    for name in names:
        value = state.scalar(name)
        if name.isdigit():
            is_open = any(one.is_open for one in state.arguments)
            if len(state.arguments) < int(name) and state.locals is None and not is_open:
                yield f"${name}"
        elif value is None:
            if name.isidentifier() and not _may_be_set(name, state):
                yield name
        elif value.unknown is not None and value.unknown.is_unset and value.unknown.variable:
            yield value.unknown.variable


def _may_be_set(name: str, state: State) -> bool:
    return name in (*state.variables, *_OWN.split()) or state.fallback_for(name) is not None


def behind_options(words: Sequence[Value]) -> list[Value]:
    """The command that `exec` and `command` start; none for `command -v`, which only looks for it."""
    rest = list(words[1:])
    while rest and re.fullmatch("-[acClpvV]+|--", option := rest[0].known or ""):
        if set(option) & set("vV"):
            return []
        del rest[: 2 if option.endswith("a") else 1]
    return rest


def position_of(statement: Statement) -> Position:
    """Position of the first command of a statement."""
    if isinstance(statement, AndOr):
        return position_of(statement.first)
    if isinstance(statement, Pipeline):
        return position_of(statement.commands[0])
    if isinstance(statement, Group) and statement.body:
        return position_of(statement.body[0])
    return getattr(statement, "position", (None, None, None))


def with_fallthrough(statement: Case, at: int) -> tuple[Statement, ...]:
    """The body of a clause, and the bodies that `;&` continues with."""
    found: list[Statement] = []
    for _, body, end in statement.clauses[at:]:
        found += body
        if end != ";&":
            break
    return tuple(found)
