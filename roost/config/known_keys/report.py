"""Match the keys of a config with the known ones, and report those that are not followed.

A key is followed, not followed for a reason, the user's own, or unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from roost.config.findings import Findings, counted, did_you_mean
from roost.config.job import Notation
from roost.config.known_keys import loop, rlinf, roll
from roost.config.known_keys.tables import Effect, Entry, KeyUse, Known, with_reported_reasons
from roost.config.notations.dialects import DERIVED_FROM, UNLIKE
from roost.config.notations.roll import NESTED_ROLES, USUAL_ROLES, holds_role
from roost.config.source import NEAR_MISS, Section
from roost.config.train import SETTINGS

QUIET = (Effect.BACKEND, Effect.SPEED, Effect.FILES, Effect.NOTHING)
HARMLESS = Known(Effect.NOTHING, "it has no effect with this value, or with the other settings")
MAX_NAMES = 12  # keys in one finding
FEW = 4  # so many keys are written with their whole path


def report_keys(uses: Sequence[KeyUse], root: Section, notation: Notation) -> tuple[KeyUse, ...]:
    """Report the keys of a config that trains; return the keys with their final reasons.

    Keys that have a finding already are left out: they are wrong, or `warn_unlike` has warned of them.
    """
    reported = {finding.where.path for finding in root.findings.collected}
    # `warn_unlike` has checked these keys and found their values harmless.
    harmless = {tuple(unlike.path.split(".")) for unlike in UNLIKE[notation]} - reported
    explained = tuple(
        replace(use, known=HARMLESS, is_set=False)
        if use.where.path in harmless and use.known.effect is Effect.TRAINING
        else use
        for use in with_reported_reasons(uses, root.findings)
    )
    unreported = [use for use in explained if use.where.path not in reported]
    _warn_unknown(unreported, notation, root.findings)
    _warn_unfollowed(unreported, root)
    _note_unused(unreported, root)
    return explained


def report_unread(uses: Sequence[KeyUse], root: Section) -> None:
    """Write one note about all training keys of a config that only places."""
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
        f"has no section train, so it is only placed: {counted(len(unread), 'key')} about training "
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
    """Warn once of all keys of a section that are not followed for the same reason."""
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
    """Write one note for each section with keys that are not used."""
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
    """The keys within their section; if there are many, by the last part of their path, each once."""
    names = [use.name if len(uses) <= FEW else use.name.rpartition(".")[2] for use in uses]
    names = list(dict.fromkeys(names))
    listed = ", ".join(names[:MAX_NAMES])
    return f"{listed} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else listed


def _explain(root: Section) -> str:
    return f"roost explain {root.source.file or 'CONFIG'} keys gives the reason for each"


ROLE = "ROLE"  # the child of the root for every role of ROLL
TABLES: dict[Notation, tuple[Entry, ...]] = {
    Notation.RLINF: rlinf.TABLE,
    Notation.ROLL: roll.TABLE,
    Notation.LOOP: loop.TABLE,
}
OWNED = {Notation.RLINF: rlinf.OWNED, Notation.ROLL: roll.OWNED, Notation.LOOP: loop.OWNED}


@dataclass(slots=True)
class Node:
    """One key of the tree. An open node also matches everything below it that is not listed."""

    known: Known | None = None
    is_open: bool = False
    places: bool = False
    children: dict[str, Node] = field(default_factory=dict)

    def matching(self, name: str) -> list[Node]:
        """The children that match a key, the exact one first."""
        exact = self.children.get(name)
        wild = [node for key, node in self.children.items() if "*" in key and fnmatchcase(name, key)]
        return [exact, *wild] if exact is not None else wild


@cache
def known_tree(notation: Notation) -> Node:
    """The tree of a notation's known keys; it is shared, so do not change it."""
    root = Node()
    for name, setting in SETTINGS.items():
        for path in setting.native(notation):
            _at(root, ".".join(path)).known = Known(Effect.FOLLOWED, f"{name} in train")
    for name, paths in DERIVED_FROM[notation].items():
        for written in paths:
            _at(root, written).known = Known(Effect.FOLLOWED, f"{name} in train")
    for unlike in UNLIKE[notation]:
        node = _at(root, unlike.path)
        node.known = node.known or Known(Effect.TRAINING, "Roost has nothing for it", unlike.instead)
    for entry in TABLES[notation]:
        for pattern in entry.patterns():
            node = _at(root, pattern.removesuffix(".**"))
            node.known = node.known or entry.known
            node.is_open = node.is_open or pattern.endswith(".**")
            node.places = node.places or entry.known.effect is Effect.PLACING
    return root


