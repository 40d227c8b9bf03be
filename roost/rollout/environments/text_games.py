"""Games on a grid as text: FrozenLake and Sokoban by ROLL's rules, and the tasks that start them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Split, Task
from roost.rollout.order import sample_seed

Cell = tuple[int, int]
SIDES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
# Cells that a step of the random walk turns into floor, relative to its position.
SHAPES: tuple[tuple[Cell, ...], ...] = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
NEW_DIRECTION = 0.35  # probability that a step of the walk turns
WALK = 1.7  # steps per row and column
MAX_STATES = 4000  # searched when a room is played backwards
MAX_ROOMS = 1000  # attempts to make a room
# Probability of the player's first step; the same if the box is beside its target; probability of each further step.
WANDER, WANDER_CLOSE, WANDER_ON, MAX_WANDER = 0.5, 0.8, 0.5, 3


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

    No box starts on a target. The boxes are as far from their targets as `search_depth` backward moves bring them; then
    the player may walk a few steps.

    >>> make_room((6, 6), 1, 30, seed=7) == make_room((6, 6), 1, 30, seed=7) != make_room((6, 6), 1, 30, seed=8)
    True
    """
    if min(size) < 4 or num_boxes < 1:
        raise ValueError(f"a room is at least 4 by 4 with 1 box, not {size[0]} by {size[1]} with {num_boxes}")
    random = np.random.default_rng(seed)
    for _ in range(MAX_ROOMS):
        floor = _carve(size, random)
        if len(floor) <= num_boxes + 1:
            continue
        player, *targets = random.permutation(sorted(floor))[: num_boxes + 1].tolist()
        found = _play_backwards(floor, tuple(map(_cell, targets)), _cell(player), search_depth)
        if found is not None:
            return _wander(found, random)
    raise ValueError(f"no room of {size[0]} by {size[1]} holds {num_boxes} boxes; make it larger, or write fewer boxes")


def _cell(pair: list[int]) -> Cell:
    return pair[0], pair[1]


def _carve(size: Cell, random: np.random.Generator) -> frozenset[Cell]:
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


def _play_backwards(floor: frozenset[Cell], targets: tuple[Cell, ...], player: Cell, depth: int) -> Room | None:
    """Pull the boxes off their targets, breadth first; return the room with the farthest boxes, None if none moved."""
    queue = deque([(player, targets, 0)])
    seen = {(player, frozenset(targets))}
    best, farthest = None, 0
    while queue:
        player, boxes, moves = queue.popleft()
        distance = 0 if set(boxes) & set(targets) else _displacement(boxes, targets)
        if distance > farthest:
            best, farthest = Room(floor, targets, boxes, player), distance
        if moves == depth or len(seen) >= MAX_STATES:
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


def _wander(room: Room, random: np.random.Generator) -> Room:
    """Move the player by up to three cells, so that it does not always start beside a box."""
    chance = WANDER_CLOSE if _displacement(room.boxes, room.targets) == 1 else WANDER
    player, visited = room.player, {room.player}
    for _ in range(MAX_WANDER):
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


ANSWER = "<answer>(.*?)</answer>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")


