"""The `defaults` list of a Hydra config: which files it names and whether they are there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.spec.errors import Findings, shown
from roost.spec.source import Source

_ENVIRONMENT = re.compile(r"\$\{oc\.env:([^},]+)(?:,([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class DefaultEntry:
    """One entry: its group (empty for a plain file), where it is mounted, the options chosen, and the text itself."""

    group: str
    package: str
    options: tuple[str, ...]
    written: Any

    @property
    def is_self(self) -> bool:
        return bool(self.written == "_self_")

    @property
    def name(self) -> str:
        return ", ".join(f"{self.group}/{option}".lstrip("/") for option in self.options)

    def is_chosen_by(self, overrides: Sequence[str]) -> bool:
        """Whether the command line picks another option of this group, so that the one written does not matter."""
        keys = {override.split("=", 1)[0].lstrip("+~") for override in overrides}
        group = self.group.lstrip("/")
        return bool(keys & {group, f"{group}@{self.package}"})

    def exists_in(self, directories: Sequence[Path]) -> bool:
        return all(
            "${" in option
            or any((directory / f"{self.group.lstrip('/')}" / f"{option}.yaml").is_file() for directory in directories)
            for option in self.options
        )


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
    if group.lstrip("/").startswith("hydra/") or "optional" in words[:-1] or option is None:
        return None
    options = option if isinstance(option, list) else [option]
    if not group and isinstance(option, str):
        path, _, package = option.partition("@")
        group, _, last = path.rpartition("/")
        options = [last]
        if path.lstrip("/").startswith("hydra/"):
            return None
    return DefaultEntry(group, package, tuple(str(part).removesuffix(".yaml") for part in options), written)


def search_directories(folder: Path, values: Mapping[Any, Any]) -> list[Path]:
    """The folder of the config and those of its `hydra.searchpath` that exist here."""
    hydra = values.get("hydra")
    written = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
    directories = [folder.resolve()]
    for entry in written if isinstance(written, list) else []:
        text = _ENVIRONMENT.sub(lambda match: os.environ.get(match[1].strip(), match[2] or ""), str(entry))
        directory = Path(text.removeprefix("file://"))
        if text.startswith("file://") and directory.is_dir():
            directories.append(directory.resolve())
    return directories
