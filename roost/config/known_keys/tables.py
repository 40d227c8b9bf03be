"""How tables of known keys are written, and reasons that several notations share."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from roost.config.findings import Findings, Where

_BRACES = re.compile(r"\{([^{}]*)\}")


class Effect(StrEnum):
    """Treatment of a key that no setting declares."""

    FOLLOWED = "followed"
    PLACING = "read for placing"
    TRAINING = "not followed"  # it changes how the other program trains
    BACKEND = "backend"  # of a trainer or an engine that Roost does not use, or sets up by itself
    SPEED = "speed or memory"
    FILES = "files or logging"
    NOTHING = "no effect"  # the other program does not read it either, or not with this value
    OWN = "user-defined"  # no program reads it; other keys may refer to it
    UNKNOWN = "unknown"


NO_VALUES: tuple[Any, ...] = (None, -1, "", [], {})  # as programs write: not given
OFF = (*NO_VALUES, False)


@dataclass(frozen=True, slots=True)
class Known:
    """Why a key is not followed, and what to write instead.

    `harmless`: values with which the key does not matter. If none are listed: null, false, 0, -1 and empty values.
    """

    effect: Effect
    reason: str
    instead: str = ""
    harmless: tuple[Any, ...] = field(default=(), compare=False)  # not compared: plan files do not have it

    def counts(self, value: Any) -> bool:
        """Return True if a key with this value is reported."""
        return value not in self.harmless if self.harmless else bool(value) and value != -1

    def changes(self, value: Any) -> bool:
        """Return True if a key with this value may change something: false and 0 may switch off a default."""
        return value not in (self.harmless or NO_VALUES)


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key of a config and how it is used."""

    where: Where
    known: Known
    places: bool = False  # whether it affects placement, also in a config that does not train
    is_set: bool = True  # to a value that is not harmless
    hint: str = ""  # for an unknown key: the known key that was probably meant

    def is_unused(self, trains: bool) -> bool:
        """Return True if the key has no effect; without a section `train`, only placement keys have one."""
        followed = (Effect.FOLLOWED, Effect.PLACING) if trains else (Effect.PLACING,)
        return not self.places and self.known.effect not in followed

    @property
    def section(self) -> str:
        """The key's section at the top of the config; empty for a key that stands there itself."""
        return str(self.where.path[0]) if len(self.where.path) > 1 else ""

    @property
    def name(self) -> str:
        """The key within its section."""
        return ".".join(str(part) for part in self.where.path[1:]) or self.where.key_path


def with_reported_reasons(uses: Iterable[KeyUse], findings: Findings) -> tuple[KeyUse, ...]:
    """The keys; those that an RST-T014 warning or an RST-T094 note names get its reason."""
    idle = {found.where.path: found for found in findings.notes if found.code == "RST-T094"}
    unfollowed = {found.where.path: found for found in findings.warnings if found.code == "RST-T014"}
    reasons = {path: Known(Effect.NOTHING, found.why) for path, found in idle.items()}
    reasons |= {path: Known(Effect.TRAINING, found.why, found.fix) for path, found in unfollowed.items()}
    return tuple(
        replace(use, known=reasons[use.where.path], places=False) if use.where.path in reasons else use for use in uses
    )


OPTIONAL_COMPONENTS = ("critic", "reference")  # a job may have their sections without placing them
CRITIC_SWITCH = ("critic", "use_critic_model")


def mark_unplaced(uses: Iterable[KeyUse], placed: Collection[str]) -> tuple[KeyUse, ...]:
    """The keys, where followed keys of an optional component that is not placed have no effect."""
    followed = (Effect.FOLLOWED, Effect.PLACING)
    return tuple(
        replace(use, known=Known(Effect.NOTHING, f"{use.section} is not placed"), places=False)
        if use.section in OPTIONAL_COMPONENTS
        and use.section not in placed
        and use.known.effect in followed
        and use.where.path != CRITIC_SWITCH
        else use
        for use in uses
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """Keys with the same reason.

    `keys` holds patterns separated by blanks: `*` is any one key, `{a,b}` is a or b, and `.**` at the end is everything
    below. A pattern may begin with ROLE, which is every role of ROLL's.
    """

    known: Known
    keys: str

    def patterns(self) -> Iterator[str]:
        for pattern in self.keys.split():
            yield from expand(pattern)


def expand(pattern: str) -> Iterator[str]:
    """The patterns that one with braces stands for.

    >>> list(expand("{a,b}.lr"))
    ['a.lr', 'b.lr']
    """
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for choice in match[1].split(","):
        yield from expand(pattern[: match.start()] + choice + pattern[match.end() :])


DATA = Known(
    Effect.TRAINING, "train.data and train.task give the prompts", "use a key of train.data for it, or remove it"
)
REWARD = Known(
    Effect.TRAINING, "train.task and train.rewards score the answers", "set it in train.task or train.rewards"
)
SAMPLING = Known(Effect.TRAINING, "Roost's engines have no such setting", "remove it")
NOT_FOLLOWED = Known(Effect.TRAINING, "Roost has nothing for it", "remove it, if the run is to be without it")
LOSS = Known(Effect.TRAINING, "Roost's loss has no such term", "remove it")
START = Known(Effect.TRAINING, "a run of Roost starts from the model; roost train --resume continues it", "remove it")
FROZEN = Known(
    Effect.TRAINING,
    "Roost trains what this would freeze: all weights, or an adapter on all linear layers",
    "remove it, if all is to be trained",
)
LOGGING = Known(Effect.FILES, "logging; roost train --metrics chooses where metrics go")
FILES = Known(Effect.FILES, "files; roost train --runs chooses where a run is kept")
MODEL = Known(Effect.BACKEND, "the model's config.json has it")
HYDRA = Known(Effect.NOTHING, "it steers Hydra")
PLACING = Known(Effect.PLACING, "")
