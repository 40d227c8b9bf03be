"""Arguments of a command and the config files they name: Hydra overrides, flags, merged chains of files."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.config.findings import Findings, KeyPath, Position, Where, shown
from roost.config.frameworks.toml import parse_toml, read_toml
from roost.config.interpolation import resolve
from roost.config.job import COMMAND_LINE
from roost.config.source import Source, Unresolved, parse_yaml, read_text, read_yaml

if TYPE_CHECKING:
    from roost.config.shell.state import Command, Unknown, Value


_WHOLE = re.compile(r"[-+]?\d{1,40}")
_NUMBER = re.compile(r"[-+]?(?:(\d+\.\d*|\.\d+)([eE][-+]?\d{1,3})?|\d+[eE][-+]?\d{1,3})")
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None, "~": None, "": None}
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)(=|$)")
_FLAG = re.compile(r"(--[A-Za-z][\w.-]*)(=|$)")
MODULE = re.compile(r"-[a-zA-Z]*m|--module")  # the option before the name of a module
MAX_DEPTH = 30
MAX_MAPPING = 5_000  # characters of a mapping in an argument


@dataclass(slots=True)
class Arguments:
    """Keys with their values and positions, and the arguments whose key is not known."""

    values: dict[Any, Any] = field(default_factory=dict)
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    options: dict[str, Value] = field(default_factory=dict)  # flags beside overrides
    unknown: list[Value] = field(default_factory=list)
    stray: list[Value] = field(default_factory=list)  # words that are neither a key nor a value
    empty: dict[KeyPath, Position] = field(default_factory=dict)  # keys with nothing after the =
    added: set[KeyPath] = field(default_factory=set)  # overrides `+a.b=c`, which add a key to the program's own

    def set(self, path: KeyPath, value: Any, position: Position) -> None:
        """Set a key as an override does: keys below it are removed."""
        inner = self.values
        for key in path[:-1]:
            below = inner.get(key)
            if not isinstance(below, dict):
                below = inner[key] = {}
            inner = below
        inner[path[-1]] = value
        self.positions = {one: place for one, place in self.positions.items() if one[: len(path)] != path}
        self.positions[path] = position

    def remove(self, path: KeyPath, position: Position) -> None:
        self.set(path, None, position)


@dataclass(frozen=True, slots=True)
class Start:
    """A command that may start a job: the word that names the program, and the arguments after it."""

    command: Command
    at: int  # the program among the words
    arguments: Arguments

    @property
    def program(self) -> str:
        return self.command.words[self.at].known or ""

    @property
    def before(self) -> Sequence[str]:
        """The words before the program that are known, without their folders."""
        return [(word.known or "").rpartition("/")[2] for word in self.command.words[: self.at]]

    @property
    def is_module(self) -> bool:
        return self.at > 0 and MODULE.fullmatch(self.before[-1]) is not None


def value_at(values: Mapping[Any, Any], path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def typed(text: str) -> Any:
    """A value as Hydra and argparse read it: a number, a flag, null, or text.

    >>> typed("8"), typed("1e-6"), typed("True"), typed("null"), typed("'x'")
    (8, 1e-06, True, None, 'x')
    """
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def resolved(value: Value) -> Any:
    """The typed value; if it is unknown, the reason and how to give it."""
    text = value.known
    if text is not None:
        return typed(text)
    unknown = value.unknown
    if unknown is None:
        return None
    return Unresolved(value.shown, unknown.reason, how_to_give(unknown))


GIVE_ARGUMENTS = "give the script its arguments: roost plan SCRIPT -- ..."


def how_to_give(unknown: Unknown) -> str:
    if unknown.variable:
        return f"give it: {unknown.variable}=... before roost"
    if unknown.argument:
        return f"give it as argument {unknown.argument} of the script: roost plan SCRIPT -- ..."
    return "write the value in the script, or a variable with it, such as ${NNODES:-1}, and give that before roost"


def read_overrides(words: Sequence[Value]) -> Arguments:
    """Hydra overrides `a.b=c`, `+a.b=c`, `~a.b`, and options such as `--config-name x`."""
    found = Arguments()
    option = ""
    for word in words:
        flag = re.fullmatch(r"(--?[A-Za-z][\w-]*)(?:=(.*))?", word.prefix, re.DOTALL)
        if flag is not None:
            option = flag[1] if flag[2] is None and word.known is not None else ""
            found.options[flag[1]] = word.after(len(flag[1]) + 1)
            continue
        match = _OVERRIDE.match(word.prefix)
        if option and (match is None or not match[3]):
            found.options[option] = word
        elif match is None or (not match[3] and match[1] != "~"):
            (found.unknown if word.known is None else found.stray).append(word)
        else:
            path: KeyPath = tuple(match[2].split("."))[:MAX_DEPTH]
            if match[1] == "~":
                found.remove(path, word.position)
            else:
                value = word.after(match.end())
                for inner, one in _merged_keys(value):
                    found.set((*path, *inner), one, word.position)
                    if match[1] == "+":
                        found.added.add((*path, *inner))
                if not value.parts:
                    found.empty[path] = word.position
        option = ""
    return found


def _merged_keys(value: Value) -> Iterator[tuple[KeyPath, Any]]:
    """The keys that a value sets, below its own: a mapping `{a: 1}` is merged into what is there, as in Hydra."""
    mapping = _mapping(value.known)
    if not mapping:
        yield (), resolved(value)
        return
    left: list[tuple[KeyPath, Any]] = [((), mapping)]
    while left:
        path, one = left.pop()
        if isinstance(one, dict) and one:
            left += [((*path, key), inner) for key, inner in reversed(one.items())]
        else:
            yield path, one


def _mapping(text: str | None) -> Any:
    """A mapping that is written on the command line; None for any other text, and for one that Hydra refuses."""
    if text is None or not (text.startswith("{") and text.endswith("}")) or len(text) > MAX_MAPPING:
        return None
    from hydra.core.override_parser.overrides_parser import OverridesParser  # imported late: most jobs have no mapping
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except (HydraException, RecursionError):
        return None


def switch_value(flag: Value) -> Any:
    """The value of a flag that none follows: true, or unknown if an unset variable follows it."""
    unset = flag.dropped
    return True if unset is None else Unresolved(unset.shown, unset.reason, how_to_give(unset), is_empty=True)


def read_flags(words: Sequence[Value], switches: Collection[str] = ()) -> Arguments:
    """Flags `--a-b 1`, `--a-b=1` and `--a-b`, which is then true; of several values the first is the value.

    `switches` never have a value.
    """
    found = Arguments()
    flag = ""
    position: Position = (None, None, None)
    takes_more = False  # the words after a flag of the command line may all be its values
    for word in words:
        match = _FLAG.match(word.prefix)
        is_given = word.position[0] == COMMAND_LINE
        if is_given and match is None and not flag and not takes_more and word.known is not None:
            found.stray.append(word)
        takes_more = is_given and (takes_more or match is not None)
        if match is not None:
            flag, position = match[1], word.position
            if match[2]:
                found.set((flag,), resolved(word.after(match.end())), position)
                flag = ""
            else:
                found.set((flag,), switch_value(word) if flag not in switches else True, position)
                flag = "" if flag in switches else flag
        elif word.unknown is not None and word.unknown.is_list:
            found.unknown.append(word)
            flag = ""
        elif flag:
            found.set((flag,), resolved(word), position)
            flag = ""
    return found


MAX_FILES = 200  # of a chain
OVERRIDE = "_override_"  # in a section: it replaces that of the files below instead of being merged into it


def is_chain(values: Mapping[Any, Any]) -> bool:
    """Return True if `defaults` names files, as in NeMo-RL, and not groups of Hydra.

    >>> is_chain({"defaults": "../grpo_math_1B.yaml"}), is_chain({"defaults": [{"model": "qwen"}, "_self_"]})
    (True, False)
    """
    paths = _paths(values)
    return bool(paths) and "hydra" not in values and all(str(path).endswith((".yaml", ".yml")) for path in paths)


def _paths(values: Mapping[Any, Any]) -> list[Any]:
    written = values.get("defaults")
    return written if isinstance(written, list) else [] if written is None else [written]


def read_chain(source: Source, findings: Findings, above: tuple[Path, ...] = ()) -> Source | None:
    """A config merged over the files that its `defaults` name; None, with findings, if one is missing."""
    file = Path(source.file or "")
    chain = (*above, file.resolve())
    where = source.where(("defaults",))
    base = Source({}, source.file)
    for path in _paths(source.values):
        parent = file.parent / str(path)
        if parent.resolve() in chain or len(chain) > MAX_FILES:
            findings.error("RST-C019", where, f"includes files that include each other: {path}", fix="break the circle")
            return None
        if not is_file(parent):
            findings.error(
                "RST-N060",
                where,
                f"{shown(str(path))} is not here; what it says about placement is not known",
                f"looked for {parent}",
                "plan the file where it lies in its repository, with those it builds on",
            )
            return None
        below = read_yaml(parent, findings)
        below = read_chain(below, findings, chain) if below is not None else None
        if below is None:
            return None
        base = _over(base, below)
    own = {key: value for key, value in source.values.items() if key != "defaults"}
    return _over(base, replace(source, values=own))


def _over(below: Source, above: Source) -> Source:
    """One config merged over another; a section with `_override_` replaces what is below it."""
    values, positions = dict(below.values), dict(below.positions)
    own = dict(above.values)
    for key, value in own.items():
        if isinstance(value, Mapping) and value.get(OVERRIDE) is True:
            own[key] = {inner: part for inner, part in value.items() if inner != OVERRIDE}
            values.pop(key, None)
            positions = {path: place for path, place in positions.items() if path[:1] != (key,)}
    # Values of aliases and merge keys have no position; that of the file below would name the wrong file.
    positions = {path: place for path, place in positions.items() if not _sets(own, path)}
    return Source(merged(values, own), above.file, {**positions, **above.positions})


def _sets(values: Any, path: KeyPath) -> bool:
    """Return True if a mapping, merged over another, has a value of its own at a path.

    >>> _sets({"a": {"b": 1}}, ("a", "b")), _sets({"a": {"b": 1}}, ("a",)), _sets({"a": [1]}, ("a", 0))
    (True, False, True)
    """
    for key in path:
        if not isinstance(values, Mapping):
            return True
        if key not in values:
            return False
        values = values[key]
    return not isinstance(values, Mapping)


def merged(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Mappings merged key by key; any other value above replaces the one below.

    >>> merged({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}})
    {'a': {'b': 1, 'c': [2]}}
    """
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def over_file(source: Source, arguments: Arguments) -> Arguments:
    """The arguments merged over a config file, without the file's Hydra keys."""
    own = {key: value for key, value in source.values.items() if key not in ("defaults", "hydra")}
    values, positions = merged(own, arguments.values), {**source.positions, **arguments.positions}
    return Arguments(values, positions, arguments.options, arguments.unknown)


