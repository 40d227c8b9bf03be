"""Trying code that a model wrote on one case: input and output, or a unit test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost.sandbox.execution import Execution, Fault
from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import Sandbox, run_once

HALVES, RUN_TESTS = (Path(__file__).with_name(name) for name in ("two_halves.py", "run_tests.py"))
# Only what a program prints counts: what it complains of goes nowhere.
PROGRAM = """\
import os as _os; _os.dup2(_os.open("/dev/null", _os.O_WRONLY), 2); del _os
exec(compile({code!r}, "solution.py", "exec", dont_inherit=True))
"""
SPARE_CHARS = 10_000  # beyond what should be printed: more is wrong anyway
LINK = "exchange = lambda message: apis.other.say(message=message)\n"
TRY_OUT = """\
{halves}
exec(compile({run_tests!r}, "run_tests.py", "exec"))
{link}
run_test(tests_module(exchange, {setup!r}, {test!r}, {points!r}), {call!r}, {points!r})
"""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """What a program is given to read, and what it should print."""

    given: str
    wanted: str
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class UnitTest:
    """Python that raises where the code is wrong, or where what is called in it does; `setup` runs before it."""

    test: str
    call: str = ""  # `test_zero`, `TestAdd.test_zero`, or `check`, which is given the first of the entry points
    setup: str = ""
    entry_points: tuple[str, ...] = ()  # the names it may use of the code; none: all


Case = InputOutput | UnitTest


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one case went."""

    is_passed: bool
    fault: Fault | None = None


async def tried(code: str, case: Case, limits: Limits, allow_weak: bool) -> Verdict:
    """Whether the code passes a case."""
    if isinstance(case, InputOutput):
        return await _printed_right(code, case, limits, allow_weak)
    return await _passes(code, case, limits, allow_weak)


async def _printed_right(code: str, case: InputOutput, limits: Limits, allow_weak: bool) -> Verdict:
    enough = replace(limits, output_chars=len(case.wanted) + SPARE_CHARS)
    ran = await run_once(PROGRAM.format(code=code), case.given, enough, allows_weak=allow_weak)
    is_over = ran.error in (None, Fault.EXITED)
    return Verdict(is_over and same_output(ran.output, case.wanted, case.tolerance), ran.error)


async def _passes(code: str, case: UnitTest, limits: Limits, allow_weak: bool) -> Verdict:
    """Run both halves, and carry what they say to each other. Only the half of the tests has a say in how it ends."""
    relay, halves, run_tests = _Relay(), *(file.read_text(encoding="utf-8") for file in (HALVES, RUN_TESTS))
    program = TRY_OUT.format(
        halves=halves,
        run_tests=run_tests,
        link=LINK,
        setup=case.setup,
        test=case.test,
        points=case.entry_points,
        call=case.call,
    )
    async with (
        await Sandbox.start(limits, relay.from_tests, allows_weak=allow_weak) as tests,
        await Sandbox.start(limits, relay.from_code, allows_weak=allow_weak) as solution,
    ):
        serving = asyncio.create_task(solution.execute(f"{halves}\n{LINK}serve(exchange, {code!r})\n"))
        trying = asyncio.create_task(tests.execute(program))
        try:
            await asyncio.wait((serving, trying), return_when=asyncio.FIRST_COMPLETED)
            first: Execution = trying.result() if trying.done() else serving.result()
            return Verdict(trying.done() and first.error is None, first.error)
        finally:
            await _ended(serving, trying)


async def _ended(*tasks: asyncio.Task[Execution]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Relay:
    """What one half says is what the other one hears; each waits for the other."""

    def __init__(self) -> None:
        self._for_tests: asyncio.Queue[Any] = asyncio.Queue()
        self._for_code: asyncio.Queue[Any] = asyncio.Queue()

    async def from_tests(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        # The code speaks first: it tells what it defines, in answer to nothing.
        if "hello" not in arguments["message"]:
            await self._for_code.put(arguments["message"])
        return await self._for_tests.get()

    async def from_code(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        await self._for_tests.put(arguments.get("message"))
        return await self._for_code.get()


def same_output(said: str, wanted: str, tolerance: float | None = None) -> bool:
    """Whether both print the same, but for blanks at the ends of lines and of the whole; numbers may differ by so much.

    >>> same_output("1 \\n2\\n\\n", "1\\n2"), same_output("1  2", "1 2"), same_output("0.3333", "0.33334", 1e-3)
    (True, False, True)
    """
    lines, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (said, wanted))
    if lines == right or tolerance is None:
        return lines == right
    if len(lines) != len(right):
        return False
    return all(_same_words(one.split(), other.split(), tolerance) for one, other in zip(lines, right, strict=True))


def _same_words(said: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(said) == len(wanted) and all(
        one == other or _near(one, other, tolerance) for one, other in zip(said, wanted, strict=True)
    )


def _near(one: str, other: str, tolerance: float) -> bool:
    try:
        return abs(float(one) - float(other)) <= tolerance * max(1.0, abs(float(other)))
    except ValueError:
        return False