class TextGame(ABC):
    """One episode of a game whose states and actions are text.

    The first match of `action_pattern` names the action by its last group; anything else is invalid: nothing moves, and
    the reward is `format_penalty`. `env_instruction` replaces the rules, `grid_lookup` the symbols by their numbers,
    `grid_vocab` their meanings, `action_lookup` the names of the actions by their numbers.
    """

    rules: ClassVar[str]
    symbols: ClassVar[Mapping[int, tuple[str, str]]]  # symbol and meaning
    actions: ClassVar[Mapping[int, str]]

    def __init__(
        self,
        *,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = ANSWER,
        special_token_list: Sequence[str] | None = CHAT_TOKENS,
        grid_lookup: Mapping[int, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        action_lookup: Mapping[int, str] | None = None,
    ) -> None:
        self._rules, self._format_penalty = env_instruction or self.rules, float(format_penalty)
        self._pattern, self._special = re.compile(action_pattern, re.DOTALL), tuple(special_token_list or ())
        self._lookup = dict(grid_lookup or {number: symbol for number, (symbol, _) in self.symbols.items()})
        self._vocab = dict(grid_vocab or dict(self.symbols.values()))
        self._names = dict(action_lookup or self.actions)
        self._steps, self._valid, self._effective, self._total = 0, 0, 0, 0.0

    @property
    def instruction(self) -> str:
        """Rules, symbols and actions, for the policy's first prompt."""
        meanings = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in self._vocab.items())
        return f"{self._rules}\nSymbols of the map:\n{meanings}\nYour available actions are:\n" + ", ".join(
            self._names.values()
        )

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        self._start(seed)
        return Observation(self._map(), info={"env_instruction": self.instruction})

    async def step(self, action: Any) -> Observation:
        self._steps += 1
        written = self._parsed(str(action))
        number = next((key for key, name in self._names.items() if name.lower() == written.lower()), None)
        before = self._player
        reward, is_over = self._act(number)
        if number is None:
            reward, is_over = reward + self._format_penalty, False
        self._total += reward
        self._valid += number is not None
        self._effective += number is not None and self._player != before
        info = {"action": written or str(action), "is_valid": number is not None, "metrics": self._metrics()}
        return Observation(self._map(), reward, is_over, info, is_truncated=is_over and not self._is_decided())

    async def score(self) -> float:
        """Sum of the rewards."""
        return self._total

    def _parsed(self, text: str) -> str:
        for token in self._special:
            text = text.replace(token, "")
        found = self._pattern.search(text.strip())
        return (found[min(2, self._pattern.groups)] or "").strip() if found else ""

    def _metrics(self) -> dict[str, float]:
        """Metrics of the episode so far."""
        return {
            "success": float(self._is_won()),
            "valid_actions": self._valid / self._steps,
            "effective_actions": self._effective / self._steps,
        }

    def _map(self) -> str:
        return "\n".join("".join(self._lookup.get(cell, "?") for cell in row) for row in self._cells())

    _player: Any

    @abstractmethod
    def _start(self, seed: int | None) -> None:
        """Make the map; equal seeds give equal maps."""

    @abstractmethod
    def _act(self, action: int | None) -> tuple[float, bool]:
        """Take an action, None for an invalid one; return the reward and whether the game is over."""

    @abstractmethod
    def _cells(self) -> list[list[int]]:
        """The map as keys of `symbols`."""

    @abstractmethod
    def _is_won(self) -> bool: ...

    def _is_decided(self) -> bool:
        """Return False if only a limit ended a game that is over."""
        return True


LEFT, DOWN, RIGHT, UP = range(4)
FROZEN, HOLE = True, False


