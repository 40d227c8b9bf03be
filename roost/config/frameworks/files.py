"""Config files that jobs of other frameworks name: found from a script, and merged in chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.config.findings import Findings, Where, shown
from roost.config.frameworks.arguments import Arguments, how_to_give
from roost.config.source import Source, read_yaml

if TYPE_CHECKING:  # configs that are no scripts do not wait for the shell
    from roost.config.shell.reading import Command
    from roost.config.shell.values import Value

MAX_FILES = 200  # of a chain
OVERRIDE = "_override_"  # in a section: it replaces the parents' instead of being merged into it


def is_chain(values: Mapping[Any, Any]) -> bool:
    """Return True if `defaults` names files, as NeMo-RL has it, and not Hydra's groups.

    >>> is_chain({"defaults": "../grpo_math_1B.yaml"}), is_chain({"defaults": [{"model": "qwen"}, "_self_"]})
    (True, False)
    """
    paths = _paths(values)
    return bool(paths) and "hydra" not in values and all(str(path).endswith((".yaml", ".yml")) for path in paths)


def _paths(values: Mapping[Any, Any]) -> list[Any]:
    written = values.get("defaults")
    return written if isinstance(written, list) else [] if written is None else [written]


def read_chain(source: Source, findings: Findings, above: tuple[Path, ...] = ()) -> Source | None:
    """A config merged over the files that its `defaults` name; None, with findings, where one is missing."""
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
    return Source(merged(values, own), above.file, {**positions, **above.positions})


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
    """The arguments over the config file that they change; Hydra's own keys of it are left out."""
    own = {key: value for key, value in source.values.items() if key not in ("defaults", "hydra")}
    values, positions = merged(own, arguments.values), {**source.positions, **arguments.positions}
    return Arguments(values, positions, arguments.options, arguments.unknown)


def warn_defaults(source: Source, findings: Findings) -> None:
    """Say that the groups of Hydra that a config names are not read behind a script."""
    findings.warn(
        "RST-N060",
        source.where(("defaults",)),
        "is not followed behind a script; the plan is made without the files that it names",
        fix=f"plan the config itself: roost plan {source.file}",
    )


def find_file(path: str, command: Command) -> Path | None:
    """A file that a command names: seen from where it is started, or from a folder above the script."""
    bases = [command.folder or Path(), *Path(command.position[0] or "").resolve().parents[:4]]
    return next((base / path for base in bases if is_file(base / path)), None)


def is_file(file: Path) -> bool:
    """Return True if a file is here; False for names that the system refuses."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def file_option(name: str, arguments: Arguments, command: Command, findings: Findings) -> Path | None:
    """The config file that an option names; None, with a finding, where it is not known or not here."""
    option = arguments.options.get(name)
    if option is None:
        return None
    file = find_file(option.known, command) if option.known else None
    if file is None:
        report_missing(option, findings)
    return file


def report_missing(word: Value, findings: Findings) -> None:
    """Report a config file that is not known or not here."""
    unknown = word.unknown
    findings.error(
        "RST-N060",
        Where(*word.position),
        f"{word.shown} is not here; what it says about placement is not known",
        unknown.reason if unknown is not None else "",
        how_to_give(unknown) if unknown is not None else "plan from the folder that the job is started in",
    )
