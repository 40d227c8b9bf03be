"""How each component is told apart in a picture: a colour, and a short name for those who do not see colours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Okabe and Ito's colours (2008) stay apart under the common kinds of colour blindness; the tones after them repeat the
# hues, which the short names tell apart.
COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#d55e00", "#f0e442", "#8a8f98",
    "#7fb8d8", "#8a5f00", "#7fceb9", "#1f6a9a", "#7a3f62", "#f0a67a", "#7d7600", "#4b5058",
)  # fmt: skip
# The usual components look the same in every plan.
USUAL = {"actor": 0, "rollout": 1, "inference": 2, "env": 3, "reward": 4, "critic": 5, "agent": 6, "reference": 7}
INK, PAPER = "#14171c", "#ffffff"


@dataclass(frozen=True, slots=True)
class Mark:
    """The colour of a component, the colour of text on it, and a short name that no other component has."""

    component: str
    short: str
    colour: str
    ink: str


def marks(names: Sequence[str]) -> tuple[Mark, ...]:
    """One mark for each component, in the order given.

    >>> [(mark.component, mark.short) for mark in marks(["actor", "rollout", "reward", "agent", "reward.llm_judge"])]
    [('actor', 'A'), ('rollout', 'R'), ('reward', 'Re'), ('agent', 'Ag'), ('reward.llm_judge', 'Rl')]
    """
    taken: list[str] = []
    for name in names:
        taken.append(next(short for short in _short_names(name) if short not in taken))
    colours = _colours(names)
    return tuple(
        Mark(name, short, colour, ink_on(colour)) for name, short, colour in zip(names, taken, colours, strict=True)
    )


def _short_names(name: str) -> Iterator[str]:
    """Ever longer candidates; the last kind never ends."""
    words = re.findall(r"[^\W_]+", name) or ["?"]
    letters = "".join(words)
    first = letters[0].upper()
    yield first
    yield from (first + word[0].lower() for word in words[1:])
    yield from (first + letter.lower() for letter in letters[1:])
    number = 2
    while True:
        yield f"{first}{number}"
        number += 1


def _colours(names: Sequence[str]) -> list[str]:
    usual = {USUAL[name] for name in names if name in USUAL}
    free = [colour for number, colour in enumerate(COLOURS) if number not in usual]
    others = iter(range(len(names)))
    return [COLOURS[USUAL[name]] if name in USUAL else free[next(others) % len(free)] for name in names]


def ink_on(colour: str) -> str:
    """Dark or light text, whichever is read better on a colour (WCAG 2 contrast).

    >>> ink_on("#0072b2") == PAPER, ink_on("#f0e442") == INK
    (True, True)
    """
    lightness = _luminance(colour)
    dark, light = (lightness + 0.05) / (_luminance(INK) + 0.05), 1.05 / (lightness + 0.05)
    # Dark text is favoured a little: at small sizes it is read better than the formula says.
    return INK if dark * 1.05 >= light else PAPER


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
