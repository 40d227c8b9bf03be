"""Rewards for answers that match the right one exactly or mathematically."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from roost.rollout.rewards.math_text import cleaned, extracted, same_plainly
from roost.rollout.rewards.reward import ANSWER, TRUTH, Answer, RewardFailed, right_answers

NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,6})?")
BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Find(StrEnum):
    """Where the answer is in a text."""

    TEXT = "text"  # it is the whole text
    LAST_LINE = "last_line"  # the last non-blank line
    MARKER = "marker"  # after the last marker, to the end of its line
    BOXED = "boxed"  # in the last \\boxed{}


class ExactAnswer:
    """`right` if the answer in the text equals one in the task's data, else `wrong`."""

    reads = ANSWER

    def __init__(
        self,
        answer: str = "answer",
        find: str = "text",
        marker: str = "####",
        ignore_case: bool = True,
        ignore_spaces: bool = True,
        read_numbers: bool = True,
        right: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        if find not in list(Find):
            raise ValueError(f"find is {find!r}; write one of {', '.join(Find)}")
        if not marker:
            raise ValueError("marker is empty; write what stands before the answer, such as '####'")
        self._key, self._find, self._marker = answer, Find(find), marker
        self._ignore_case, self._ignore_spaces, self._read_numbers = ignore_case, ignore_spaces, read_numbers
        self._right, self._wrong = right, wrong

    async def score(self, answer: Answer) -> float:
        text = found_answer(answer.text, self._find, self._marker)
        is_right = text is not None and any(self._same(text, one) for one in right_answers(answer.task, self._key))
        return self._right if is_right else self._wrong

    async def close(self) -> None:
        pass

    def _same(self, one: str, other: str) -> bool:
        if self._read_numbers:
            numbers = as_number(one), as_number(other)
            if None not in numbers:
                return numbers[0] == numbers[1]
        return self._normal(one) == self._normal(other)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self._ignore_spaces else text
        return text.casefold() if self._ignore_case else text


def found_answer(text: str, find: Find, marker: str = "####") -> str | None:
    """Return the answer in a text; None if there is none.

    >>> found_answer("2 and 2\\n#### 4\\n", Find.MARKER), found_answer("2 and 2 is 4", Find.MARKER)
    ('4', None)
    """
    match find:
        case Find.LAST_LINE:
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case Find.MARKER:
            _, mark, after = text.rpartition(marker)
            return after.strip(" \t").partition("\n")[0].strip() if mark else None
        case Find.BOXED:
            return last_boxed(text)
    return text


def last_boxed(text: str) -> str | None:
    r"""Content of the last closed \boxed{} of a text.

    >>> last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', None)
    """
    opened: list[int | None] = []  # for each open brace the start of its content if it belongs to a box, else None
    last, content = -1, None
    for part in BRACES.finditer(text):
        if part[0].endswith("{") and part[0] != r"\{":
            opened.append(None if part[0] == "{" else part.end())
        elif part[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None and begin > last:
                last, content = begin, text[begin : part.start()]
    return content


def as_number(text: str) -> Decimal | None:
    """Parse a number exactly; None if the text is not a number.

    >>> as_number(" 1,234.50 ") == as_number("1234.5"), as_number("1,2"), as_number("four")
    (True, None, None)
    """
    plain = text.strip()
    if not NUMBER.fullmatch(plain) or not re.search("[0-9]", plain.lower().partition("e")[0]):
        return None
    return Decimal(plain.replace(",", ""))


START_LIMIT_S = 120.0  # until a process is ready: imports may come from a slow disk
USES = 2_000  # questions before a process is replaced, because caches of libraries only grow


class ProcessLost(ConnectionError):
    """A process ended instead of answering."""


class NotStarted(RuntimeError):
    """A process did not become ready, whatever the question."""


class AnsweringProcess:
    """One process. It prints a line when it is ready, then answers questions one by one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_ready = False
        self.uses = 0

    @classmethod
    async def start(cls, command: Sequence[str], limit_s: float = START_LIMIT_S) -> AnsweringProcess:
        # In its own session, so that Ctrl-C in a terminal reaches the run and not its processes.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        started = cls(process)
        try:
            async with asyncio.timeout(limit_s):
                await started._line()
        except (TimeoutError, ProcessLost) as error:
            raise NotStarted(f"{' '.join(command)} was not ready within {limit_s:g} s: {error}") from error
        finally:
            if not started._is_ready:
                await started.end()
        return started

    async def ask(self, question: Any, limit_s: float) -> Any:
        """Return the answer. After TimeoutError or ProcessLost the process cannot be used any more."""
        if self._process.stdin is None:
            raise RuntimeError("the program was started without a pipe")
        self.uses += 1
        async with asyncio.timeout(limit_s):
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
            except ConnectionError as error:
                raise ProcessLost("the program does not read") from error
            return json.loads(await self._line())

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _line(self) -> bytes:
        if self._process.stdout is None:
            raise RuntimeError("the program was started without a pipe")
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            raise ProcessLost(f"the program wrote a line that is too long: {error}") from error
        if not line.endswith(b"\n"):
            raise ProcessLost(f"the program ended with {await self._process.wait()}")
        self._is_ready = True
        return line


class AnsweringProcesses:
    """Pool of up to `most` processes, started on demand."""

    def __init__(self, command: Sequence[str], most: int) -> None:
        self._command = tuple(command)
        self._places = asyncio.Semaphore(most)
        self._idle: list[AnsweringProcess] = []
        self._is_closed = False

    async def ask(self, question: Any, limit_s: float) -> Any:
        """Return the answer of one process; `limit_s` counts from when it takes the question."""
        async with self._places:
            if self._is_closed:
                raise ProcessLost("the programs were ended")
            process = self._idle.pop() if self._idle else await AnsweringProcess.start(self._command)
            is_sound = False
            try:
                answer = await process.ask(question, limit_s)
                is_sound = process.uses < USES and not self._is_closed
            finally:  # also on cancellation: a late answer must not be read as the next one
                if is_sound:
                    self._idle.append(process)
                else:
                    await process.end()
            return answer

    async def close(self) -> None:
        """End idle processes now, the others after their answer."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().end()


CHECKER = Path(__file__).with_name("math_checker.py")
GB = 1024**3


class MathAnswer:
    """Compares expressions, fractions, sets, intervals and equations with math-verify.

    Answers are compared in a pool of processes with limits, as some take forever or fill the memory. Such an answer is
    wrong, and counted.
    """

    reads = ANSWER

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
        # -P: do not import from the program's own folder.
        self._checkers = AnsweringProcesses([sys.executable, "-P", str(CHECKER), str(int(memory_gb * GB))], most)
        self._timeouts = self._crashes = 0

    @property
    def counts(self) -> dict[str, int]:
        """Counters: answers that timed out, and answers that crashed the process."""
        return {"timeouts": self._timeouts, "crashes": self._crashes}

    async def score(self, answer: Answer) -> float:
        right = right_answers(answer.task, self._key)
        text = answer.text[-self._longest :]
        if self._only_boxed:
            boxed = last_boxed(text)
            if boxed is None:
                return self._wrong
            text = rf"\boxed{{{boxed}}}"
        return self._right if await self._is_right(text, right, answer.task.name) else self._wrong

    async def close(self) -> None:
        await self._checkers.close()

    def _on_timeout(self) -> bool:
        return False

    async def _is_right(self, text: str, right: list[str], task: str, how: str = "any") -> bool:
        question = {"text": text, "right": right, "limit_s": self._limit_s, "how": how}
        try:
            is_right = await self._checkers.ask(question, self._limit_s)
        except TimeoutError:
            self._timeouts += 1
            return self._on_timeout()
        except ProcessLost:
            self._crashes += 1
            return False
        except NotStarted as error:
            raise RewardFailed(f"answers cannot be compared: {error}") from error
        if is_right is None:
            raise RewardFailed(f"the right answer of task {task[:60]!r} is not mathematics: {', '.join(right)[:60]!r}")
        return bool(is_right)


class RlinfMath(MathAnswer):
    """RLinf's `math`: (`max_val` if right, else `min_val`) * `scale`; see `math_text` for how answers are compared."""

    def __init__(
        self,
        scale: float = 1.0,
        min_val: float = -1.0,
        max_val: float = 1.0,
        answer: str = "answer",
        limit_s: float = 10.0,
        **more: Any,
    ) -> None:
        super().__init__(answer, right=max_val * scale, wrong=min_val * scale, limit_s=limit_s, **more)

    async def score(self, answer: Answer) -> float:
        found = extracted(answer.text[-self._longest :])
        right = [cleaned(extracted(one) or one) for one in right_answers(answer.task, self._key)]
        if found is None:
            return self._wrong
        text = cleaned(found)
        known = [same_plainly(text, one) for one in right]
        if True in known or None not in known:  # no need to ask a process
            return self._right if True in known else self._wrong
        return self._right if await self._is_right(text, right, answer.task.name, "rlinf") else self._wrong


class _TooLate(Exception):
    """A comparison took too long."""


class Rstar2Math(RlinfMath):
    """RLinf's `rstar2`: `scale` if the boxed answer is right by `RlinfMath` or by math-verify, else 0."""

    def __init__(
        self, scale: float = 1.0, limit_s: float = 6.0, on_timeout: float = 0.0, answer: str = "answer", **more: Any
    ) -> None:
        super().__init__(scale, 0.0, 1.0, answer, limit_s, **more)
        self._late = on_timeout * scale

    async def score(self, answer: Answer) -> float:
        boxed = last_boxed(answer.text[-self._longest :])
        if boxed is None:
            return self._wrong
        right = right_answers(answer.task, self._key)
        try:
            if await super().score(answer) == self._right:
                return self._right
            text = rf"\boxed{{{boxed}}}"
            return self._right if await self._is_right(text, right, answer.task.name) else self._wrong
        except _TooLate:
            return self._late

    def _on_timeout(self) -> bool:
        raise _TooLate


THINK, END_THINK = "<think>", "</think>"


class RollMath(MathAnswer):
    """ROLL's MathRuleRewardWorker: 1 if the text after the thinking, or else after the last blank line, is right."""

    def __init__(self, answer: str = TRUTH, limit_s: float = 5.0, **more: Any) -> None:
        super().__init__(answer, limit_s=limit_s, **more)

    async def score(self, answer: Answer) -> float:
        text = judged_text(answer.text, str(answer.task.data.get("prompt_text") or ""))
        right = right_answers(answer.task, self._key)
        boxed = last_boxed(text)
        text = f"${boxed}$" if boxed is not None else text
        if not text:
            return self._wrong
        return self._right if await self._is_right(text, right, answer.task.name, "first") else self._wrong


def judged_text(text: str, prompt: str = "") -> str:
    r"""The part of an answer that ROLL's math rule reads; empty if the thinking tags are not well-formed.

    >>> judged_text("<think>2+2</think>It is 4"), judged_text("2+2\n\nIt is 4"), judged_text("It is 4")
    ('It is 4', 'It is 4', '')
    """
    begins = text.find(THINK)
    is_begun = prompt.rstrip().endswith(THINK)
    if text.count(END_THINK) > 1 or begins > 0 or (begins == 0 and is_begun) or text.count(THINK) > 1:
        return ""
    for mark in (END_THINK, "\n\n"):
        if mark in text.strip():
            return text.strip().rpartition(mark)[2].strip()
    return ""
