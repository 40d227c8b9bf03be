"""All keys that a notation knows, as one tree: followed keys from the readers' own tables, the others with reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache

from roost.config.job import Notation
from roost.config.known_keys import loop, rlinf, roll
from roost.config.known_keys.tables import Effect, Entry, Known
from roost.config.notations.dialects import DERIVED_FROM, UNLIKE
from roost.config.train import SETTINGS

ROLE = "ROLE"  # the child of the root that stands for every role of ROLL's
TABLES: dict[Notation, tuple[Entry, ...]] = {
    Notation.RLINF: rlinf.TABLE,
    Notation.ROLL: roll.TABLE,
    Notation.LOOP: loop.TABLE,
}
OWNED = {Notation.RLINF: rlinf.OWNED, Notation.ROLL: roll.OWNED, Notation.LOOP: loop.OWNED}


@dataclass(slots=True)
class Node:
    """One key of the tree. An open node stands for everything below it that is not listed."""

    known: Known | None = None
    is_open: bool = False
    places: bool = False
    children: dict[str, Node] = field(default_factory=dict)

    def matching(self, name: str) -> list[Node]:
        """The children that stand for a key, the most exact first."""
        exact = self.children.get(name)
        wild = [node for key, node in self.children.items() if "*" in key and fnmatchcase(name, key)]
        return [exact, *wild] if exact is not None else wild


@cache
def known_tree(notation: Notation) -> Node:
    """The tree of a notation; nobody changes it once it is built."""
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
