"""Random Sokoban rooms that can be solved."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Cell = tuple[int, int]
SIDES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
# What a step of the walk makes floor, around its position.
SHAPES: tuple[tuple[Cell, ...], ...] = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
NEW_DIRECTION = 0.35
WALK = 1.7  # steps per row and column
MOST_STATES = 4000  # looked at when a room is played backwards
MOST_ROOMS = 1000  # tried before a size is given up
WANDER, WANDER_CLOSE, WANDER_ON, MOST_WANDERED = 0.5, 0.8, 0.5, 3


@dataclass(frozen=True, slots=True)
class Room:
    """A room at its start."""

    floor: frozenset[Cell]
    targets: tuple[Cell, ...]
    boxes: tuple[Cell, ...]
    player: Cell


@lru_cache(maxsize=512)  # the episodes of a group have one seed
def make_room(size: Cell, num_boxes: int, search_depth: int, seed: int | None) -> Room:
    """Return the room of a seed: carved by a random walk, then played backwards from its solution.

    No box starts on a target. The boxes are as far from their targets as `search_depth` backward moves bring them, and
    at times the player wanders off.

    >>> make_room((6, 6), 1, 30, seed=7) == make_room((6, 6), 1, 30, seed=7) != make_room((6, 6), 1, 30, seed=8)
    True
    """
    if min(size) < 4 or num_boxes < 1:
        raise ValueError(f"a room is at least 4 by 4 with 1 box, not {size[0]} by {size[1]} with {num_boxes}")
    random = np.random.default_rng(seed)
    for _ in range(MOST_ROOMS):
        floor = _carved(size, random)
        if len(floor) <= num_boxes + 1:
            continue
        player, *targets = random.permutation(sorted(floor))[: num_boxes + 1].tolist()
        found = _played_back(floor, tuple(map(_cell, targets)), _cell(player), search_depth)
        if found is not None:
            return _wandered(found, random)
    raise ValueError(f"no room of {size[0]} by {size[1]} holds {num_boxes} boxes; make it larger, or write fewer boxes")


def _cell(pair: list[int]) -> Cell:
    return pair[0], pair[1]


def _carved(size: Cell, random: np.random.Generator) -> frozenset[Cell]:
    """Floor inside the outer walls."""
    height, width = size
    at = [int(random.integers(1, height - 1)), int(random.integers(1, width - 1))]
    direction = SIDES[random.integers(4)]
    floor: set[Cell] = set()
    for _ in range(int(WALK * (height + width))):
        if random.random() < NEW_DIRECTION:
            direction = SIDES[random.integers(4)]
        at = [min(max(at[0] + direction[0], 1), height - 2), min(max(at[1] + direction[1], 1), width - 2)]
        floor |= {(at[0] + row, at[1] + column) for row, column in SHAPES[random.integers(len(SHAPES))]}
    return frozenset(cell for cell in floor if 0 < cell[0] < height - 1 and 0 < cell[1] < width - 1)


def _played_back(floor: frozenset[Cell], targets: tuple[Cell, ...], player: Cell, depth: int) -> Room | None:
    """Pull the boxes off their targets, breadth first; the room whose boxes are farthest away, None if none moved."""
    queue = deque([(player, targets, 0)])
    seen = {(player, frozenset(targets))}
    best, farthest = None, 0
    while queue:
        player, boxes, moves = queue.popleft()
        distance = 0 if set(boxes) & set(targets) else _displacement(boxes, targets)
        if distance > farthest:
            best, farthest = Room(floor, targets, boxes, player), distance
        if moves == depth or len(seen) >= MOST_STATES:
            continue
        for row, column in SIDES:
            to, behind = (player[0] + row, player[1] + column), (player[0] - row, player[1] - column)
            if to not in floor or to in boxes:
                continue
            pulled = tuple(player if box == behind else box for box in boxes)
            for after in dict.fromkeys((boxes, pulled)):
                state = (to, frozenset(after))
                if state not in seen:
                    seen.add(state)
                    queue.append((to, after, moves + 1))
    return best


def _displacement(boxes: tuple[Cell, ...], targets: tuple[Cell, ...]) -> int:
    pairs = zip(boxes, targets, strict=True)
    return sum(abs(box[0] - target[0]) + abs(box[1] - target[1]) for box, target in pairs)


def _wandered(room: Room, random: np.random.Generator) -> Room:
    """Move the player by up to three cells, so that it does not always start beside a box."""
    chance = WANDER_CLOSE if _displacement(room.boxes, room.targets) == 1 else WANDER
    player, visited = room.player, {room.player}
    for _ in range(MOST_WANDERED):
        if random.random() >= chance:
            break
        near = [(player[0] + row, player[1] + column) for row, column in SIDES]
        free = [cell for cell in near if cell in room.floor and cell not in room.boxes and cell not in visited]
        if not free:
            break
        player = free[random.integers(len(free))]
        visited.add(player)
        chance = WANDER_ON
    return Room(room.floor, room.targets, room.boxes, player)