def warn_defaults(source: Source, findings: Findings) -> None:
    """Warn that the `defaults` of a config that a script names are not followed."""
    findings.warn(
        "RST-N060",
        source.where(("defaults",)),
        "is not followed behind a script; the plan is made without the files that it names",
        fix=f"plan the config itself: roost plan {source.file}",
    )


def find_file(path: str, command: Command) -> Path | None:
    """A file that a command names, relative to its folder, the script's, or one above the script's; else None."""
    bases = [command.folder or Path(), *Path(command.position[0] or "").resolve().parents[:4]]
    return next((base / path for base in bases if base / path in command.written or is_file(base / path)), None)


_HYDRA_MAIN = re.compile(r"@hydra\.main\(([^)]*)\)")


def hydra_config(start: Start) -> tuple[str | None, Path | None]:
    """The name of the config that a program of Hydra reads, and its file if it exists.

    `--config-path` and the path of `@hydra.main` are relative to the program's folder; `--config-dir` adds a folder.
    """
    options, command = start.arguments.options, start.command
    name, path, more = (
        next((options[one] for one in names if one in options), None)
        for names in (("--config-name", "-cn"), ("--config-path", "-cp"), ("--config-dir", "-cd"))
    )
    program = start.program.replace(".", "/") if start.is_module else start.program.removesuffix(".py")
    written = find_file(f"{program}.py", command)
    main = _HYDRA_MAIN.search(read_text(written, Findings(), "a program") or "") if written is not None else None
    own = dict(re.findall(r"\bconfig_(name|path)\s*=\s*[\"']([^\"']+)", main[1])) if main is not None else {}
    text = name.known if name is not None else own.get("name")
    if not text:
        return None, None
    inside = (path.known or "") if path is not None else ""
    folders = [Path(program).parent / (inside or own.get("path", "config")), Path(inside)]
    folders += [Path(more.known.removeprefix("file://"))] if more is not None and more.known else []
    files = (os.path.normpath(folder / f"{text.removesuffix('.yaml')}.yaml") for folder in folders)
    return text, next((file for one in files if (file := find_file(one, command)) is not None), None)


