"""Going through the keys of a config: each is followed, not followed for a reason, the user's own, or unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roost.config.findings import did_you_mean
from roost.config.job import Notation
from roost.config.known_keys.tables import Effect, KeyUse, Known
from roost.config.known_keys.tree import OWNED, ROLE, Node, known_tree
from roost.config.notations.roll import NESTED_ROLES, USUAL_ROLES, holds_role
from roost.config.section import NEAR_MISS, Section

MAX_HINTS = 50  # unknown keys that are compared with the known ones
LIKELY = 0.75  # how alike a key of an owned section must be to a known one to be a slip of it
UNKNOWN = Known(Effect.UNKNOWN, "no program reads it")
OWN = Known(Effect.OWN, "no program reads it; other keys may refer to it")
Path = tuple[str, ...]
Nodes = tuple[Node, ...]


def key_uses(root: Section, notation: Notation) -> tuple[KeyUse, ...]:
    """Every key of the config, in the order written; a subtree with one reason is one entry."""
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
            elif value is not None:  # a section that holds a single value
                yield KeyUse(self.root.source.where(here), UNKNOWN)

    def _is_role(self, path: Path, value: Any) -> bool:
        if self.notation is not Notation.ROLL:
            return False
        if len(path) == 1:
            is_usual = path[0] in (*USUAL_ROLES, "validation") and path[0] not in NESTED_ROLES
            return is_usual or holds_role(value)
        return len(path) == 2 and path[0] in NESTED_ROLES and (path[0] == "rewards" or holds_role(value))

    def _unlisted(self, path: Path, value: Any, nodes: Nodes, opened: Known | None) -> KeyUse:
        """A key that no table has: a slip, part of an open section, unknown in an owned one, or the user's own."""
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
