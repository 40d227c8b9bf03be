"""A whole config as its author's users run it: Hydra defaults, overrides from the command line, interpolations.

Hydra is imported only where something must be composed, so that planning a plain file stays fast.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roost.config.defaults import (
    OWN_CONFIGS,
    DefaultEntry,
    check_includes,
    find_config,
    missing_files,
    nearest_choice,
    read_defaults,
    search_directories,
)
from roost.config.errors import Findings, Where, did_you_mean, shown
from roost.config.interpolation import resolve
from roost.config.origins import COMMAND_LINE
from roost.config.source import Source, is_tame, read_yaml
from roost.config.yaml_events import KeyPath, Position

if TYPE_CHECKING:
    from omegaconf import DictConfig

PRIMARY = ""  # the config itself among the files that Hydra composes


def load(
    config: Mapping[Any, Any] | DictConfig | str | Path, overrides: Sequence[str], findings: Findings
) -> Source | None:
    """The values of a config, composed and resolved; None where it cannot be read at all.

    >>> load({"a": 1, "b": "${a}"}, [], Findings()).values
    {'a': 1, 'b': 1}
    """
    if isinstance(config, str | Path):
        return load_file(Path(config), (overrides,) if isinstance(overrides, str) else overrides, findings)
    values: Any = config
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        values = OmegaConf.to_container(config, resolve=False)
    if not isinstance(values, Mapping):
        findings.error(
            Where(), f"the config is {shown(config)}, not a mapping", fix="give a dict, a DictConfig or a path"
        )
        return None
    if not is_tame(values, findings):
        return None
    source = Source(dict(values))
    overrides = (overrides,) if isinstance(overrides, str) else overrides
    if overrides:
        return _composed(source, [], overrides, [], findings)
    return replace(source, values=resolve(source.values))


def load_file(file: Path, overrides: Sequence[str], findings: Findings) -> Source | None:
    """A file composed with the files its `defaults` name, as far as they exist."""
    source = read_yaml(file, findings)
    if source is None:
        return None
    directories, overrides = search_directories(file.parent, source.values, overrides)
    if not check_includes(source, directories, overrides, findings):
        return None
    entries = _existing(read_defaults(source, findings), directories, overrides, source, findings)
    if entries or overrides:
        return _composed(source, entries, overrides, directories, findings)
    return replace(source, values=resolve(_own_values(source)))


def _own_values(source: Source) -> dict[Any, Any]:
    """The config without the keys that only steer Hydra."""
    return {key: value for key, value in source.values.items() if key not in ("defaults", "hydra")}


def _existing(
    entries: list[DefaultEntry],
    directories: list[Path],
    overrides: Sequence[str],
    source: Source,
    findings: Findings,
) -> list[DefaultEntry]:
    """The defaults whose files, and the files those name, are there; the others are warned about and left out."""
    kept: list[DefaultEntry] = []
    missing: list[str] = []
    for entry in entries:
        if entry.is_self or entry.is_chosen_by(overrides):
            kept.append(entry)
            continue
        absent = missing_files(entry, directories)
        missing += absent
        if not absent:
            kept.append(entry)
    if missing:
        findings.warn(
            source.where(("defaults",)),
            f"names files that are not there; the plan is made without them: {', '.join(dict.fromkeys(missing))}",
            f"looked in {', '.join(str(directory) for directory in directories if directory != OWN_CONFIGS)}",
            "plan from the folder that holds them if they say anything about placement",
        )
    return kept if any(entry.options or entry.is_chosen_by(overrides) for entry in kept if not entry.is_self) else []


def _composed(
    source: Source,
    entries: list[DefaultEntry],
    overrides: Sequence[str],
    directories: list[Path],
    findings: Findings,
) -> Source | None:
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    name = Path(source.file).stem if source.file else "config"
    with tempfile.TemporaryDirectory(prefix="roost-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra's advice is about files that its user did not write for Roost
        try:
            _write_primary(Path(folder) / f"{name}.yaml", source, entries, directories)
            config, used = _load_with_hydra(Path(folder), name, list(overrides))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
            what, why, fix = _in_words(error, directories)
            why = _near_key(what, source.values) or why
            findings.error(_place(source, overrides), f"cannot be composed: {what}", why, fix)
            return None
    values = OmegaConf.to_container(config, resolve=False)
    positions = _positions(source, used, directories, overrides)
    own = {key: value for key, value in values.items() if key != "hydra"} if isinstance(values, dict) else {}
    return Source(resolve(own), source.file, positions)


def _load_with_hydra(folder: Path, name: str, overrides: list[str]) -> tuple[Any, list[tuple[str, str]]]:
    """The composed config, and each file used with the package it is mounted at.

    Hydra's loader is used without `hydra.initialize`, whose state is global: Roost plans inside other people's Hydra
    programs, and in several threads at once.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.utils import setup_globals
    from hydra.types import RunMode

    setup_globals()
    loader = ConfigLoaderImpl(create_config_search_path(str(folder)))
    config = loader.load_configuration(name, overrides, RunMode.RUN, from_shell=False)
    used = loader.compute_defaults_list(name, overrides, RunMode.RUN).defaults
    return config, [(PRIMARY if part.primary else part.config_path or "", part.package or "") for part in used]


