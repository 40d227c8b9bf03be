"""Load a config: compose the files of its Hydra `defaults` list, apply overrides, resolve interpolations."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roost.config.findings import Findings, KeyPath, Position, Where, did_you_mean, shown
from roost.config.frameworks.arguments import is_chain, read_chain
from roost.config.interpolation import resolve
from roost.config.job import COMMAND_LINE
from roost.config.source import Source, is_within_limits, read_yaml

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAX_INCLUDES = 200
OWN_CONFIGS = Path(__file__).parents[1] / "conf"  # groups that come with Roost, such as agents
SCRIPT_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".job")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^},]+)(?:,([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class DefaultEntry:
    """One entry: its group (empty for a plain file), its package, the chosen options, and the entry as written."""

    group: str
    package: str
    options: tuple[str, ...]
    written: Any
    is_optional: bool = False

    @property
    def is_self(self) -> bool:
        return bool(self.written == "_self_")

    def is_chosen_by(self, overrides: Sequence[str]) -> bool:
        """Return True if the command line chooses an option of this group, which replaces the written one.

        An entry written as a file (`model/pi0@actor.model`) is not a group for Hydra, and cannot be replaced.
        """
        keys = {override.split("=", 1)[0].lstrip("+~") for override in overrides}
        group = self.group.lstrip("/")
        return isinstance(self.written, Mapping) and bool(keys & {group, f"{group}@{self.package}"})

    @property
    def paths(self) -> list[str]:
        """The files that the entry names, relative to a folder of configs."""
        folder = f"{self.group.lstrip('/')}/" if self.group else ""
        return [f"{folder}{option}" for option in self.options if "${" not in option]


def find_config(path: str, directories: Sequence[Path]) -> Path | None:
    """The file of a config in the first folder that has it; None if no folder has."""
    return next((file for directory in directories if _is_there(file := directory / f"{path}.yaml")), None)


def nearest_choice(text: str, directories: Sequence[Path]) -> str:
    """Suggestion for a missing config group or option; empty if there is none.

    >>> nearest_choice("Could not find 'appworld/agent/defalt'", [OWN_CONFIGS])
    'did you mean default?'
    """
    option = re.search(r"Could not find '(?:([^']*)/)?([^'/]+)'", text)
    if option is not None:
        folders = [directory / (option[1] or "") for directory in directories]
        return did_you_mean(option[2], {file.stem for folder in folders for file in folder.glob("*.yaml")})
    group = re.search(r"config group '([^']+)' does not exist", text)
    if group is None:
        return ""
    depth = group[1].count("/") + 1
    folders = [folder for directory in directories for folder in directory.glob("/".join(["*"] * depth))]
    known = {"/".join(folder.parts[-depth:]) for folder in folders if folder.is_dir() and any(folder.glob("*.yaml"))}
    return did_you_mean(group[1], known)


def _is_there(path: Path) -> bool:
    """Return True if a file or folder exists; False also for names that the operating system refuses."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def included(
    entry: DefaultEntry, directories: Sequence[Path], findings: Findings
) -> list[tuple[str, list[DefaultEntry]]]:
    """The existing files that an entry names, each with the entries of its own defaults list."""
    found = []
    for path in entry.paths:
        file = find_config(path, directories)
        source = read_yaml(file, findings) if file else None
        if source is not None:
            own = [part for part in read_defaults(source, findings) if not part.is_self]
            found.append((path, [_relative(part, path) for part in own]))
    return found


def _relative(entry: DefaultEntry, path: str) -> DefaultEntry:
    """The entry with its group relative to the folder of configs, not to the file that names it."""
    folder = path.rpartition("/")[0]
    if entry.group.startswith("/") or not folder:
        return entry
    return replace(entry, group=f"{folder}/{entry.group}".rstrip("/"))


def missing_files(entry: DefaultEntry, directories: Sequence[Path]) -> list[str]:
    """Missing files that an entry names, or the files it includes."""
    absent = [path for path in entry.paths if find_config(path, directories) is None and not entry.is_optional]
    for _, entries in included(entry, directories, Findings()):
        for part in entries:
            absent += missing_files(part, directories)
    return absent


