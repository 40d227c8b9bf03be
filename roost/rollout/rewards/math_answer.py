"""Mathematical answers that are right when they mean the same as the right one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from roost.rollout.rewards.answering_process import AnsweringProcesses, NotStarted, ProcessLost
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.exact import last_boxed
from roost.rollout.rewards.reward import Answer
from roost.rollout.rewards.task_data import right_answers

CHECKER = Path(__file__).with_name("math_checker.py")
GB = 1024**3


class MathAnswer:
    """Compares expressions, fractions, sets, intervals and equations with math-verify.

    Each answer is compared in a process of a bounded pool, as hostile ones can compute for ever or fill the memory. One
    that does is wrong, and counted.
    """

    def __init__(
        self,
        answer: str = "answer",
        only_boxed: bool = False,
        right: float = 1.0,
        wrong: float = 0.0,
        limit_s: float = 10.0,
        processes: int | None = None,
        memory_gb: float = 2.0,
        longest: int = 10_000,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math-verify is not installed; pip install 'roost[agents]'")
        for name, value in (("limit_s", limit_s), ("memory_gb", memory_gb), ("longest", longest)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        most = processes if processes is not None else min(8, os.cpu_count() or 1)
        if most < 1:
            raise ValueError(f"processes is {most}; at least 1 is needed")
        self._key, self._only_boxed = answer, only_boxed
        self._right, self._wrong = right, wrong
        self._limit_s, self._longest = limit_s, longest
        # -P: the folder that the program lies in is no place to import from.
        self._checkers = AnsweringProcesses([sys.executable, "-P", str(CHECKER), str(int(memory_gb * GB))], most)
        self._timeouts = self._crashes = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many answers took too long, or took the process down with them."""
        return {"timeouts": self._timeouts, "crashes": self._crashes}

    async def score(self, answer: Answer) -> float:
        right = right_answers(answer.task, self._key)
        said = answer.text[-self._longest :]
        if self._only_boxed:
            boxed = last_boxed(said)
            if boxed is None:
                return self._wrong
            said = rf"\boxed{{{boxed}}}"
        return self._right if await self._is_right(said, right, answer.task.name) else self._wrong

    async def close(self) -> None:
        await self._checkers.close()

    async def _is_right(self, said: str, right: list[str], task: str) -> bool:
        question = {"text": said, "right": right, "limit_s": self._limit_s}
        try:
            is_right = await self._checkers.ask(question, self._limit_s)
        except TimeoutError:
            self._timeouts += 1
            return False
        except ProcessLost:
            self._crashes += 1
            return False
        except NotStarted as error:
            raise RewardFailed(f"answers cannot be compared: {error}") from error
        if is_right is None:
            raise RewardFailed(f"the right answer of task {task[:60]!r} is no mathematics: {', '.join(right)[:60]!r}")
        return bool(is_right)
