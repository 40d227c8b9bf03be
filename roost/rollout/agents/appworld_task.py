"""A task as agents of the AppWorld contract know it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from roost.rollout.environments.environment import Observation
from roost.rollout.scenario import Task


@dataclass(frozen=True)
class AppworldTask:
    """What is to be done, and for whom: the fields that AppWorld's own tasks have."""

    id: str
    instruction: str
    supervisor: Any  # with first_name, last_name, email, phone_number, as far as the environment tells them
    datetime: str = ""


def appworld_task(task: Task, first: Observation) -> AppworldTask:
    """From a task, and what its environment told with the first observation.

    >>> task = Task("7_1: call Ann", {"task_id": "7_1", "instruction": "call Ann"})
    >>> told = appworld_task(task, Observation("", info={"supervisor": {"first_name": "Bo"}}))
    >>> told.id, told.instruction, told.supervisor.first_name
    ('7_1', 'call Ann', 'Bo')
    """
    known = {**task.data, **first.info}
    return AppworldTask(
        str(known.get("task_id", task.name)),
        str(known.get("instruction", task.name)),
        SimpleNamespace(**dict(known.get("supervisor") or {})),
        str(known.get("datetime", "")),
    )
