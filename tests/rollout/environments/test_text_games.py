from collections import Counter, deque

import pytest

from roost.rollout.environments.environment import Observation
from roost.rollout.environments.text_games import SIDES, FrozenLake, GameTasks, Room, Sokoban, TextGames, make_room
from roost.rollout.episode import Split, Task
from tests.rollout.script import ran

TASK = Task("game")
NAMES = {(-1, 0): "Up", (1, 0): "Down", (0, -1): "Left", (0, 1): "Right"}


def say(action):
    return f"I go. <answer> {action} </answer>"


def play(game, *actions, seed=0):
    """The first observation, and that after each action."""

    async def playing():
        return [await game.reset(TASK, seed), *[await game.step(action) for action in actions]]

    return ran(playing())


def lake(*rows, **keys):
    """A lake whose map is written; P is the start."""

    class Written(FrozenLake):
        def _start(self, seed):
            super()._start(seed)
            found = {
                symbol: (row, line.index(symbol)) for row, line in enumerate(rows) for symbol in "PG" if symbol in line
            }
            self._player, self._goal = found["P"], found["G"]
            self._ice = [[symbol != "O" for symbol in line] for line in rows]

    return Written(**{"size": len(rows), "is_slippery": False, **keys})


def room(*rows, **keys):
    """A room that is written, in Sokoban's symbols."""

    class Written(Sokoban):
        def _start(self, seed):
            cells = {(row, column): symbol for row, line in enumerate(rows) for column, symbol in enumerate(line)}
            self._floor = frozenset(cell for cell, symbol in cells.items() if symbol != "#")
            self._targets = frozenset(cell for cell, symbol in cells.items() if symbol in "O√S")
            self._boxes = {cell for cell, symbol in cells.items() if symbol in "X√"}
            self._player = next(cell for cell, symbol in cells.items() if symbol in "PS")

    return Written(**{"dim_room": (len(rows), len(rows[0])), "num_boxes": 1, **keys})


def test_frozen_lake_is_a_map_of_symbols_and_the_goal_is_worth_one():
    first, down, right = play(lake("P_", "OG"), say("right"), say("DOWN"))
    assert first.content == "P_\nOG"
    assert first.info["env_instruction"].endswith("Your available actions are:\nLeft, Down, Right, Up")
    assert (down.content, down.reward, down.is_over) == ("_P\nOG", 0.0, False)
    assert (right.content, right.reward, right.is_over) == ("__\nO√", 1.0, True)
    assert right.info["metrics"] == {"success": 1.0, "valid_actions": 1.0, "effective_actions": 1.0}


def test_a_hole_ends_the_game_without_a_reward():
    game = lake("P_", "OG")
    fallen = play(game, say("Down"))[-1]
    assert (fallen.content, fallen.reward, fallen.is_over, fallen.is_truncated) == ("__\nXG", 0.0, True, False)
    assert ran(game.score()) == 0.0
    assert fallen.info["metrics"]["success"] == 0.0


def test_walking_into_the_edge_is_valid_and_does_nothing():
    seen = play(lake("P_", "OG"), say("Up"))[-1]
    assert (seen.content, seen.info["is_valid"]) == ("P_\nOG", True)
    assert seen.info["metrics"] == {"success": 0.0, "valid_actions": 1.0, "effective_actions": 0.0}


@pytest.mark.parametrize(
    "reported", ["Right", say("Jump"), "<answer>Right", ""], ids=["no tags", "unknown", "open", "empty"]
)
def test_an_invalid_answer_costs_the_penalty_and_moves_nothing(reported):
    seen = play(lake("P_", "OG", format_penalty=-0.01), reported)[-1]
    assert (seen.content, seen.reward, seen.is_over) == ("P_\nOG", -0.01, False)
    assert not seen.info["is_valid"]


def test_the_first_match_of_the_pattern_counts_and_special_tokens_do_not():
    thinking = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
    reported = "<think>Left?\n</think> <answer>Right<|im_end|></answer> <answer>Left</answer>"
    seen = play(lake("P_", "OG", action_pattern=thinking), reported)[-1]
    assert (seen.content, seen.info["action"]) == ("_P\nOG", "Right")
    assert play(lake("P_", "OG", action_pattern="^(.*)$"), "right")[-1].content == "_P\nOG"


def test_slippery_ice_goes_aside_in_two_cases_of_three():
    wide = lake("___", "_P_", "__G")
    wide._is_slippery = True
    ends = Counter(play(wide, say("Up"), seed=seed)[-1].content.index("P") for seed in range(300))
    assert set(ends) == {1, 4, 6}, "up, left and right, never down"
    assert min(ends.values()) > 60


def test_every_lake_has_a_way_and_a_seed_is_a_lake():
    lakes = [play(FrozenLake(size=4, p=0.5), seed=seed)[0].content for seed in range(50)]
    assert all(each.count("P") == each.count("G") == 1 for each in lakes)
    assert len(set(lakes)) > 40
    assert play(FrozenLake(size=4, p=0.5), seed=7)[0].content == lakes[7]
    for seed in range(50):
        game = FrozenLake(size=4, p=0.5)
        play(game, seed=seed)
        assert game._goal in game._reachable()


