"""Tasks by their ids, and sets of them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import overload

from roost.app_world.changes import changes_between
from roost.app_world.tasks.draft import Draft
from roost.app_world.tasks.ids import DIFFICULTIES, NUMBERS, ScenarioName, check_split, parse_task_id
from roost.app_world.tasks.kinds import KINDS, places
from roost.app_world.tasks.task import AppTask

VARIANTS = 3  # of a scenario


def make_task(task_id: str) -> AppTask:
    """The task with this id: always the same, in every process.

    >>> task = make_task("391925b_1")
    >>> task.kind, task.difficulty, task == make_task("391925b_1")
    ('pay_person', 2, True)
    """
    scenario_id, variant = parse_task_id(task_id)
    name = ScenarioName.parse(scenario_id)
    kinds = KINDS[name.difficulty]
    if name.slot >= len(kinds) or not kinds[name.slot].is_in(name.split):
        raise ValueError(f"there is no task {task_id!r}; a TaskSet lists those that there are")
    kind = kinds[name.slot]
    draft = Draft(scenario_id, variant)
    plan = kind.write(draft)
    initial = draft.state.snapshot()
    wanted = changes_between(initial, plan.after.snapshot()) if plan.after else []
    if not wanted and plan.answer is None:
        raise AssertionError(f"{kind.name} wrote a task, {task_id}, that is solved by doing nothing")
    return AppTask(
        id=task_id,
        kind=kind.name,
        difficulty=name.difficulty,
        instruction=plan.instruction,
        initial=initial,
        wanted=tuple(wanted),
        answer=plan.answer,
        solution=plan.solution,
    )


class TaskSet(Sequence[AppTask]):
    """So many tasks of a split, in whole scenarios while the count allows it; each is made when it is asked for.

    >>> tasks = TaskSet("train", difficulty=1, count=6, seed=0, kinds=["jot_note"])
    >>> len(tasks), tasks[0].id[:-1] == tasks[2].id[:-1], tasks[0].instruction
    (6, True, 'Add a note titled "bread".')
    """

    def __init__(
        self, split: str, difficulty: int | None, count: int, seed: int = 0, kinds: Sequence[str] | None = None
    ) -> None:
        check_split(split)
        if difficulty not in (None, *DIFFICULTIES):
            raise ValueError(f"difficulty is {difficulty}; it must be 1, 2 or 3, or None for all of them")
        if kinds is not None and not kinds:
            raise ValueError("kinds is empty; name some, or give None for all of them")
        if count < 1:
            raise ValueError(f"count is {count}; a set needs at least 1 task")
        levels = DIFFICULTIES if difficulty is None else (difficulty,)
        self.ids = _task_ids(split, levels, count, seed, kinds)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> AppTask: ...
    @overload
    def __getitem__(self, index: slice) -> list[AppTask]: ...
    def __getitem__(self, index: int | slice) -> AppTask | list[AppTask]:
        if isinstance(index, slice):
            return [make_task(task_id) for task_id in self.ids[index]]
        return make_task(self.ids[index])


def _task_ids(
    split: str, difficulties: Sequence[int], count: int, seed: int, kinds: Sequence[str] | None
) -> tuple[str, ...]:
    """Ids of scenarios that differ; the kinds take turns, so that each is there equally often."""
    random = Random(f"{split} {difficulties} {seed}")
    chosen = places(split, difficulties, kinds)
    scenarios = -(-count // VARIANTS)
    rounds = -(-scenarios // len(chosen))
    if rounds > NUMBERS:
        raise ValueError(f"{count} tasks are more than the {NUMBERS * len(chosen) * VARIANTS} that there are")
    names: list[ScenarioName] = []
    numbers = {place: random.sample(range(NUMBERS), rounds) for place in chosen}
    for turn in range(rounds):
        random.shuffle(chosen)
        names += [ScenarioName(split, level, slot, numbers[level, slot][turn]) for level, slot in chosen]
    ids = [f"{name.id}_{variant}" for name in names[:scenarios] for variant in range(1, VARIANTS + 1)]
    return tuple(ids[:count])
