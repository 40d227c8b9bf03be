"""Commands that start another one, such as `srun` and `docker run`: the command or script, and its variables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from roost.config.findings import Findings, KeyPath, Position
from roost.config.shell.state import State, Unknown, Value, of_unknown
from roost.config.source import parse_yaml

SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
DOCKER = ("docker", "podman", "nerdctl")
CONTAINERS = (*DOCKER, "apptainer", "singularity")
MPI = ("mpirun", "mpiexec", "mpiexec.hydra")
# Commands that start the one after them, and the words between, without options: `run IMAGE` of docker.
_STARTERS: Mapping[str, int] = {
    **dict.fromkeys(("env", "sudo", "nohup", "time", "nice", "ionice", "setsid", "stdbuf", "numactl"), 0),
    **dict.fromkeys(("command", "srun", "sbatch", *MPI, "xvfb-run"), 0),
    **dict.fromkeys(("timeout", "taskset", "uv"), 1),
    **dict.fromkeys((*CONTAINERS, "ray"), 2),
}
# Letters of their options that take no value.
_FLAGS: Mapping[str, str] = {
    "env": "i0v",
    "sudo": "AbEHnPSik",
    "time": "pv",
    "setsid": "cfw",
    "srun": "EHIklOQsuvXZ",
    "sbatch": "HIkOQsvW",
    "timeout": "v",
    **dict.fromkeys(CONTAINERS, "itdP"),
}
# Options of MPI with two values, and with none.
_PAIRS = ("-genv", "-env", "-mca", "--mca", "-gmca", "--gmca")
_MPI_FLAGS = "-genvall -genvnone -envall -envnone -verbose -prepend-rank -nolocal -l -v"
_LONG_FLAGS = """parsable wait hold requeue no-requeue exclusive overcommit oversubscribe overlap exact contiguous
    test-only quiet no-kill label unbuffered pty spread-job ignore-environment preserve-env foreground preserve-status
    rm privileged detach init tty interactive read-only no-wait allow-run-as-root tag-output verbose nv rocm writable
    cleanenv containall isolated frozen no-sync locked active all-extras no-project non-interactive login"""
SCRIPT = re.compile(r".*\.(sh|bash|slurm|sbatch)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_PASSED = re.compile(r"(?<![^=,\s])([A-Za-z_]\w*)=")  # NAME=VALUE somewhere in a word
_MARK = re.compile("\ue000(\\d+)\ue001")  # for an unknown part


@dataclass(slots=True)
class Environment:
    """Variables of the command that another one starts."""

    values: dict[str, Value] = field(default_factory=dict)
    files: list[tuple[str, Value]] = field(default_factory=list)  # that set some: who reads it, and its path
    passed: set[str] = field(default_factory=set)  # of the shell's own, into a container
    removed: set[str] = field(default_factory=set)
    kept: set[str] | None = None  # of the shell's own; None: all
    is_container: bool = False  # it has no variables of the shell but those passed

    def applied(self, state: State, caller: Mapping[str, str], content: Callable[[str, State], Value | None]) -> State:
        """The shell's state as the started command sees it; a container has the environment of the `caller`.

        `content` gives the text of a file; variables of a missing one are unknown.
        """
        if self == Environment():
            return state
        inner = state.copy()
        hidden = set(self.removed)
        passed, given, fallback = set(self.passed), dict[str, Value](), None
        for by, path in self.files:
            text = None if path.known is None else content(path.known, state)
            lines: Mapping[str, Value | None] | None = None
            if text is not None:
                lines = _yaml_variables(text) if by == "ray" else _file_variables(text, by not in DOCKER)
            if lines is None:
                why = "which is not here" if text is None else "which is no YAML"
                fallback = Unknown(path.shown, f"{path.shown}, {why}, may give it", path.position)
            else:
                given |= {name: value for name, value in lines.items() if value is not None}
                passed |= {name for name, value in lines.items() if value is None}
        given |= self.values
        if self.kept is not None:
            hidden |= {name for name in inner.exported if name not in self.kept and not name.startswith("SLURM_")}
        if self.is_container:
            own = {name: state.scalar(name) for name in inner.exported - passed}
            hidden |= {name for name, value in own.items() if value is None or value.known != caller.get(name)}
        inner.fallback = fallback if self.is_container or self.kept is not None else fallback or state.fallback
        inner.exported = (inner.exported - hidden).union(given)
        inner.variables |= given
        return inner


@dataclass(frozen=True, slots=True)
class Started:
    """A command behind `env`, `srun` and the like: its index, the innermost of these, and its variables."""

    at: int
    by: str
    environment: Environment
    wrapped: Value | None = None  # the text of sbatch --wrap


@dataclass(frozen=True, slots=True)
class Child:
    """A script that a command is given: its text, or the path of its file, and its arguments."""

    text: Value | None = None
    path: str = ""  # beside a text: its $0
    arguments: tuple[Value, ...] = ()
    is_program: bool = False  # started by its own path, which may be of any program
    options: tuple[str, ...] | None = None  # of the sbatch that starts it


def started(words: Sequence[Value]) -> Started:
    """Follow `env`, `srun`, `docker run` and the like to the command that they start."""
    at, by, wrapped, environment = 0, "", None, Environment()
    while at < len(words) and (name := base_name(words[at])) in _STARTERS:
        by, at = name, at + 1
        places = 0
        while at < len(words):
            word = words[at]
            if not word.prefix.startswith("-"):
                is_given = name in ("env", "sudo") and _ASSIGNED.match(word.prefix)
                if is_given:
                    environment.values |= _assigned([word])
                elif places == _STARTERS[name] or base_name(word) in _STARTERS or word.known in SHELLS:
                    break
                places += not is_given
                at += 1
                continue
            option, value, length = _option(name, words, at)
            if option == "--":
                at += 1
                break
            if name == "sbatch" and option == "--wrap":
                wrapped = value
            _apply_option(environment, name, option, value)
            at += length
        environment.is_container |= name in DOCKER
    for index in range(at, _shell_at(words)):
        _make_unknown(environment, words[index], base_name(words[0]))
    return Started(at, by, environment, wrapped)


def child_of(words: Sequence[Value], how: Started, stdin: Value | None) -> Child | None:
    """The script that a command is given as an argument, as its input, or by its path."""
    rest = list(words[how.at :])
    name = base_name(rest[0]) if rest else ""
    if how.by == "sbatch":
        options = tuple(word.prefix for word in words[: how.at])
        if how.wrapped is not None or not rest:
            text = how.wrapped or stdin
            return None if text is None else Child(text, options=options)
        return Child(None, rest[0].known or "", tuple(rest[1:]), True, options)
    text = _text_in(name, rest[1:], stdin)
    if text is not None:
        return Child(text)
    at = _shell_at(words)
    if at < len(words) and name != "ssh":
        return _of_shell(list(words[at + 1 :]), stdin)
    path = rest[0].known or "" if rest else ""
    is_here = "/" in path and (not path.startswith("/") or SCRIPT.fullmatch(path))
    return Child(None, path, tuple(rest[1:]), True) if is_here else None


def base_name(word: Value) -> str:
    """The name of a program without its folder; empty where it is not known."""
    return (word.known or "").rpartition("/")[2]


def _shell_at(words: Sequence[Value]) -> int:
    return next((at for at, word in enumerate(words) if word.known in SHELLS), len(words))


def _of_shell(rest: list[Value], stdin: Value | None) -> Child | None:
    """The script of a shell: `-c text`, a file, or its input."""
    is_input = False
    while rest and re.fullmatch(r"[-+][A-Za-z]+|--[\w-]*|-", rest[0].prefix) and rest[0].known is not None:
        option = rest.pop(0).prefix
        if re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", option):
            rest = rest[1:] if option.endswith("o") else rest
            zero = rest[1].known or "" if len(rest) > 1 else ""
            return Child(rest[0], zero, tuple(rest[2:])) if rest else None
        if option in ("--rcfile",) or (option.endswith("o") and not option.startswith("--")):
            rest = rest[1:]
        is_input = is_input or bool(re.fullmatch(r"-[A-Za-z]*s[A-Za-z]*", option))
    if is_input or not rest:
        return None if stdin is None else Child(stdin, arguments=tuple(rest))
    path = rest[0].known
    return None if path is None else Child(None, path, tuple(rest[1:]))


def _text_in(name: str, rest: list[Value], stdin: Value | None) -> Value | None:
    """The text that `script`, `tmux`, `screen` and `ssh` are given."""
    if name == "script":
        at = next((at for at, word in enumerate(rest) if re.fullmatch(r"-[a-z]*c", word.prefix)), len(rest))
        return next(iter(rest[at + 1 :]), None)
    if name in ("tmux", "screen"):
        return next((word for word in reversed(rest) if re.search(r"\S\s+\S", word.shown)), None)
    if name != "ssh":
        return None
    while rest and rest[0].prefix.startswith("-"):
        del rest[: 2 if re.fullmatch(r"-[bcDEeFIiJLlmOopQRSWw]", rest[0].prefix) else 1]
    parts = [part for at, one in enumerate(rest[1:]) for part in ([" "] if at else []) + list(one.parts)]
    return Value(tuple(parts), rest[1].position) if len(rest) > 1 else stdin


# --- variables


def _option(name: str, words: Sequence[Value], at: int) -> tuple[str, Value | None, int]:
    """An option, its value, and the number of its words."""
    text = words[at].prefix
    long = re.match(r"(--?[A-Za-z][\w-]+)=", text) if not re.match(r"-[A-Za-z]\w*=", text) else None
    if long is not None:
        return long[1], words[at].after(long.end()), 1
    if text.startswith("--"):
        is_alone = text[2:] in _LONG_FLAGS.split() or text == "--"
    elif len(text) > 2 and not set(text[1:]) <= set(_FLAGS.get(name, "")) and name not in (*MPI, "uv"):
        last = text[-1] if re.fullmatch(rf"-[{_FLAGS.get(name) or '-'}]+[A-Za-z]", text) else ""
        if not last:
            return text[:2], words[at].after(2), 1  # -eNAME=VALUE
        text, is_alone = f"-{last}", False
    else:
        is_alone = set(text[1:]) <= set(_FLAGS.get(name, ""))
    following = words[at + 1] if at + 1 < len(words) else None
    if name in MPI and text in _PAIRS and at + 2 < len(words) and "=" not in words[at + 1].prefix:
        one, other = words[at + 1 : at + 3]
        return text, replace(other, parts=(*one.parts, "=", *other.parts)), 3
    is_alone = is_alone or (name in MPI and text in _MPI_FLAGS.split())
    if following is not None and (base_name(following) in (*_STARTERS, *SHELLS) or SCRIPT.fullmatch(following.prefix)):
        is_alone = True  # the command begins there
    return (text, None, 1) if is_alone else (text, following, 2)


def _apply_option(environment: Environment, name: str, option: str, value: Value | None) -> None:
    """Apply an option that sets, passes or removes variables."""
    if name == "env" and option in ("-u", "--unset") and value is not None:
        environment.removed.add(value.known or "")
    elif name == "env" and (option in ("-", "--ignore-environment") or re.fullmatch(r"-[0v]*i[0v]*", option)):
        environment.kept = set()
    elif name in ("srun", "sbatch") and option == "--export" and value is not None:
        entries = list(_split(value))
        environment.values |= _assigned(entries)
        names = {entry.known or "" for entry in entries}
        if value.unknown is None and "ALL" not in names:
            environment.kept = names
    elif name in CONTAINERS and option in ("-e", "--env") and value is not None:
        environment.values |= _assigned(_split(value) if name not in DOCKER else [value])
        environment.passed.add(value.known or "")  # alone, a name passes the shell's own value
    elif name in CONTAINERS and option == "--env-file" and value is not None:
        environment.files.append((name, value))
    elif name in MPI and option in ("-x", "-genv", "-env") and value is not None:
        environment.values |= _assigned([value])
    elif name in MPI and option in ("-genvlist", "-envlist") and value is not None and value.known is not None:
        environment.kept = (environment.kept or set()).union(value.known.split(","))
    elif name in MPI and option in ("-genvnone", "-envnone"):
        environment.kept = environment.kept or set()
    elif name == "ray" and option == "--runtime-env" and value is not None:
        environment.files.append((name, value))
    elif name == "ray" and option == "--runtime-env-json" and value is not None:
        environment.values |= _json_variables(value)
    elif value is not None:
        _make_unknown(environment, value, name)


def _assigned(words: Iterable[Value]) -> dict[str, Value]:
    matches = [(_ASSIGNED.match(word.prefix), word) for word in words]
    return {match[1]: word.after(match.end()) for match, word in matches if match is not None}


def _make_unknown(environment: Environment, word: Value, by: str) -> None:
    """Make variables unknown that a word of another form seems to set."""
    for name in _PASSED.findall(word.prefix):
        if name.isupper():
            unknown = Unknown(f"${name}", f"how {by or 'the command'} gives it is not read", word.position)
            environment.values.setdefault(name, of_unknown(unknown))


def _split(value: Value) -> Iterator[Value]:
    """The parts of a value between commas."""
    text, unknowns = marked(value)
    for part in text.split(","):
        yield unmarked(part, unknowns, value)


def marked(value: Value) -> tuple[str, list[Unknown]]:
    """The text of a value with a mark for each part that is not known."""
    unknowns = [part for part in value.parts if isinstance(part, Unknown)]
    waiting = iter(range(len(unknowns)))
    texts = [part if isinstance(part, str) else f"\ue000{next(waiting)}\ue001" for part in value.parts]
    return "".join(texts), unknowns


def unmarked(text: str, unknowns: Sequence[Unknown], value: Value) -> Value:
    """The value of a text with such marks."""
    pieces = _MARK.split(text)
    parts = [
        unknowns[int(piece)] if at % 2 and int(piece) < len(unknowns) else piece for at, piece in enumerate(pieces)
    ]
    return replace(value, parts=tuple(part for part in parts if part))


def _json_variables(value: Value) -> dict[str, Value]:
    """The `env_vars` of a runtime environment of Ray; of one that is no JSON, all names without values."""
    text, unknowns = marked(value)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        names = [name for name in re.findall(r'"([A-Za-z_]\w*)"\s*:', text) if name.isupper()]
        reason = "the JSON that gives it is not known"
        return {name: of_unknown(Unknown(f"${name}", reason, value.position)) for name in names}
    return _env_vars(given, unknowns, value)


def _yaml_variables(value: Value) -> dict[str, Value] | None:
    """The `env_vars` of a runtime environment of Ray; None if it is no YAML."""
    text, unknowns = marked(value)
    source = parse_yaml(text, value.position[0], Findings())
    return None if source is None else _env_vars(source.values, unknowns, value, source.positions)


def _env_vars(
    given: Any, unknowns: Sequence[Unknown], value: Value, positions: Mapping[KeyPath, Position] = MappingProxyType({})
) -> dict[str, Value]:
    variables = given.get("env_vars") if isinstance(given, dict) else None
    found: dict[str, Value] = {}
    for name, text in variables.items() if isinstance(variables, dict) else ():
        if isinstance(name, str) and _NAME.fullmatch(name):
            position = positions.get(("env_vars", name), value.position)
            if isinstance(text, str):
                found[name] = replace(unmarked(text, unknowns, value), position=position)
            else:
                found[name] = of_unknown(Unknown(f"${name}", "Ray takes text only, in quotes", position))
    return found


def _file_variables(value: Value, is_shell: bool) -> dict[str, Value | None]:
    """Variables of a file for `--env-file`, without values where the shell's own are passed.

    Docker takes what stands behind the first = as it is, quotes among it; Apptainer reads it as a shell does.
    """
    text, unknowns = marked(value)
    file, first, _ = value.position
    found: dict[str, Value | None] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n")):
        name, equals, rest = line.removesuffix("\r").lstrip().partition("=")
        if _NAME.fullmatch(name if equals else name.strip()):
            position = (file, first + number if first else None, line.index(name) + len(name) + 2)
            found[name.strip()] = replace(unmarked(rest, unknowns, value), position=position) if equals else None
            if is_shell and re.search(r"""['"$`\\\s]""", rest):
                found[name] = of_unknown(Unknown(f"${name}", "its quotes are not read", position))
    return found