class FrozenLake(TextGame):
    """Walk over ice to the goal without falling into a hole.

    Reaching the goal gives 1, everything else 0. Each of `size` x `size` cells is frozen with probability `p`; start
    and goal are random, and there is a path between them. On slippery ice the player moves in the direction asked for
    or at right angles to it, each with probability 1/3.
    """

    rules = (
        "You walk on a frozen lake. Reach the goal and stay out of the holes. If the ice is slippery, you may move in "
        "another direction than you wanted. Answer with one action in each turn, such as <answer>Right</answer>."
    )
    symbols: ClassVar = {
        0: ("P", "player"),
        1: ("_", "empty"),
        2: ("O", "hole"),
        3: ("G", "goal"),
        4: ("X", "player in hole"),
        5: ("√", "player on goal"),
    }
    actions: ClassVar = {LEFT: "Left", DOWN: "Down", RIGHT: "Right", UP: "Up"}

    def __init__(
        self,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        max_steps: int | None = None,
        map_seed: int | None = None,
        **keys: Any,
    ) -> None:
        """`max_steps` and `map_seed` have no effect, as in ROLL: agents count turns, and episodes have seeds."""
        super().__init__(**keys)
        if size < 2 or not 0 < p <= 1:
            raise ValueError(f"a lake has a size of at least 2 and p above 0 and at most 1, not size {size} and p {p}")
        self._size, self._p, self._is_slippery = size, p, is_slippery

    def _start(self, seed: int | None) -> None:
        self._random = np.random.default_rng(seed)
        while True:
            ice = (self._random.random((self._size, self._size)) < self._p).tolist()
            start, goal = self._random.choice(self._size**2, 2, replace=False).tolist()
            self._player, self._goal = divmod(start, self._size), divmod(goal, self._size)
            for row, column in (self._player, self._goal):
                ice[row][column] = FROZEN
            self._ice = ice
            if self._goal in self._reachable():
                return

    def _act(self, action: int | None) -> tuple[float, bool]:
        if action is None:
            return 0.0, False
        turn = int(self._random.integers(-1, 2)) if self._is_slippery else 0
        self._player = self._next_to(self._player, (action + turn) % 4)
        return float(self._is_won()), self._is_won() or not self._is_frozen(self._player)

    def _next_to(self, cell: Cell, direction: int) -> Cell:
        row, column = cell
        moved = {LEFT: (row, column - 1), DOWN: (row + 1, column), RIGHT: (row, column + 1), UP: (row - 1, column)}
        return moved[direction] if all(0 <= at < self._size for at in moved[direction]) else cell

    def _reachable(self) -> set[Cell]:
        """Cells that can be reached over ice."""
        found, border = {self._player}, [self._player]
        while border:
            cell = border.pop()
            new = {self._next_to(cell, direction) for direction in range(4)} - found
            border += (new := {each for each in new if self._is_frozen(each)})
            found |= new
        return found

    def _is_frozen(self, cell: Cell) -> bool:
        return bool(self._ice[cell[0]][cell[1]])

    def _cells(self) -> list[list[int]]:
        cells = [[1 if is_frozen else 2 for is_frozen in row] for row in self._ice]
        cells[self._goal[0]][self._goal[1]] = 3
        cells[self._player[0]][self._player[1]] = 5 if self._is_won() else 0 if self._is_frozen(self._player) else 4
        return cells

    def _is_won(self) -> bool:
        return bool(self._player == self._goal)


PUSHES: Mapping[int, Cell] = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}
STEP, ON_TARGET, SOLVED = -0.1, 1.0, 10.0  # rewards


class Sokoban(TextGame):
    """Push all boxes onto targets.

    Every step costs 0.1; a box pushed onto a target gives 1, one pushed off it -1, and the last one 10 more. Rooms of
    `dim_room` are solvable: they are made by at most `search_depth` moves backwards from a solution. After `max_steps`
    steps the next valid action ends the game.
    """

    rules = (
        "You solve a Sokoban puzzle. Push every box onto a target. You push a box by walking into it; you cannot pull "
        "boxes, nor push one into a wall or another box. Answer with one action in each turn, such as "
        "<answer>Right</answer>."
    )
    symbols: ClassVar = {
        0: ("#", "wall"),
        1: ("_", "empty"),
        2: ("O", "target"),
        3: ("√", "box on target"),
        4: ("X", "box"),
        5: ("P", "player"),
        6: ("S", "player on target"),
    }
    actions: ClassVar = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}

    def __init__(
        self,
        dim_room: Sequence[int] = (10, 10),
        num_boxes: int = 4,
        max_steps: int = 20,
        search_depth: int = 300,
        **keys: Any,
    ) -> None:
        super().__init__(**keys)
        height, width = dim_room
        self._size, self._num_boxes = (int(height), int(width)), num_boxes
        self._max_steps, self._search_depth = max_steps, search_depth

    def _start(self, seed: int | None) -> None:
        room = make_room(self._size, self._num_boxes, self._search_depth, seed)
        self._floor, self._targets = room.floor, frozenset(room.targets)
        self._boxes, self._player = set(room.boxes), room.player

    def _act(self, action: int | None) -> tuple[float, bool]:
        before = len(self._boxes & self._targets)
        if action is not None:
            self._push(PUSHES[action])
        moved = len(self._boxes & self._targets) - before
        reward = STEP + moved * ON_TARGET + (SOLVED if self._is_won() else 0.0)
        return reward, self._is_won() or self._steps >= self._max_steps

    def _push(self, by: Cell) -> None:
        to = (self._player[0] + by[0], self._player[1] + by[1])
        behind = (to[0] + by[0], to[1] + by[1])
        if to in self._boxes and behind in self._floor and behind not in self._boxes:
            self._boxes = (self._boxes - {to}) | {behind}
        if to in self._floor and to not in self._boxes:
            self._player = to

    def _cells(self) -> list[list[int]]:
        return [[self._number((row, column)) for column in range(self._size[1])] for row in range(self._size[0])]

    def _number(self, cell: Cell) -> int:
        is_target = cell in self._targets
        if cell == self._player:
            return 6 if is_target else 5
        if cell in self._boxes:
            return 3 if is_target else 4
        return 2 if is_target else int(cell in self._floor)

    def _is_won(self) -> bool:
        return self._boxes == self._targets

    def _is_decided(self) -> bool:
        return self._is_won()


