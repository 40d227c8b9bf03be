"""Task source of app worlds."""

from __future__ import annotations

from collections.abc import Sequence

from roost.app_world.tasks.task import AppTask
from roost.app_world.tasks.task_set import TaskSet
from roost.rollout.episode import Split, Task


class AppWorldTasks:
    """Tasks of one difficulty, or of all three if it is None; `kinds` restricts them to these kinds.

    Evaluation tasks come from another split. Those of `test_challenge` are of other kinds, so `kinds` does not apply to
    them.

    >>> tasks = AppWorldTasks(difficulty=1, count=30, kinds=["jot_note"], evaluation_count=6)
    >>> task = tasks.task(Split.TRAIN, 0)
    >>> tasks.size(Split.TRAIN), tasks.size(Split.EVALUATION), task.name, task.tag
    (30, 6, '464f080_1: Add a note titled "bread".', 'app_world.1')
    """

    def __init__(
        self,
        difficulty: int | None = 1,
        count: int = 300,
        seed: int = 0,
        kinds: Sequence[str] | None = None,
        evaluation_count: int = 60,
        evaluation_split: str = "dev",
    ) -> None:
        if evaluation_split == "train":
            raise ValueError(
                "evaluation_split is train, which is used for training; choose dev, test_normal or test_challenge"
            )
        evaluation_kinds = None if evaluation_split == "test_challenge" else kinds
        self._tasks = {
            Split.TRAIN: TaskSet("train", difficulty, count, seed, kinds),
            Split.EVALUATION: TaskSet(evaluation_split, difficulty, evaluation_count, seed, evaluation_kinds),
        }

    def size(self, split: Split) -> int:
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        return to_task(self._tasks[split][index])


def to_task(task: AppTask) -> Task:
    """Return a task without its solution."""
    data = {
        "task_id": task.id,
        "instruction": task.instruction,
        "difficulty": task.difficulty,
        "scenario_id": task.scenario_id,
    }
    return Task(f"{task.id}: {task.instruction}", data, f"app_world.{task.difficulty}")
