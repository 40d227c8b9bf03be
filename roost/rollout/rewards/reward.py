"""The protocol of rewards, their results, and errors of scoring."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from roost.config.findings import did_you_mean, shown
from roost.procs.user_code import call_async
from roost.rollout.episode import Split, Task


class RewardFailed(RuntimeError):
    """An answer could not be scored. It gets no reward at all: its episode counts as failed."""


def finite(value: Any, reward_name: str) -> float:
    """Return a reward as a float. Raise RewardFailed if it is not finite; one-element arrays count as numbers.

    >>> finite(True, "is_right")
    1.0
    >>> finite("0.5", "is_right")
    Traceback (most recent call last):
        ...
    roost.rollout.rewards.reward.RewardFailed: is_right gives '0.5'; a score is a finite number
    """
    number = value
    if callable(getattr(value, "item", None)):
        with contextlib.suppress(ValueError, RuntimeError):  # NumPy's and torch's of several elements
            number = value.item()
    try:
        is_finite = isinstance(number, Real) and math.isfinite(number)
    except OverflowError:  # an integer beyond the range of floats
        is_finite = False
    if not is_finite:
        raise RewardFailed(f"{reward_name} gives {shown(value)}; a score is a finite number")
    return float(number)


def task_value(task: Task, key: str) -> Any:
    """Return a value of a task's data. Raise RewardFailed if the key is missing.

    >>> task_value(Task("1+1", {"anwser": 2}), "answer")
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
    """Correct answers of a task, as strings: one, or any of a list.

    >>> right_answers(Task("1+1", {"answer": 2}), "answer"), right_answers(Task("e", {"is": ["e", "2.718"]}), "is")
    (['2'], ['e', '2.718'])
    """
    found = task_value(task, key)
    answers = [str(one) for one in (found if isinstance(found, list | tuple) else [found]) if one is not None]
    if not answers:
        raise RewardFailed(f"the data of task {task.name[:60]!r} has no right answer under {key!r}: it is {found!r}")
    if wrong := wrong_answer(found):
        raise RewardFailed(f"{key!r} of task {task.name[:60]!r} {wrong}")
    return answers


def wrong_answer(value: Any) -> str:
    """Describe why a value is no right answer; empty if it is one: text, a number or the like, or a list of these.

    >>> wrong_answer(["e", 2.718]), wrong_answer({"value": 4})
    ('', "is {'value': 4}; text, a number or a list of these is needed")
    """
    parts = value if isinstance(value, list | tuple) else [value]
    is_wrong = any(isinstance(one, Mapping | list | tuple | set | bytes) for one in parts)
    return f"is {shown(value)}; text, a number or a list of these is needed" if is_wrong else ""


def any_value(value: Any) -> str:
    """Accept every value: the reward itself checks them."""
    return ""


TRUTH = "ground_truth"  # the column of answers in ROLL's data
# Columns that a reward reads: the parameter that names each, and a function that describes what is wrong with a value.
Reads = Mapping[str, Callable[[Any], str]]
ANSWER: Reads = {"answer": wrong_answer}


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of an episode, to be scored."""

    task: Task  # its data has what the reward needs: the right answer, unit tests, a rubric
    text: str  # the policy's output that is scored
    reward: float = 0.0  # the scenario's own reward
    # The conversation in order: `role`, `content`, `generated`, and `turn` of the policy's messages.
    messages: Sequence[Mapping[str, Any]] = ()
    turns: int = 1  # of the policy
    tokens: int = 0  # that the policy generated
    split: Split = Split.TRAIN

    @property
    def question(self) -> str:
        """The last message of the user before the policy's first turn; the task's name if there is none.

        >>> shown = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "generated": True}]
        >>> Answer(Task("sum"), "4", messages=shown).question, Answer(Task("sum"), "4").question
        ('2+2?', 'sum')
        """
        found = self.task.name
        for message in self.messages:
            if message.get("generated"):
                break
            found = str(message["content"]) if message["role"] == "user" else found
        return found


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of an answer, the parts that metrics and samples show, and rewards of turns.

    `reward` includes the rewards of turns; `parts` are for reading only.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()  # one for each turn, or none


def as_scored(value: Any, reward_name: str, turns: int = 1) -> Scored:
    """A reward's return value as `Scored`: from a number, a mapping of parts, or a list with a number per turn.

    Parts and turns are added up.

    >>> as_scored({"right": 1, "format": 0.5}, "mine")
    Scored(reward=1.5, parts={'right': 1.0, 'format': 0.5}, turn_rewards=())
    >>> as_scored([0.5, 0, 1], "mine", turns=3)
    Scored(reward=1.5, parts={}, turn_rewards=(0.5, 0.0, 1.0))
    """
    match value:
        case Scored():
            found = value
        case Mapping():
            if not value:
                raise RewardFailed(
                    f"{reward_name} gives a mapping without parts; return a number, or one for each part"
                )
            found = Scored(_total(value.values(), reward_name), value)
        case list() | tuple():
            found = Scored(_total(value, reward_name), turn_rewards=tuple(value))
        case _:
            return Scored(finite(value, reward_name))
    if (found.turn_rewards or isinstance(value, list | tuple)) and len(found.turn_rewards) != turns:
        raise RewardFailed(
            f"{reward_name} gives {len(found.turn_rewards)} rewards of turns, but the policy had {turns}"
        )
    return Scored(
        finite(found.reward, reward_name),
        {str(name): finite(part, reward_name) for name, part in found.parts.items()},
        tuple(finite(reward, reward_name) for reward in found.turn_rewards),
    )


def _total(values: Iterable[Any], reward_name: str) -> float:
    numbers = [finite(value, reward_name) for value in values]
    try:
        return math.fsum(numbers)
    except OverflowError:
        raise RewardFailed(f"{reward_name} gives {shown(numbers)}; their sum is beyond the range of floats") from None


class Reward(Protocol):
    """Scores answers concurrently. `_target_` names its class, or a function.

    class Length:
        def __init__(self, most=100):
            self._most = most

        async def score(self, answer):
            return min(len(answer.text), self._most) / self._most

        async def close(self):
            pass

    `score` may return whatever `as_scored` takes. A reward with slow startup, such as loading a model, may do it in an
    asynchronous `prepare()`. One that scores many answers at once has an asynchronous `score_batch(answers)` instead of
    `score`, or beside it; it returns what `score` would for each. A class attribute `reads` (see `Reads`) has the
    columns that it needs: they are checked before a run.
    """

    async def score(self, answer: Answer) -> Any:
        """Return the reward of an answer."""
        ...

    async def close(self) -> None:
        """Release processes and connections."""
        ...


async def prepare_reward(reward: Reward) -> None:
    """Call the reward's `prepare`, if it has one."""
    prepare = getattr(reward, "prepare", None)
    if prepare is not None:
        await call_async(prepare)
