"""What rewards read of a task's data."""

from __future__ import annotations

from typing import Any

from roost.config.errors import did_you_mean
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.scenario import Task


def datum(task: Task, key: str) -> Any:
    """What a task's data has under a key; an answer to a task without it cannot be scored.

    >>> datum(Task("1+1", {"anwser": 2}), "answer")
    Traceback (most recent call last):
        ...
    roost.rollout.rewards.errors.RewardFailed: the data of task '1+1' has no 'answer'; did you mean anwser?
    """
    if key in task.data:
        return task.data[key]
    known = [str(name) for name in task.data]
    hint = did_you_mean(key, known) or f"it has {', '.join(known[:10]) or 'nothing'}"
    raise RewardFailed(f"the data of task {task.name[:60]!r} has no {key!r}; {hint}")


def right_answers(task: Task, key: str) -> list[str]:
    """The answers that are right, as texts: one, or any of a list.

    >>> right_answers(Task("1+1", {"answer": 2}), "answer"), right_answers(Task("e", {"is": ["e", "2.718"]}), "is")
    (['2'], ['e', '2.718'])
    """
    found = datum(task, key)
    answers = [str(one) for one in (found if isinstance(found, list | tuple) else [found]) if one is not None]
    if not answers:
        raise RewardFailed(f"the data of task {task.name[:60]!r} has no right answer under {key!r}: it is {found!r}")
    return answers
