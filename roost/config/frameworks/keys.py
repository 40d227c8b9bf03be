"""Keys of a framework's job: those that count for placing, and the others, which are not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from roost.config.findings import counted, did_you_mean
from roost.config.job import Notation
from roost.config.known_keys.reasons import PLACING
from roost.config.known_keys.tables import Effect, KeyUse, Known
from roost.config.section import Section

MAX_NAMES = 12
NEAR_MISS = 0.9  # names such as virtual_pipeline_model_parallel_size are near others without being slips of them


def framework_keys(root: Section, notation: Notation, placing: Sequence[str]) -> tuple[KeyUse, ...]:
    """Every key of the job, in the order written."""
    program = notation.program
    unread = Known(Effect.TRAINING, f"Roost plans jobs of {program}, and does not train them", f"train with {program}")
    uses = []
    for path in _leaves(root.values, ()):
        written = ".".join(path)
        places = any(fnmatchcase(written, pattern) for pattern in placing)
        parent, _, name = written.rpartition(".")
        siblings = [one.rpartition(".")[2] for one in placing if one.rpartition(".")[0] == parent and "*" not in one]
        hint = "" if places else did_you_mean(name, siblings, NEAR_MISS)
        uses.append(KeyUse(root.where(*path), PLACING if places else unread, places, hint=hint))
    return tuple(uses)


def report_framework_keys(uses: Sequence[KeyUse], root: Section, notation: Notation) -> None:
    """A warning for keys that are nearly ones for placing, and one note about the others."""
    for use in uses:
        if use.hint:
            root.findings.warn("RST-C023", use.where, "is not a key that places", use.hint, "correct the key")
    unread = [use for use in uses if not use.places]
    if unread:
        sections = Counter(use.section or "flags" for use in unread)
        listed = ", ".join(f"{name} {count}" for name, count in sections.most_common(MAX_NAMES))
        root.findings.note(
            "RST-T042",
            root.where(),
            f"Roost only places jobs of {notation.program}: {counted(len(unread), 'key')} about training "
            f"{'is' if len(unread) == 1 else 'are'} not used ({listed})",
            fix=f"roost explain {root.source.file or 'CONFIG'} keys lists them",
        )


def _leaves(values: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here
