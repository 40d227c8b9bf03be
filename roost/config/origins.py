"""Origins of training settings: which key, on which line, or whose default decides a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roost.config.errors import Where

COMMAND_LINE = "command line"  # the file of a key that an override wrote


class Origin(StrEnum):
    """Where the value of a setting comes from."""

    CONFIG = "config"  # keys of the config
    OVERRIDE = "command line"
    NOTATION = "notation default"  # of the program whose notation the config is in
    ROOST = "roost default"


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """A training setting as the run will use it."""

    name: str  # in the section `train`
    value: Any  # as JSON has it
    origin: Origin
    keys: tuple[Where, ...] = ()  # that decide it; empty for a default


def origin_of(keys: tuple[Where, ...]) -> Origin:
    """The origin of a value that these keys decide.

    >>> origin_of((Where("job.yaml", 3, 5, ("seed",)), Where(COMMAND_LINE, path=("seed",)))).value
    'command line'
    """
    return Origin.OVERRIDE if any(key.file == COMMAND_LINE for key in keys) else Origin.CONFIG