_UNQUOTED = re.compile(r"(=\s*)(\ue000\d+\ue001)(?=\s*(?:#.*)?$)", re.MULTILINE)  # marks without quotes


def read_config(file: Path, command: Command, findings: Findings) -> Source | None:
    """A YAML or TOML file that a command names, with the text that the script itself writes to it, if it does."""
    from roost.config.shell.children import marked, unmarked  # imported late: other configs do not need it

    written, is_toml = command.written.get(file), file.suffix == ".toml"
    if written is None:
        return read_toml(file, findings) if is_toml else read_yaml(file, findings)
    text, unknowns = marked(written)
    if is_toml:
        source = parse_toml(_UNQUOTED.sub(r'\1"\2"', text), str(file), findings)
    else:
        source = parse_yaml(text, str(file), findings)
    if source is None or not unknowns:
        return source

    def with_unknown(text: str) -> Any:
        value = unmarked(text, unknowns, written)
        return text if value.unknown is None else resolved(value)

    return replace(source, values=_changed(source.values, with_unknown))


_ENVIRONMENT = re.compile(
    r"(?P<decode>\$\{oc\.decode:\s*)?\$\{oc\.env:\s*(?P<name>[A-Za-z_]\w*)\s*"
    r"(?:,(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\}(?(decode)\s*\})"
)


