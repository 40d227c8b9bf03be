"""The `defaults` list of a Hydra config: which files it names and whether they are there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost.config.errors import Findings, did_you_mean, shown
from roost.config.source import Source, read_yaml

MAX_INCLUDES = 200
OWN_CONFIGS = Path(__file__).parents[1] / "conf"  # groups that come with Roost, such as agents
_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^},]+)(?:,([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class DefaultEntry:
    """One entry: its group (empty for a plain file), where it is mounted, the options chosen, and the text itself."""

    group: str
    package: str
    options: tuple[str, ...]
    written: Any
    is_optional: bool = False

    @property
    def is_self(self) -> bool:
        return bool(self.written == "_self_")

    def is_chosen_by(self, overrides: Sequence[str]) -> bool:
        """Whether the command line picks another option of this group, so that the one written does not matter.

        An entry written as a file (`model/pi0@actor.model`) is no group to Hydra, and cannot be chosen again.
        """
        keys = {override.split("=", 1)[0].lstrip("+~") for override in overrides}
        group = self.group.lstrip("/")
        return isinstance(self.written, Mapping) and bool(keys & {group, f"{group}@{self.package}"})

    @property
    def paths(self) -> list[str]:
        """The files it names, relative to a folder of configs."""
        folder = f"{self.group.lstrip('/')}/" if self.group else ""
        return [f"{folder}{option}" for option in self.options if "${" not in option]


def find_config(path: str, directories: Sequence[Path]) -> Path | None:
    """The file of a config in the first folder that has it."""
    return next((file for directory in directories if _is_there(file := directory / f"{path}.yaml")), None)


def nearest_choice(text: str, directories: Sequence[Path]) -> str:
    """What was meant by a group of configs, or an option of one, that Hydra says is not there; empty if nothing is.

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
    """Whether a file or folder is there; a name that the system refuses is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def included(
    entry: DefaultEntry, directories: Sequence[Path], findings: Findings
) -> list[tuple[str, list[DefaultEntry]]]:
    """The files an entry names that exist, each with the entries of its own defaults list."""
    found = []
    for path in entry.paths:
        file = find_config(path, directories)
        source = read_yaml(file, findings) if file else None
        if source is not None:
            own = [part for part in read_defaults(source, findings) if not part.is_self]
            found.append((path, [_relative(part, path) for part in own]))
    return found


def _relative(entry: DefaultEntry, path: str) -> DefaultEntry:
    """The entry with its group counted from the folder of configs: groups are relative to the file that names them."""
    folder = path.rpartition("/")[0]
    if entry.group.startswith("/") or not folder:
        return entry
    return replace(entry, group=f"{folder}/{entry.group}".rstrip("/"))


def missing_files(entry: DefaultEntry, directories: Sequence[Path]) -> list[str]:
    """The files that an entry, or a file it brings in, names and that are not there."""
    absent = [path for path in entry.paths if find_config(path, directories) is None and not entry.is_optional]
    for _, entries in included(entry, directories, Findings()):
        for part in entries:
            absent += missing_files(part, directories)
    return absent


def check_includes(source: Source, directories: Sequence[Path], overrides: Sequence[str], findings: Findings) -> bool:
    """Whether all files that the defaults lists and the command line bring in can be read, and come to an end.

    Hydra reads them itself, without limits, and says little about what is wrong with them.
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
        findings.error(where, f"includes files that include each other: {error}", fix="break the circle")
        return False
    if total > MAX_INCLUDES:
        what = f"includes {total:,} files in all, more than {MAX_INCLUDES}"
        findings.error(where, what, fix="include each file once")
    return findings.num_errors == errors


def _chosen(overrides: Sequence[str]) -> list[DefaultEntry]:
    """The options of groups that the command line picks."""
    pairs = [override.lstrip("+").partition("=") for override in overrides if not override.startswith("~")]
    chosen = [(key.partition("@"), option) for key, _, option in pairs if "/" in key or "." not in key]
    return [DefaultEntry(group, package, (option,), "") for (group, _, package), option in chosen if option]


class _EndlessIncludes(Exception):
    pass


def read_defaults(source: Source, findings: Findings) -> list[DefaultEntry]:
    """The entries that can matter for placement; Hydra's own groups (logging, launchers) are left out."""
    written = source.values.get("defaults")
    if written is None:
        return []
    if not isinstance(written, list):
        findings.error(
            source.where(("defaults",)), f"is {shown(written)}; it must be a list", fix="write - group: option"
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
    hydra = values.get("hydra")
    written = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    kept = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == "hydra.searchpath":
            written = [part.strip(" '\"") for part in value.strip("[] ").split(",")]
        else:
            kept.append(override)
    directories = [folder.resolve()]
    for entry in written if isinstance(written, list) else []:
        text = _ENVIRONMENT.sub(lambda match: os.environ.get(match[1].strip(), match[2] or ""), str(entry))
        directory = Path(text.removeprefix("file://"))
        if text.startswith("file://") and _is_there(directory):
            directories.append(directory.resolve())
    return [*directories, OWN_CONFIGS], kept