def test_symbols_and_rules_can_be_written():
    game = lake(
        "P_", "OG", env_instruction="Walk.", grid_lookup={0: "@", 1: ".", 2: "o", 3: "x"}, grid_vocab={"@": "me"}
    )
    first = play(game)[0]
    assert first.content == "@.\nox"
    assert first.info["env_instruction"].startswith("Walk.\n")
    assert "@: me\n" in first.info["env_instruction"]


def test_sokoban_pushes_boxes_and_pays_for_targets():
    game = room("#######", "#PX_O_#", "#######")
    *_, pushed, on = play(game, say("Right"), say("Right"))
    assert pushed.content == "#######\n#_PXO_#\n#######"
    assert (pushed.reward, pushed.is_over) == (pytest.approx(-0.1), False)
    assert on.content == "#######\n#__P√_#\n#######"
    assert (on.reward, on.is_over, on.is_truncated) == (pytest.approx(10.9), True, False)
    assert on.info["metrics"]["success"] == 1.0
    assert ran(game.score()) == pytest.approx(10.8)


def test_a_box_pushed_off_its_target_costs_one():
    seen = play(room("########", "#P√_XO_#", "########", num_boxes=2), say("Right"))[-1]
    assert seen.content == "########\n#_SXXO_#\n########"
    assert seen.reward == pytest.approx(-1.1)


def test_walls_and_other_boxes_stop_a_push():
    seen = play(room("######", "#PXXO#", "######"), say("Right"), say("Left"))
    assert {each.content for each in seen} == {"######\n#PXXO#\n######"}
    assert seen[-1].info["metrics"]["effective_actions"] == 0.0


def test_sokoban_ends_at_its_limit_and_an_invalid_action_costs_a_step_too():
    keys = {"max_steps": 2, "format_penalty": -0.15}
    wrong, late = play(room("#####", "#PXO#", "#___#", **keys), "?", "?")[1:]
    assert wrong.reward == pytest.approx(-0.25)
    assert not late.is_over, "as in ROLL: an invalid action does not end it"
    last = play(room("#####", "#PXO#", "#___#", **keys), say("Left"), say("Left"))[-1]
    assert (last.is_over, last.is_truncated) == (True, True)


def solvable(made: Room, depth=100) -> bool:
    """Whether pushes, searched breadth first, bring all boxes onto targets."""
    queue, seen = deque([(made.player, frozenset(made.boxes))]), set()
    while queue:
        player, boxes = state = queue.popleft()
        if state in seen:
            continue
        seen.add(state)
        if boxes == frozenset(made.targets):
            return True
        for row, column in SIDES:
            to, behind = (player[0] + row, player[1] + column), (player[0] + 2 * row, player[1] + 2 * column)
            if to in boxes and behind in made.floor and behind not in boxes:
                queue.append((to, (boxes - {to}) | {behind}))
            elif to in made.floor and to not in boxes:
                queue.append((to, boxes))
    return False


@pytest.mark.parametrize(("size", "boxes", "depth"), [((6, 6), 1, 300), ((10, 10), 2, 10), ((4, 5), 1, 30)])
def test_rooms_can_be_solved_and_are_those_of_their_seeds(size, boxes, depth):
    rooms = [make_room(size, boxes, depth, seed) for seed in range(20)]
    assert all(solvable(each) for each in rooms)
    assert all(not set(each.boxes) & set(each.targets) and each.player not in each.boxes for each in rooms)
    assert len(set(rooms)) > 10
    make_room.cache_clear()
    assert [make_room(size, boxes, depth, seed) for seed in range(20)] == rooms


def test_a_room_that_cannot_be_is_told():
    with pytest.raises(ValueError, match="no room of 4 by 4 holds 3 boxes"):
        make_room((4, 4), 3, 10, 0)


def test_the_tag_of_a_task_names_its_game():
    games = TextGames(
        {"Lake": {"env_type": "frozen_lake", "size": 3}, "Boxes": {"env_type": "sokoban", "num_boxes": 1}}
    )

    async def first(tag) -> Observation:
        return await (await games.open()).reset(Task("", {}, tag), 0)

    assert len(ran(first("Lake")).content.splitlines()) == 3
    assert len(ran(first("Boxes")).content.splitlines()) == 10
    with pytest.raises(ValueError, match="no game for the tag 'Chess'; there are Lake, Boxes"):
        ran(first("Chess"))
    with pytest.raises(ValueError, match="Shop has env_type webshop; there are frozen_lake, sokoban"):
        TextGames({"Shop": {"env_type": "webshop"}})


def test_tasks_keep_the_proportions_of_tags_and_have_seeds_of_their_own():
    tasks = GameTasks({"Lake": 3, "Boxes": 1}, {"Boxes": 2}, seed=5)
    train = [tasks.task(Split.TRAIN, index) for index in range(8)]
    held_out = [tasks.task(Split.EVALUATION, index) for index in range(tasks.size(Split.EVALUATION))]
    assert Counter(task.tag for task in train) == {"Lake": 6, "Boxes": 2}
    assert [task.tag for task in held_out] == ["Boxes", "Boxes"]
    assert len({task.data["seed"] for task in [*train, *held_out]}) == 10
    assert tasks.size(Split.TRAIN) >= 2**20
    assert tasks.size(Split.TRAIN) % 4 == 0
