"""Settings that a notation spells otherwise than by one key of the same meaning, and the notation's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from roost.config import training_loop, training_rlinf, training_roll
from roost.config.job import Job, Notation
from roost.config.section import Section

_DIALECTS: Mapping[Notation, ModuleType] = {
    Notation.RLINF: training_rlinf,
    Notation.ROLL: training_roll,
    Notation.LOOP: training_loop,
}
# The keys that each setting follows from: where a finding points to, and docs/training-settings.md.
MADE_OF: Mapping[Notation, Mapping[str, tuple[str, ...]]] = {
    notation: dialect.MADE_OF for notation, dialect in _DIALECTS.items()
}


def derived(root: Section, job: Job) -> dict[str, Any]:
    """What the notation's own keys amount to, in Roost's names; what is not given is left out.

    `minibatches` is there where a notation counts them rather than their samples.
    """
    found: dict[str, Any] = _DIALECTS[job.notation].derived(root, job)
    return {name: value for name, value in found.items() if value is not None}


def defaults(root: Section, notation: Notation, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the other program does where nothing else is said, and Roost would do otherwise; `values` is what is."""
    found: dict[str, Any] = _DIALECTS[notation].defaults(root, values)
    return found
