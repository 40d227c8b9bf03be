"""Code that is right when it passes the tests of its task."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

from roost.config.errors import shown
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.reward import Answer
from roost.rollout.rewards.task_data import datum
from roost.rollout.rewards.trials import Case, InputOutput, UnitTest, tried
from roost.rollout.rewards.unit_test_source import SOLUTION, NotRun, found_tests, imported_modules
from roost.rollout.scenario import Task
from roost.sandbox.execution import Fault
from roost.sandbox.limits import Limits

FENCED = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([^\s`]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
PYTHON = ("", "python", "python3", "py")


class Counting(StrEnum):
    """What part of the tests counts."""

    SHARE = "share"  # the part that is passed
    ALL = "all"  # all or nothing; the rest is left out once one has failed


class CodeTests:
    """Runs the code of an answer on the cases of its task, each in a sandbox of its own, several at a time."""

    def __init__(
        self,
        tests: str = "tests",
        setup: str = "setup",
        entry_point: str = "entry_point",
        count: str = "share",
        only_fenced: bool = False,
        tolerance: float | None = None,
        at_a_time: int | None = None,
        limit_s: float = 10.0,
        memory_mb: int = 1024,
        allow_weak: bool = False,
    ) -> None:
        if count not in list(Counting):
            raise ValueError(f"count is {count!r}; write one of {', '.join(Counting)}")
        places = at_a_time if at_a_time is not None else min(16, os.cpu_count() or 1)
        if places < 1:
            raise ValueError(f"at_a_time is {places}; at least 1 is needed")
        self._keys = tests, setup, entry_point
        self._count, self._only_fenced, self._tolerance = Counting(count), only_fenced, tolerance
        self._limits = Limits(wall_s=limit_s, cpu_s=max(1, round(2 * limit_s)), memory_mb=memory_mb)
        self._allow_weak = allow_weak
        self._places = asyncio.Semaphore(places)
        self._cases = self._timeouts = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many cases were tried, and on how many of them the code took too long."""
        return {"cases": self._cases, "timeouts": self._timeouts}

    async def score(self, answer: Answer) -> float:
        cases = self._cases_of(answer.task)
        code = found_code(answer.text, self._only_fenced)
        if code is None:
            return 0.0
        passed = await self._passed(code, cases)
        return passed / len(cases) if self._count is Counting.SHARE else float(passed == len(cases))

    async def close(self) -> None:
        """Sandboxes end with the answers they are for."""

    async def _passed(self, code: str, cases: Sequence[Case]) -> int:
        trials = [asyncio.create_task(self._passes(code, case)) for case in cases]
        passed = 0
        try:
            for trial in asyncio.as_completed(trials):
                if await trial:
                    passed += 1
                elif self._count is Counting.ALL:
                    break
        finally:
            for task in trials:
                task.cancel()
            await asyncio.gather(*trials, return_exceptions=True)
        return passed

    async def _passes(self, code: str, case: Case) -> bool:
        async with self._places:
            self._cases += 1
            verdict = await tried(code, case, self._limits, self._allow_weak)
        self._timeouts += verdict.fault in (Fault.TIMED_OUT, Fault.CPU)
        return verdict.is_passed

    def _cases_of(self, task: Task) -> list[Case]:
        tests, setup, entry_point = self._keys
        written = datum(task, tests)
        cases = [written] if isinstance(written, str | Mapping) else written
        if not isinstance(cases, list | tuple) or not cases:
            raise RewardFailed(f"the tests of task {task.name[:60]!r} are {shown(written)}; a list of tests is needed")
        names = task.data.get(entry_point) or ()
        points = (names,) if isinstance(names, str) else tuple(names)
        found = (_cases(one, task.data.get(setup) or "", points, self._tolerance, task.name) for one in cases)
        return [case for some in found for case in some]


def _cases(written: Any, setup: str, points: tuple[str, ...], tolerance: float | None, task: str) -> list[Case]:
    """The cases in what a task's data has."""
    match written:
        case {"input": given, "output": wanted}:
            return [InputOutput(_text(given), _text(wanted), tolerance)]
        case str():
            try:
                missing = [name for text in (setup, written) for name in imported_modules(text) if not _is_there(name)]
                found = found_tests(written, bool(points))
            except NotRun as error:
                raise RewardFailed(f"the tests of task {task[:60]!r}: {error}") from error
            except (SyntaxError, ValueError) as error:
                raise RewardFailed(f"a test of task {task[:60]!r} is no Python: {error}") from error
            if missing:
                why = f"there is no {missing[0]} here; install it, or import what the code defines from {SOLUTION}"
                raise RewardFailed(f"the tests of task {task[:60]!r} import {missing[0]}: {why}")
            return [UnitTest(test.source, test.call, setup, points) for test in found]
    raise RewardFailed(
        f"a test of task {task[:60]!r} is {shown(written)}; write Python, or a mapping with input and output"
    )


@cache
def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _text(written: Any) -> str:
    """Text, or a list of lines."""
    return "\n".join(map(str, written)) if isinstance(written, list | tuple) else str(written)


def found_code(text: str, only_fenced: bool = False) -> str | None:
    """The Python of an answer: its last fenced block, else the whole text; None where the blocks hold something else.

    >>> found_code("So:\\n```python\\nprint(1)\\n```\\nDone."), found_code("print(2)"), found_code("```sh\\nls\\n```")
    ('print(1)\\n', 'print(2)', None)
    """
    blocks = FENCED.findall(text)
    if not blocks and not only_fenced:
        return text
    return next((code for _, language, code in reversed(blocks) if language.lower() in PYTHON), None)