def check_includes(source: Source, directories: Sequence[Path], overrides: Sequence[str], findings: Findings) -> bool:
    """Return True if all files of the defaults lists and the command line can be read, without a cycle.

    Hydra reads them again, but without limits and with less helpful errors.
    """
    errors = findings.num_errors
    counts: dict[str, int] = {}

    def count(entry: DefaultEntry, above: tuple[str, ...]) -> int:
        total = 1
        for path, entries in included(entry, directories, findings):
            if path in above:
                raise _EndlessIncludes(" -> ".join((*above[above.index(path) :], path)))
            if path not in counts:
                counts[path] = sum(count(part, (*above, path)) for part in entries)
            total += counts[path]
        return total

    where = source.where(("defaults",))
    entries = [entry for entry in read_defaults(source, Findings()) if not entry.is_self]
    try:
        total = sum(count(entry, ()) for entry in [*entries, *_chosen(overrides)])
    except _EndlessIncludes as error:
        findings.error("RST-C019", where, f"includes files that include each other: {error}", fix="break the circle")
        return False
    if total > MAX_INCLUDES:
        what = f"includes {total:,} files in all, more than {MAX_INCLUDES}"
        findings.error("RST-C020", where, what, fix="include each file once")
    return findings.num_errors == errors


def _chosen(overrides: Sequence[str]) -> list[DefaultEntry]:
    """The options of groups that the command line chooses."""
    pairs = [override.lstrip("+").partition("=") for override in overrides if not override.startswith("~")]
    chosen = [(key.partition("@"), option) for key, _, option in pairs if "/" in key or "." not in key]
    return [DefaultEntry(group, package, (option,), "") for (group, _, package), option in chosen if option]


class _EndlessIncludes(Exception):
    """Files that include each other."""


def read_defaults(source: Source, findings: Findings) -> list[DefaultEntry]:
    """The entries of the defaults list, without Hydra's own groups (logging, launchers)."""
    written = source.values.get("defaults")
    if written is None:
        return []
    if not isinstance(written, list):
        findings.error(
            "RST-C016",
            source.where(("defaults",)),
            f"is {shown(written)}; it must be a list",
            fix="write - group: option",
        )
        return []
    entries = []
    for index, item in enumerate(written):
        if isinstance(item, Mapping) and len(item) == 1:
            key, option = next(iter(item.items()))
        elif isinstance(item, str):
            key, option = "", item
        else:
            findings.error(
                "RST-C017",
                source.where(("defaults", index)),
                f"is {shown(item)}; it must be group: option",
                fix="write - group: option",
            )
            continue
        entry = _entry(str(key), option, item)
        if entry is not None:
            entries.append(entry)
    return entries


def _entry(key: str, option: Any, written: Any) -> DefaultEntry | None:
    words = key.split()
    group, _, package = (words[-1] if words else "").partition("@")
    if group.lstrip("/").startswith("hydra/"):
        return None
    options = option if isinstance(option, list) else [] if option is None else [option]
    if not group and isinstance(option, str):
        path, _, package = option.partition("@")
        group, _, last = path.rpartition("/")
        options = [last]
        if path.lstrip("/").startswith("hydra/"):
            return None
    names = tuple(str(part).removesuffix(".yaml") for part in options)
    return DefaultEntry(group, package, names, written, is_optional="optional" in words[:-1])


def search_directories(
    folder: Path, values: Mapping[Any, Any], overrides: Sequence[str]
) -> tuple[list[Path], list[str]]:
    """The folder of the config, those of its `hydra.searchpath`, and Roost's own; the overrides without that path."""
    written = _search_path(values)
    kept = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == "hydra.searchpath":
            written = [part.strip(" '\"") for part in value.strip("[] ").split(",")]
        else:
            kept.append(override)
    directories = [folder.resolve()]
    for entry in written:
        text = _ENVIRONMENT.sub(lambda match: os.environ.get(match[1].strip(), match[2] or ""), str(entry))
        directory = Path(text.removeprefix("file://"))
        if text.startswith("file://") and _is_there(directory):
            directories.append(directory.resolve())
    return [*directories, OWN_CONFIGS], kept


def _unset_in_search_path(values: Mapping[Any, Any]) -> list[str]:
    """Environment variables that `hydra.searchpath` needs and that are not set."""
    found = [match for entry in _search_path(values) for match in _ENVIRONMENT.finditer(str(entry))]
    names = dict.fromkeys(match[1].strip() for match in found if match[2] is None)
    return [name for name in names if name not in os.environ]


def _search_path(values: Mapping[Any, Any]) -> list[Any]:
    hydra = values.get("hydra")
    written = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    return written if isinstance(written, list) else []


PRIMARY = ""  # the config itself among the files that Hydra composes