def _write_primary(file: Path, source: Source, entries: list[DefaultEntry], directories: list[Path]) -> None:
    """The config with the defaults that exist; written anew because Hydra refuses those that do not."""
    primary: dict[Any, Any] = {"defaults": [entry.written for entry in entries] or ["_self_"]}
    primary |= _own_values(source)
    primary["hydra"] = {"searchpath": [f"file://{directory}" for directory in directories]}
    file.write_text(yaml.safe_dump(primary, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _positions(
    source: Source,
    used: list[tuple[str, str]],
    directories: list[Path],
    overrides: Sequence[str],
) -> dict[KeyPath, Position]:
    """Where each composed key stands: in the file of its group, in the config itself, or on the command line.

    Files are taken in the order in which they were composed, so that the last to write a key is the one named.
    """
    positions: dict[KeyPath, Position] = {}
    for config_path, package in used:
        if config_path == PRIMARY:
            positions |= source.positions
            continue
        file = None if config_path.startswith("hydra/") else find_config(config_path, directories)
        part = read_yaml(file, Findings()) if file else None
        prefix = tuple(package.split(".")) if package else ()
        if part:
            whole: dict[KeyPath, Position] = {prefix: (part.file, None, None)} if prefix else {}
            positions |= whole | {prefix + path: position for path, position in part.positions.items()}
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~").split("@")[0]
        replaced: KeyPath = tuple(key.replace("/", ".").split("."))
        if "/" not in key:
            positions = {path: position for path, position in positions.items() if path[: len(replaced)] != replaced}
            positions[replaced] = (COMMAND_LINE, None, None)
    return positions


def _place(source: Source, overrides: Sequence[str]) -> Where:
    return Where(COMMAND_LINE, path=(" ".join(overrides),)) if overrides else source.where(("defaults",))


def _near_key(what: str, values: Mapping[Any, Any]) -> str:
    """A hint for the key of an override that is not in the config itself.

    >>> _near_key("Could not override 'runner.max_step'.", {"runner": {"max_steps": 5}})
    'did you mean max_steps?'
    """
    found = re.fullmatch(r"Could not override '([^']+)'\.", what)
    inner: Any = values
    for part in found[1].split(".") if found else ():
        if not isinstance(inner, Mapping):
            break
        if part not in inner:
            return did_you_mean(part, map(str, inner))
        inner = inner[part]
    return ""


def _in_words(error: Exception, directories: Sequence[Path]) -> tuple[str, str, str]:
    """What a library's error says, why, and the fix; addresses and pointers into a text are left out."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and "://" not in line and set(line) != {"^"}] or [type(error).__name__]
    near = nearest_choice(lines[0], directories)
    fix = near or next((line for line in lines[1:] if line.startswith("To ")), "")
    if len(lines) > 1 and lines[1].startswith("Available options in"):
        options = takewhile(lambda line: not line.startswith("Config search path"), lines[2:])
        return lines[0], f"{lines[1]} {', '.join(options)}", fix or "choose one of these, or add a file of that name"
    why = " ".join(line for line in lines[1:4] if line != fix)
    return lines[0], why, fix or "check the override; quote a value with commas or brackets: 'key=\"0-3,6-7\"'"
