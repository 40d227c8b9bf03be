"""Keys of a framework's job: those that decide placement, and the others, which are not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from roost.config.findings import counted, did_you_mean
from roost.config.job import Notation
from roost.config.known_keys.placement_words import is_read, meaning, nearest
from roost.config.known_keys.tables import PLACING, Effect, Entry, KeyUse, Known
from roost.config.source import Section

MAX_NAMES = 12
CHECK_TRAIN = "roost check --train"
Following = tuple[Mapping[str, tuple[str, ...]], tuple[Entry, ...], Known]
# Similarity to a known key of its section from which a key counts as misspelt.
LIKELY = 0.85
NEAR_MISS = 0.9  # of placement: virtual_pipeline_model_parallel_size is not a misspelt pipeline_model_parallel_size
TRAINED = (Notation.VERL, Notation.TRL)  # frameworks whose training settings are read


def _following(notation: Notation) -> Following:
    """The keys that each training setting is derived from, and the tables of keys that are not followed."""
    # Imported late: jobs that are only placed do not need it.
    module = import_module(f"roost.config.frameworks.{notation.value}_train")
    return module.DERIVED_FROM, module.TABLE, module.NOT_FOLLOWED


def framework_keys(
    root: Section, notation: Notation, placing: Sequence[str], is_trained: bool = False
) -> tuple[KeyUse, ...]:
    """Every key of the job, in the order written."""
    program = notation.program
    followed = _following(notation) if is_trained else None
    reason, instead = f"Roost plans jobs of {program}, and does not train them", f"train with {program}"
    if notation in TRAINED:
        reason, instead = "the plan only places", f"{CHECK_TRAIN} says what training follows"
    unread = Known(Effect.TRAINING, reason, instead)
    uses = []
    plain = {pattern for pattern in placing if not any(sign in pattern for sign in "*?[")}
    wild = [pattern for pattern in placing if pattern not in plain]
    for path in _leaves(root.values, ()):
        if path[0] == "train":
            continue
        written = ".".join(path)
        places = written in plain or any(fnmatchcase(written, pattern) for pattern in wild)
        parent, _, name = written.rpartition(".")
        siblings = [one.rpartition(".")[2] for one in placing if one.rpartition(".")[0] == parent and "*" not in one]
        hint = "" if places else did_you_mean(name, siblings, NEAR_MISS) or _unread(path, root, notation, placing)
        known = _known(written, followed) if followed else unread
        value: Any = root.below(*path[:-1]).values.get(path[-1])
        is_set = not followed or known.changes(value)
        uses.append(KeyUse(root.where(*path), PLACING if places else known, places, is_set, hint))
    return tuple(uses)


def _unread(path: tuple[str, ...], root: Section, notation: Notation, placing: Sequence[str]) -> str:
    """A hint for a key that looks like placement but is not read; empty for other keys, and for a user's own."""
    written, launch = ".".join(path), root.source.launch
    if not meaning(written) or is_read(written, notation) or (launch is not None and path in launch.added):
        return ""
    if len(path) > 1 and not any(key.startswith(f"{path[0]}.") for key in placing):
        return ""  # a section of a user's own
    near = nearest(written, placing, notation)
    return f"did you mean {near}?" if near else f"{notation.program} reads no such key"


def _known(written: str, followed: Following) -> Known:
    derived_from, table, other = followed
    for name, keys in derived_from.items():
        if any(written == key or written.startswith(f"{key}.") for key in keys):
            return Known(Effect.FOLLOWED, f"{name} in train")
    matching = (entry.known for entry in table if any(fnmatchcase(written, one) for one in entry.patterns()))
    found = next(matching, None)
    if found is not None:
        return found
    hint = _nearest(written, followed)
    return replace(other, reason=hint, instead="correct the key, or remove it") if hint else other


def _nearest(written: str, followed: Following) -> str:
    """A hint for a key that is nearly a known key of its section."""
    derived_from, table, _ = followed
    parent, _, name = written.rpartition(".")
    known = [key for keys in derived_from.values() for key in keys]
    known += [pattern for entry in table for pattern in entry.patterns() if "*" not in pattern]
    siblings = dict.fromkeys(key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == parent)
    return did_you_mean(name, siblings, LIKELY)


def report_framework_keys(uses: Sequence[KeyUse], root: Section, notation: Notation, is_trained: bool = False) -> None:
    """Warn about misspelt keys of placement; report the others one by one if the job is trained, else in one note."""
    for use in uses:
        if use.hint:
            what = f"is not a key that {notation.program} reads for placement"
            root.findings.warn("RST-C023", use.where, what, use.hint, "correct the key, or remove it")
    if is_trained:
        _report_unfollowed(uses, root)
        return
    unread = [use for use in uses if not use.places]
    if unread:
        is_flags = notation is Notation.TRL and root.source.launch is not None
        single = ["flags" if is_flags or use.where.key_path.startswith("-") else "top level" for use in unread]
        sections = Counter(use.section or name for use, name in zip(unread, single, strict=True))
        listed = ", ".join(f"{name} {count}" for name, count in sections.most_common(MAX_NAMES))
        program = notation.program
        fix = f"roost explain {root.source.file or 'CONFIG'} keys lists them"
        if notation in TRAINED:
            fix += "; roost train follows some of them"
        root.findings.note(
            "RST-T042",
            root.where(),
            f"{'the plan' if notation in TRAINED else 'Roost'} only places jobs of {program}: "
            f"{counted(len(unread), 'key')} about training {'is' if len(unread) == 1 else 'are'} not used ({listed})",
            fix=fix,
        )


def _report_unfollowed(uses: Sequence[KeyUse], root: Section) -> None:
    """Warn at each key that would change the training, and list the others in one note."""
    reported = {finding.where.path for finding in root.findings.collected}
    left = [use for use in uses if use.is_set and use.is_unused(trains=True) and use.where.path not in reported]
    for use in left:
        if use.known.effect is Effect.TRAINING:
            root.findings.warn("RST-T014", use.where, "is not followed", use.known.reason, use.known.instead)
    quiet = [use.where.key_path for use in left if use.known.effect is not Effect.TRAINING]
    if quiet:
        listed = ", ".join(quiet[:MAX_NAMES]) + (
            f" and {len(quiet) - MAX_NAMES} more" if len(quiet) > MAX_NAMES else ""
        )
        what = f"{counted(len(quiet), 'key')} about speed, files and backends not used: {listed}"
        fix = f"{CHECK_TRAIN} {root.source.file or 'CONFIG'} gives the reason for each"
        root.findings.note("RST-T041", root.where(), what, fix=fix)


def _leaves(values: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here
