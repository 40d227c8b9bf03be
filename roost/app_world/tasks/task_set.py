"""Sets of tasks, and scenario IDs that encode everything needed to create a task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import overload

from roost.app_world import records
from roost.app_world.changes import changes_between
from roost.app_world.state import unknown
from roost.app_world.tasks import money, one_app, several_apps
from roost.app_world.tasks.task import DONE, AppTask, Draft, Plan, Writer, code
from roost.app_world.words import TINY_WORDS

SPLITS = ("train", "dev", "test_normal", "test_challenge")
DIFFICULTIES = (1, 2, 3)
SLOTS = 32  # per difficulty: a new kind takes the next slot, so that existing IDs stay the same
SPACE = 16**7
NUMBERS = SPACE // (SLOTS * len(DIFFICULTIES) * len(SPLITS))  # scenarios of a kind in a split
SCATTER = 0x9E3779B  # spreads consecutive numbers over the IDs; odd, to have an inverse modulo SPACE
GATHER = pow(SCATTER, -1, SPACE)
TASK_ID = re.compile(r"([0-9a-f]{7})_([123])", re.ASCII)


@dataclass(frozen=True)
class ScenarioName:
    """Decoded scenario ID. No two splits have an ID in common.

    >>> name = ScenarioName("dev", difficulty=2, slot=5, number=1000)
    >>> name.id, ScenarioName.parse(name.id) == name
    ('391925b', True)
    """

    split: str
    difficulty: int
    slot: int  # of the kind, among those of its difficulty
    number: int

    @property
    def id(self) -> str:
        place = self.number * SLOTS + self.slot
        place = place * len(DIFFICULTIES) + DIFFICULTIES.index(self.difficulty)
        place = place * len(SPLITS) + SPLITS.index(self.split)
        return f"{place * SCATTER % SPACE:07x}"

    @classmethod
    def parse(cls, scenario_id: str) -> ScenarioName:
        place = int(scenario_id, 16) * GATHER % SPACE
        place, split = divmod(place, len(SPLITS))
        place, difficulty = divmod(place, len(DIFFICULTIES))
        number, slot = divmod(place, SLOTS)
        return cls(SPLITS[split], DIFFICULTIES[difficulty], slot, number)


def parse_task_id(task_id: str) -> tuple[str, int]:
    """Split a task ID into scenario ID and variant.

    >>> parse_task_id("3f2a91c_1")
    ('3f2a91c', 1)
    """
    match = TASK_ID.fullmatch(task_id)
    if match is None:
        raise ValueError(f"{task_id!r} is not a task id; one looks like 3f2a91c_1, with a variant from 1 to 3")
    return match[1], int(match[2])


def check_split(split: str) -> None:
    """Raise ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(str(unknown("split", split, SPLITS)))


def jot_note(draft: Draft) -> Plan:
    word = draft.pick(TINY_WORDS)
    after = draft.state.copy()
    after.add("notes", records.note(word, after.today))
    return Plan(f'Add a note titled "{word}".', code(f'apis.notes.create(title="{word}")', DONE), after)


def jot_task(draft: Draft) -> Plan:
    word = draft.pick(TINY_WORDS)
    after = draft.state.copy()
    after.add("tasks", records.task(word))
    return Plan(f'Add a task titled "{word}".', code(f'apis.todo.create(title="{word}")', DONE), after)


def delete_file(draft: Draft) -> Plan:
    path, _ = _plant_files(draft)
    after = draft.state.copy()
    after.remove("files", path)
    return Plan(f"Delete the file {path}.", code(f'apis.files.delete(path="{path}")', DONE), after)


def read_file(draft: Draft) -> Plan:
    path, content = _plant_files(draft)
    solution = f'apis.supervisor.complete_task(answer=apis.files.read(path="{path}")["content"])'
    return Plan(f"What does the file {path} say?", solution, answer=content)


def _plant_files(draft: Draft) -> tuple[str, str]:
    """Add the file of the task and two distractors; return its path and content."""
    wanted, *others = draft.random.sample(TINY_WORDS, 3)
    for word in draft.shuffled([wanted, *others]):
        content = "".join(draft.random.sample("abcdefghijkmnpqrstuvwxyz", 6))
        draft.state.add("files", records.file(f"/{word}.txt", draft.state.today, content))
    path = f"/{wanted}.txt"
    return path, str(draft.state.find("files", path)["content"])


@dataclass(frozen=True)
class Kind:
    """A generator of tasks."""

    write: Writer
    is_held_out: bool = False  # used only in the split test_challenge

    @property
    def name(self) -> str:
        return self.write.__name__

    def is_in(self, split: str) -> bool:
        return self.is_held_out == (split == "test_challenge")