GAMES: Mapping[str, type[TextGame]] = {"frozen_lake": FrozenLake, "sokoban": Sokoban}


class TextGames:
    """Environments of several games: `games` maps the tag of a task to `env_type` and the arguments of that game."""

    def __init__(self, games: Mapping[str, Mapping[str, Any]]) -> None:
        self._games = {tag: dict(keys) for tag, keys in games.items()}
        for tag in self._games:
            self.new_game(tag)  # wrong arguments are reported before the first episode

    def new_game(self, tag: str) -> TextGame:
        """Return a new game for the tasks of a tag."""
        if tag not in self._games:
            raise ValueError(f"there is no game for the tag {tag!r}; there are {', '.join(self._games)}")
        keys = dict(self._games[tag])
        env_type = keys.pop("env_type", None)
        if env_type not in GAMES:
            raise ValueError(f"{tag} has env_type {env_type}; there are {', '.join(GAMES)}")
        return GAMES[env_type](**keys)

    async def open(self) -> TaggedGame:
        return TaggedGame(self)

    async def close(self) -> None:
        pass


class TaggedGame:
    """The environment of one episode: the game that the tag of its task names."""

    def __init__(self, games: TextGames) -> None:
        self._games = games
        self._game: TextGame

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        self._game = self._games.new_game(task.tag)
        return await self._game.reset(task, seed)

    async def step(self, action: Any) -> Observation:
        return await self._game.step(action)

    async def score(self) -> float:
        return await self._game.score()

    async def close(self) -> None:
        pass


ENDLESS = 2**20  # at least this many training tasks, each with its own map


class GameTasks:
    """Tasks that are seeds of games.

    `train` and `evaluation` map each tag to its number of groups; tags alternate in these proportions. Every training
    task has a new map; evaluations always have the same maps, from other seeds.

    >>> tasks = GameTasks({"FrozenLake": 2, "SimpleSokoban": 1}, {"FrozenLake": 4})
    >>> [tasks.task(Split.TRAIN, index).tag for index in range(4)]
    ['FrozenLake', 'FrozenLake', 'SimpleSokoban', 'FrozenLake']
    >>> tasks.size(Split.EVALUATION), tasks.task(Split.EVALUATION, 1) == tasks.task(Split.EVALUATION, 1)
    (4, True)
    """

    def __init__(self, train: Mapping[str, int], evaluation: Mapping[str, int] | None = None, seed: int = 0) -> None:
        self._seed = seed
        groups = {Split.TRAIN: train, Split.EVALUATION: train if evaluation is None else evaluation}
        self._tags = {
            split: [tag for tag, count in each.items() for _ in range(count)] for split, each in groups.items()
        }
        if not self._tags[Split.TRAIN]:
            raise ValueError("train names no groups; write the number of groups of each tag")

    def size(self, split: Split) -> int:
        count = len(self._tags[split])
        return count if split is Split.EVALUATION else count * -(-ENDLESS // count)

    def task(self, split: Split, index: int) -> Task:
        tags = self._tags[split]
        tag, seed = tags[index % len(tags)], sample_seed(self._seed, split is Split.EVALUATION, index)
        return Task(f"{tag} {seed}", {"seed": seed}, tag)