def resolved_for(values: dict[Any, Any], command: Command) -> dict[Any, Any]:
    """The values with every interpolation resolved; `${oc.env:X}` is what the script exports."""

    def with_environment(text: str) -> Any:
        return _from_environment(text, command) if "oc.env:" in text else text

    return resolve(_changed(values, with_environment))


def _from_environment(text: str, command: Command) -> Any:
    missing: list[Unresolved] = []

    def given(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        value = command.given(name)
        found = getattr(value, "known", None)
        if value is None and default is not None:
            return default.strip().strip("'\"")
        if found is None:
            unknown = getattr(value, "unknown", None)
            reason = unknown.reason if unknown is not None else f"{name} is not exported"
            fix = how_to_give(unknown) if unknown is not None else f"give it: {name}=... before roost"
            missing.append(Unresolved(text, reason, fix))
        return str(found)

    changed = _ENVIRONMENT.sub(given, text)
    whole = _ENVIRONMENT.fullmatch(text)
    if "oc.env:" in changed:
        missing.append(Unresolved(text, "what it takes from the environment is not read"))
    if missing:
        return missing[0]
    is_typed = whole is not None and (whole["decode"] or changed == "null")
    return typed(changed) if is_typed else changed


def _changed(value: Any, change: Callable[[str], Any]) -> Any:
    """A value with `change` applied to all texts in it."""
    if isinstance(value, Mapping):
        return {key: _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def is_file(file: Path) -> bool:
    """Return True if a file is here; False for names that the system refuses."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def file_option(name: str, arguments: Arguments, command: Command, findings: Findings) -> Path | None:
    """The config file that an option names; None, with a finding, if it is unknown or missing."""
    option = arguments.options.get(name)
    if option is None:
        return None
    file = find_file(option.known, command) if option.known else None
    if file is None:
        report_missing(option, findings)
    return file


def report_missing(word: Value, findings: Findings) -> None:
    """Report a config file that is unknown or missing."""
    unknown = word.unknown
    findings.error(
        "RST-N060",
        Where(*word.position),
        f"{word.shown} is not here; what it says about placement is not known",
        unknown.reason if unknown is not None else "",
        how_to_give(unknown) if unknown is not None else "plan from the folder that the job is started in",
    )


# --- Python scripts


def calls_in(
    text: str, file: str, names: Collection[str]
) -> Iterator[tuple[str, Position, dict[str, tuple[Any, Position]]]]:
    """Calls of these names in a Python script, with positions and keyword arguments; the script is not run."""
    if not any(name in text for name in names):
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    constants = _constants(tree)
    for node in ast.walk(tree):
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if name not in names or not isinstance(node, ast.Call):
            continue
        found: dict[str, tuple[Any, Position]] = {}
        for keyword in node.keywords:
            if keyword.arg is not None:
                place = (file, keyword.value.lineno, keyword.value.col_offset + 1)
                named = constants.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else None
                found[keyword.arg] = (_literal(named or keyword.value), place)
        yield name, (file, node.lineno, node.col_offset + 1), found


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Module-level names that are assigned exactly once."""
    stored = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        target = targets[0] if len(targets) == 1 else None
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and stored[target.id] == 1 and value is not None:
            found[target.id] = value
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Unresolved(ast.unparse(node)[:60], "it is computed when the script runs", "write the value itself")
