"""Findings about keys that are not followed: warnings where training changes, notes where it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from roost.config.findings import Findings, counted
from roost.config.job import Notation
from roost.config.known_keys.tables import Effect, KeyUse, Known
from roost.config.notations.dialects import UNLIKE
from roost.config.section import Section

QUIET = (Effect.BACKEND, Effect.SPEED, Effect.FILES, Effect.NOTHING)
HARMLESS = Known(Effect.NOTHING, "it has no effect with this value, or with the other settings")
NOT_FOLLOWED = "RST-T014"  # said of a key that Roost follows in other configs
MAX_NAMES = 12
FEW = 4


def report_keys(uses: Sequence[KeyUse], root: Section, notation: Notation) -> tuple[KeyUse, ...]:
    """Every finding about the keys of a config that trains; the answer is the keys as they turn out.

    Keys that have a finding already, because they are wrong or are warned about one by one (`warn_unlike`), are left
    out here.
    """
    reported = {finding.where.path for finding in root.findings.collected}
    unfollowed = {found.where.path: found for found in root.findings.warnings if found.code == NOT_FOLLOWED}
    looked_at = {tuple(unlike.path.split(".")) for unlike in UNLIKE[notation]} - reported
    settled = tuple(
        replace(use, known=HARMLESS, is_set=False)
        if use.where.path in looked_at and use.known.effect is Effect.TRAINING
        else replace(use, known=Known(Effect.TRAINING, found.why, found.fix))
        if use.known.effect is Effect.FOLLOWED and (found := unfollowed.get(use.where.path)) is not None
        else use
        for use in uses
    )
    left = [use for use in settled if use.where.path not in reported]
    _warn_unknown(left, notation, root.findings)
    _warn_unfollowed(left, root)
    _note_unused(left, root)
    return settled


def report_unread(uses: Sequence[KeyUse], root: Section) -> None:
    """One note about the keys of a config that only places."""
    reported = {finding.where.path for finding in root.findings.collected}
    unread = [
        use
        for use in uses
        if use.is_unused(trains=False) and use.known.effect is not Effect.OWN and use.where.path not in reported
    ]
    if not unread:
        return
    sections = Counter(use.section or "top level" for use in unread)
    listed = ", ".join(f"{name} {count}" for name, count in sections.most_common(MAX_NAMES))
    slips = [f"{use.where.key_path} ({use.hint})" for use in unread if use.hint][:3]
    root.findings.note(
        "RST-T042",
        root.where(),
        f"only places, for it has no section train: {counted(len(unread), 'key')} about training "
        f"{'is' if len(unread) == 1 else 'are'} not used ({listed})" + "".join(f"; unknown: {slip}" for slip in slips),
        fix=_explain(root),
    )


def _warn_unknown(uses: Iterable[KeyUse], notation: Notation, findings: Findings) -> None:
    for use in uses:
        if use.known.effect is Effect.UNKNOWN:
            what = "is not a key Roost knows"
            why = use.hint or f"{notation.program} does not know it either"
            findings.warn("RST-C023", use.where, what, why, "correct the key" if use.hint else "remove it")


def _warn_unfollowed(uses: Iterable[KeyUse], root: Section) -> None:
    """One warning for the keys of a section that are not followed for the same reason."""
    groups: dict[tuple[str, str], list[KeyUse]] = {}
    for use in uses:
        if use.known.effect is Effect.TRAINING and use.is_set and not use.places:
            groups.setdefault((use.section, use.known.reason), []).append(use)
    for (section, reason), group in groups.items():
        if len(group) == 1:
            what, where = "is not followed", group[0].where
        else:
            names = _names(group)
            what = f"{names} {'are' if ', ' in names else 'is'} not followed"
            where = root.where(*([section] if section else []))
        root.findings.warn("RST-T014", where, what, reason, group[0].known.instead)


def _note_unused(uses: Iterable[KeyUse], root: Section) -> None:
    """One note for each section."""
    groups: dict[str, list[KeyUse]] = {}
    for use in uses:
        if use.known.effect in QUIET and use.is_set and not use.places:
            groups.setdefault(use.section, []).append(use)
    for section, group in groups.items():
        parts = []
        for effect in QUIET:
            same = [use for use in group if use.known.effect is effect]
            parts += [f"{_names(same)} ({effect.value})"] if same else []
        what = f"{counted(len(group), 'key')} not used: {', '.join(parts)}"
        root.findings.note("RST-T041", root.where(*([section] if section else [])), what, fix=_explain(root))


def _names(uses: Sequence[KeyUse]) -> str:
    """The keys within their section; many of them by their last names only, each once."""
    names = [use.name if len(uses) <= FEW else use.name.rpartition(".")[2] for use in uses]
    names = list(dict.fromkeys(names))
    listed = ", ".join(names[:MAX_NAMES])
    return f"{listed} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else listed


def _explain(root: Section) -> str:
    return f"roost explain {root.source.file or 'CONFIG'} keys gives the reason for each"