def load(
    config: Mapping[Any, Any] | DictConfig | str | Path, overrides: Sequence[str], findings: Findings
) -> Source | None:
    """The values of a config, composed and resolved; None if it cannot be read at all.

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
            "RST-C005",
            Where(),
            f"the config is {shown(config)}, not a mapping",
            fix="give a dict, a DictConfig or a path",
        )
        return None
    if not is_within_limits(values, findings):
        return None
    source = Source(dict(values))
    overrides = (overrides,) if isinstance(overrides, str) else overrides
    if overrides:
        return _composed(source, [], overrides, [], findings)
    return replace(source, values=resolve(source.values))


def is_script(file: Path) -> bool:
    """Return True for shell scripts: by their name, or by their first line."""
    if file.suffix in SCRIPT_SUFFIXES:
        return True
    if file.suffix or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            first = stream.readline(200)
    except OSError:
        return False
    return re.match(rb"#!.*\b(ba|z|da|k)?sh\b", first) is not None


def load_file(file: Path, overrides: Sequence[str], findings: Findings) -> Source | None:
    """A file composed with the existing files of its `defaults`, or the job that a script starts."""
    if is_script(file):
        from roost.config.frameworks.launcher import load_script  # only now: other configs do not wait for it

        return load_script(file, overrides, findings)
    if file.suffix == ".py":
        what, fix = "is a Python script, of which nothing is run", "give the shell script that starts it, or its config"
        findings.error("RST-C004", Where(str(file)), what, fix=fix)
        return None
    if file.suffix == ".toml":
        from roost.config.frameworks.prime import load_toml

        return load_toml(file, overrides, findings)
    source = read_yaml(file, findings)
    if source is not None and is_chain(source.values):
        source = read_chain(source, findings)
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
    """The defaults whose files exist, with all files that those include; the others are skipped with a warning."""
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
        unset = _unset_in_search_path(source.values)
        fix = "plan from the folder that holds them if they say anything about placement"
        findings.warn(
            "RST-C018",
            source.where(("defaults",)),
            f"names files that are not there; the plan is made without them: {', '.join(dict.fromkeys(missing))}",
            f"looked in {', '.join(str(directory) for directory in directories if directory != OWN_CONFIGS)}"
            + (f"; hydra.searchpath needs {' and '.join(unset)}, which is not set" if unset else ""),
            f"set {' and '.join(unset)}, or {fix}" if unset else fix,
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
        warnings.simplefilter("ignore")  # Hydra warns about how files are written, which is not for Roost to judge
        try:
            _write_primary(Path(folder) / f"{name}.yaml", source, entries, directories)
            config, used = _load_with_hydra(Path(folder), name, list(overrides))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
            what, why, fix = _explained(error, directories)
            if near := _near_key(what, source.values):
                why, fix = near, "correct the key"
            findings.error("RST-C021", _place(source, overrides), f"cannot be composed: {what}", why, fix)
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
    """Position of each composed key: in the file of its group, in the config itself, or on the command line.

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
    """A hint for an override of a key that the config does not have.

    >>> _near_key("Could not override 'runner.max_step'.", {"runner": {"max_steps": 5}})
    'did you mean max_steps? A key that the config does not have needs a + before it'
    """
    found = re.fullmatch(r"Could not override '([^']+)'\.", what)
    inner: Any = values
    for part in found[1].split(".") if found else ():
        if not isinstance(inner, Mapping):
            break
        if part not in inner:
            hint = did_you_mean(part, map(str, inner))
            return f"{hint.removesuffix('?')}? A key that the config does not have needs a + before it" if hint else ""
        inner = inner[part]
    return ""


def _explained(error: Exception, directories: Sequence[Path]) -> tuple[str, str, str]:
    """What, why and fix of an error of Hydra or OmegaConf, without URLs and lines that point into a text."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and "://" not in line and set(line) != {"^"}] or [type(error).__name__]
    near = nearest_choice(lines[0], directories)
    fix = near or next((line for line in lines[1:] if line.startswith("To ")), "")
    if len(lines) > 1 and lines[1].startswith("Available options in"):
        options = takewhile(lambda line: not line.startswith("Config search path"), lines[2:])
        return lines[0], f"{lines[1]} {', '.join(options)}", fix or "choose one of these, or add a file of that name"
    why = " ".join(line for line in lines[1:4] if line != fix)
    return lines[0], why, fix or "check the override; quote a value with commas or brackets: 'key=\"0-3,6-7\"'"