def _at(root: Node, path: str) -> Node:
    node = root
    for part in path.split("."):
        node = node.children.setdefault(part, Node())
    return node


MAX_HINTS = 50  # unknown keys that are compared with the known ones, which is slow
LIKELY = 0.75  # similarity at which a key of an owned section counts as a misspelling of a known one
UNKNOWN = Known(Effect.UNKNOWN, "no program reads it")
OWN = Known(Effect.OWN, "no program reads it; other keys may refer to it")
Path = tuple[str, ...]
Nodes = tuple[Node, ...]


def key_uses(root: Section, notation: Notation) -> tuple[KeyUse, ...]:
    """Every key of the config in its order; a subtree with one reason is one entry."""
    walk = _Walk(root, notation)
    return tuple(walk.below(root.values, (known_tree(notation),), ()))


class _Walk:
    def __init__(self, root: Section, notation: Notation) -> None:
        self.root, self.notation = root, notation
        self.hints = 0

    def below(
        self, values: Mapping[Any, Any], nodes: Nodes, path: Path, opened: Known | None = None
    ) -> Iterator[KeyUse]:
        opened = next((node.known for node in nodes if node.is_open and node.known), opened)
        for key, value in values.items():
            name, here = str(key), (*path, str(key))
            found = tuple(child for node in nodes for child in node.matching(name))
            if self._is_role(here, value):
                found = (*found, known_tree(self.notation).children[ROLE])
            if isinstance(value, Mapping) and any(child.children for child in found):
                yield from self.below(value, found, here, opened)
                continue
            known = next((child.known for child in found if child.known is not None), None)
            if known is not None:
                places = any(child.places for child in found)
                yield KeyUse(self.root.source.where(here), known, places, known.counts(value))
            elif not found:
                yield self._unlisted(here, value, nodes, opened)
            elif value is not None:  # a single value where a section belongs
                yield KeyUse(self.root.source.where(here), UNKNOWN)

    def _is_role(self, path: Path, value: Any) -> bool:
        if self.notation is not Notation.ROLL:
            return False
        if len(path) == 1:
            is_usual = path[0] in (*USUAL_ROLES, "validation") and path[0] not in NESTED_ROLES
            return is_usual or holds_role(value)
        return len(path) == 2 and path[0] in NESTED_ROLES and (path[0] == "rewards" or holds_role(value))

    def _unlisted(self, path: Path, value: Any, nodes: Nodes, opened: Known | None) -> KeyUse:
        """A key that no table has: misspelt, part of an open section, unknown in an owned one, or the user's own."""
        is_owned = opened is None and self._is_owned(path)
        hint = self._hint(path[-1], nodes, LIKELY if is_owned and len(path) > 1 else NEAR_MISS)
        where = self.root.source.where(path)
        if opened is not None and not hint:
            return KeyUse(where, opened, is_set=opened.counts(value))
        return KeyUse(where, UNKNOWN if hint or (is_owned and len(path) > 1) else OWN, hint=hint)

    def _is_owned(self, path: Path) -> bool:
        owned = OWNED[self.notation]
        return (path[0] if len(path) > 1 else "") in owned or (ROLE in owned and self._is_role(path[:1], {}))

    def _hint(self, name: str, nodes: Nodes, cutoff: float) -> str:
        if self.hints >= MAX_HINTS:
            return ""
        self.hints += 1
        known = {key for node in nodes for key in node.children if "*" not in key and key != ROLE}
        return did_you_mean(name, sorted(known), cutoff) if known else ""
