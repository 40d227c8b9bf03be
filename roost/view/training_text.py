"""Training settings in words: each value with the key, or the default, that decides it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roost.config.findings import Where
from roost.config.job import Notation, Origin, ResolvedSetting
from roost.config.known_keys.tables import Effect, KeyUse
from roost.config.notations.dialects import MADE_OF
from roost.config.train import SETTINGS


def print_settings(settings: Iterable[ResolvedSetting], notation: Notation, file: str | None, console: Console) -> None:
    """Print all settings as a table: name, value, origin; keys of the config's own `file` by line only."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for setting in settings:
        keys = "\n".join(_short(key, file) for key in setting.keys)
        words = (setting.name, spell_value(setting.value), keys or spell_origin(setting, notation))
        table.add_row(*(Text(word) for word in words))
    console.print(table)


def print_keys(keys: Iterable[KeyUse], file: str | None, console: Console) -> None:
    """Print unused keys of a config as a table: key, reason, replacement."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("key", "not used because", "instead"):
        table.add_column(name, overflow="fold")
    for use in keys:
        followed = use.known.effect is Effect.FOLLOWED
        reason = f"the config has no section train; there it is {use.known.reason}" if followed else use.known.reason
        words = (_short(use.where, file), f"{use.known.effect.value}: {reason}", use.hint or use.known.instead)
        table.add_row(*(Text(word) for word in words))
    console.print(table)


def _short(key: Where, file: str | None) -> str:
    line = f"line {key.line}" if key.file == file and key.line is not None else str(replace(key, path=()))
    return f"{key.key_path}, {line}" if line else key.key_path


def explain_setting(setting: ResolvedSetting, notation: Notation) -> list[str]:
    """Sentences about one setting: its value, what decides it, its meaning, and the keys that can set it."""
    declared = SETTINGS[setting.name]
    own = [".".join(path) for path in declared.native(notation)] + list(MADE_OF[notation].get(setting.name, ()))
    keys = ", ".join(dict.fromkeys([f"train.{setting.name}", *own]))
    return [
        f"{setting.name} is {spell_value(setting.value)}, from {spell_origin(setting, notation)}.",
        f"{declared.description.rstrip('.')}.",
        f"Keys that set it: {keys}.",
    ]


def spell_origin(setting: ResolvedSetting, notation: Notation) -> str:
    """The origin as text.

    >>> spell_origin(ResolvedSetting("top_p", 0.7, Origin.NOTATION), Notation.ROLL)
    "ROLL's default"
    """
    if setting.origin is Origin.NOTATION:
        return f"{notation.program}'s default"
    if setting.origin is Origin.ROOST:
        return "Roost's default"
    return ", ".join(str(key) for key in setting.keys)


def spell_value(value: Any) -> str:
    """Format a value as one line of YAML.

    >>> spell_value(None), spell_value(True), spell_value("grpo"), spell_value({"a": 1})
    ('null', 'true', 'grpo', '{"a": 1}')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)
