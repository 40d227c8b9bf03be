"""Explanations of finding codes, loaded only when they are shown: planning needs the codes alone."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PREFIX = "RST-"
# Areas by the letter of a code.
AREAS = {
    "C": "config files",
    "N": "notations",
    "T": "training settings",
    "H": "machines and hardware",
    "P": "placement",
    "M": "memory",
    "E": "engines and models",
    "R": "live cluster",
    "A": "tasks, agents and rewards",
    "L": "launch",
}


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of mistake: its code, a title, what it means with the usual fix, and an example with its message."""

    code: str
    title: str
    explanation: str
    example: str

    @property
    def area(self) -> str:
        return AREAS[self.code.removeprefix(PREFIX)[0]]


@cache
def finding_kinds() -> dict[str, FindingKind]:
    """Every kind of finding by its code.

    >>> finding_kinds()["RST-P007"].title
    'A rank is out of range'
    """
    texts = tomllib.loads(_text("finding_codes.toml"))
    examples = json.loads(_text("finding_examples.json"))
    return {
        code: FindingKind(code, part["title"], " ".join(part["explanation"].split()), examples.get(code, ""))
        for code, part in texts.items()
    }


def spelled_code(word: str) -> str:
    """A code in its registered spelling, from what a user types.

    >>> spelled_code("p007"), spelled_code("rst-p007")
    ('RST-P007', 'RST-P007')
    """
    return PREFIX + word.strip().upper().removeprefix(PREFIX)


def _text(name: str) -> str:
    return (files("roost.config") / name).read_text(encoding="utf-8")
