"""What goes wrong when an answer is scored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from roost.config.findings import did_you_mean, shown
from roost.procs.user_code import called
from roost.rollout.episode import Task


class RewardFailed(RuntimeError):
    """An answer could not be scored. It is worth neither nothing nor anything: its episode counts as failed."""


def finite(value: Any, giver: str) -> float:
    """A score as a float; arrays and tensors of one number count as numbers.

    >>> finite(True, "is_right")
    1.0
    >>> finite("0.5", "is_right")
    Traceback (most recent call last):
        ...
    roost.rollout.rewards.reward.RewardFailed: is_right gives '0.5'; a score is a finite number
    """
    number = value.item() if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 else value
    try:
        is_finite = isinstance(number, Real) and math.isfinite(number)
    except OverflowError:  # a whole number beyond all floats
        is_finite = False
    if not is_finite:
        raise RewardFailed(f"{giver} gives {shown(value)}; a score is a finite number")
    return float(number)


def datum(task: Task, key: str) -> Any:
    """What a task's data has under a key; an answer to a task without it cannot be scored.

    >>> datum(Task("1+1", {"anwser": 2}), "answer")
    Traceback (most recent call last):
        ...
    roost.rollout.rewards.reward.RewardFailed: the data of task '1+1' has no 'answer'; did you mean anwser?
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an episode, to be scored."""

    task: Task  # its data holds what the reward needs: the right answer, unit tests, a rubric
    text: str  # what the policy said, as the scenario wants it judged
    reward: float = 0.0  # what the scenario gave it


class Reward(Protocol):
    """Scores answers. `_target_` names its class, or a function; many answers are scored at a time.

    class Length:
        def __init__(self, most=100):
            self._most = most

        async def score(self, answer):
            return min(len(answer.text), self._most) / self._most

        async def close(self):
            pass

    One that takes long until it can score, as it loads a model, may do that in an asynchronous `prepare()`.
    """

    async def score(self, answer: Answer) -> float:
        """What the answer is worth."""
        ...

    async def close(self) -> None:
        """End what it holds: processes, connections."""
        ...


async def prepare_reward(reward: Reward) -> None:
    """Have a reward do what it does before the first answer, if it does such a thing."""
    prepare = getattr(reward, "prepare", None)
    if prepare is not None:
        await called(prepare)