KINDS: Mapping[int, tuple[Kind, ...]] = {
    1: (
        Kind(jot_note),
        Kind(jot_task),
        Kind(delete_file),
        Kind(read_file),
        Kind(one_app.finish_task),
        Kind(one_app.tell_phone),
        Kind(one_app.add_contact),
        Kind(one_app.book_event),
        Kind(one_app.rename_note),
        Kind(one_app.tell_balance),
        Kind(one_app.cancel_event),
        Kind(one_app.move_file, is_held_out=True),
        Kind(one_app.tag_note, is_held_out=True),
    ),
    2: (
        Kind(one_app.finish_list),
        Kind(one_app.delete_tagged),
        Kind(one_app.total_sent),
        Kind(one_app.raise_overdue),
        Kind(several_apps.invite_person),
        Kind(several_apps.pay_person),
        Kind(several_apps.note_to_tasks),
        Kind(several_apps.file_to_note),
        Kind(several_apps.list_city),
        Kind(one_app.cancel_day, is_held_out=True),
        Kind(several_apps.prepare_day, is_held_out=True),
    ),
    3: (
        Kind(money.split_bill),
        Kind(money.settle_requests),
        Kind(money.watch_budget),
        Kind(money.reimburse),
        Kind(money.thank_most),
        Kind(several_apps.meeting_time),
        Kind(several_apps.postpone_trip),
        Kind(several_apps.birthday_gifts),
        Kind(several_apps.stock_up, is_held_out=True),
        Kind(several_apps.week_report, is_held_out=True),
    ),
}
TINY = ("jot_note", "jot_task", "delete_file", "read_file")  # simple enough for the tiny model


def places(split: str, difficulties: Sequence[int], names: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """Difficulty and slot of the kinds in a split, optionally only those with these names.

    >>> places("train", [1, 2], ["jot_task", "finish_list"])
    [(1, 1), (2, 0)]
    """
    slots = [(level, slot, kind) for level in difficulties for slot, kind in enumerate(KINDS[level])]
    here = {kind.name: (level, slot) for level, slot, kind in slots if kind.is_in(split)}
    for name in names or ():
        if name not in here:
            levels = ", ".join(map(str, difficulties))
            raise ValueError(str(unknown(f"kind of tasks in {split} at difficulty {levels}", name, here)))
    return [place for name, place in here.items() if names is None or name in names]


VARIANTS = 3  # of a scenario


def make_task(task_id: str) -> AppTask:
    """Create the task with this ID; deterministic across processes.

    >>> task = make_task("391925b_1")
    >>> task.kind, task.difficulty, task == make_task("391925b_1")
    ('pay_person', 2, True)
    """
    scenario_id, variant = parse_task_id(task_id)
    name = ScenarioName.parse(scenario_id)
    kinds = KINDS[name.difficulty]
    if name.slot >= len(kinds) or not kinds[name.slot].is_in(name.split):
        raise ValueError(f"there is no task {task_id!r}; see TaskSet.ids for valid IDs")
    kind = kinds[name.slot]
    draft = Draft(scenario_id, variant)
    plan = kind.write(draft)
    initial = draft.state.snapshot()
    wanted = changes_between(initial, plan.after.snapshot()) if plan.after else []
    if not wanted and plan.answer is None:
        raise AssertionError(f"{kind.name} wrote a task, {task_id}, that is solved in its initial state")
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
    """`count` tasks of a split, created on access. Only the last scenario may lack variants.

    >>> tasks = TaskSet("train", difficulty=1, count=6, seed=0, kinds=["jot_note"])
    >>> len(tasks), tasks[0].id[:-1] == tasks[2].id[:-1], tasks[0].instruction
    (6, True, 'Add a note titled "bread".')
    """

    def __init__(
        self, split: str, difficulty: int | None, count: int, seed: int = 0, kinds: Sequence[str] | None = None
    ) -> None:
        check_split(split)
        if difficulty not in (None, *DIFFICULTIES):
            raise ValueError(f"difficulty is {difficulty}; write 1, 2 or 3, or None for all")
        if kinds is not None and not kinds:
            raise ValueError("kinds is empty; name some, or None for all")
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
    """IDs of tasks from distinct scenarios, one of each kind per round."""
    random = Random(f"{split} {difficulties} {seed}")
    chosen = places(split, difficulties, kinds)
    scenarios = -(-count // VARIANTS)
    rounds = -(-scenarios // len(chosen))
    if rounds > NUMBERS:
        raise ValueError(f"count is {count}, but there are only {NUMBERS * len(chosen) * VARIANTS} tasks")
    names: list[ScenarioName] = []
    numbers = {place: random.sample(range(NUMBERS), rounds) for place in chosen}
    for turn in range(rounds):
        random.shuffle(chosen)
        names += [ScenarioName(split, level, slot, numbers[level, slot][turn]) for level, slot in chosen]
    ids = [f"{name.id}_{variant}" for name in names[:scenarios] for variant in range(1, VARIANTS + 1)]
    return tuple(ids[:count])
