"""Reward from running a model's code on test cases: input and output, or unit tests."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from roost.config.findings import shown
from roost.rollout.episode import Task
from roost.rollout.rewards.reward import Answer, Reads, RewardFailed, any_value, task_value
from roost.sandbox.execution import Execution, Fault
from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import Sandbox, run_once

CHECK = "check"  # a test function that takes the function under test
SOLUTION = "solution"  # the module with the code under test
_PYTEST_SETUP = frozenset({"setup_method", "teardown_method", "setup_class", "teardown_class"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


class UnsupportedTests(ValueError):
    """Tests use a feature that is not supported; the message says which, and what to write instead."""


@dataclass(frozen=True, slots=True)
class FoundTest:
    """A test case: Python to execute, then a test in it to call, such as `TestAdd.test_zero`; empty: nothing more."""

    source: str
    call: str = ""


def found_tests(source: str, has_entry_point: bool = False) -> tuple[FoundTest, ...]:
    """Return the test cases in Python source. Raise SyntaxError if it is not Python.

    >>> [test.call for test in found_tests("def test_a(): assert f(1) == 2\\ndef test_b(): assert f(2) == 3")]
    ['test_a', 'test_b']
    >>> [test.source for test in found_tests("x = 1\\nassert f(x) == 2\\nassert f(3) == 4")]
    ['x = 1\\nassert f(x) == 2', 'x = 1\\nassert f(3) == 4']
    """
    module = ast.parse(source)
    calls = [*_functions(module), *_methods(module)]
    if any(isinstance(one, ast.FunctionDef) and one.name == CHECK and len(one.args.args) == 1 for one in module.body):
        if not has_entry_point:
            raise UnsupportedTests("check(candidate) needs the name of the function to pass; write entry_point")
        calls.insert(0, CHECK)
    return tuple(FoundTest(source, call) for call in calls) or tuple(_assertions(module))


def imported_modules(source: str) -> tuple[str, ...]:
    """Top-level modules that source imports unconditionally, except the code under test.

    >>> imported_modules("import numpy.linalg as la\\nfrom solution import add\\ndef f():\\n    import never_mind")
    ('numpy',)
    """
    found: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            found.append(statement.module)
    return tuple(name for name in dict.fromkeys(one.partition(".")[0] for one in found) if name != SOLUTION)


def _functions(module: ast.Module) -> Iterator[str]:
    for one in module.body:
        if isinstance(one, _Function):
            if _is_decorated(one, "fixture"):
                raise UnsupportedTests(
                    f"{one.name} is a fixture, and fixtures are not supported; let the tests call a plain function"
                )
            if one.name.startswith("test"):
                _check(one, one.name, own_arguments=0)
                yield one.name


def _methods(module: ast.Module) -> Iterator[str]:
    classes = {one.name: one for one in module.body if isinstance(one, ast.ClassDef)}
    for name, one in classes.items():
        is_case = _is_test_case(one, classes)
        if not is_case and not name.startswith("Test"):
            continue
        methods = _all_methods(one, classes)
        left = sorted(_PYTEST_SETUP & set(methods))
        if left and not is_case:
            raise UnsupportedTests(
                f"{name}.{left[0]} is not supported; derive {name} from unittest.TestCase and write setUp or tearDown"
            )
        for method, function in methods.items():
            if method.startswith("test") and not _is_decorated(function, "skip"):
                _check(function, f"{name}.{method}", own_arguments=1)
                yield f"{name}.{method}"


def _is_test_case(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    names = [ast.unparse(each) for each in one.bases]
    is_own = any(name.endswith("TestCase") and name not in classes for name in names)
    return is_own or any(
        _is_test_case(classes[name], classes) for name in names if name in classes and name != one.name
    )


def _all_methods(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, _Function]:
    """Methods of a class, including those of base classes in the same source."""
    found: dict[str, _Function] = {}
    for each in reversed(one.bases):
        parent = classes.get(ast.unparse(each))
        if parent is not None and parent is not one:
            found |= _all_methods(parent, classes)
    return found | {each.name: each for each in one.body if isinstance(each, _Function)}


def _check(function: _Function, name: str, own_arguments: int) -> None:
    if isinstance(function, ast.AsyncFunctionDef):
        raise UnsupportedTests(f"{name} is asynchronous, and such tests are not supported; write a plain function")
    if _is_decorated(function, "parametrize"):
        raise UnsupportedTests(f"{name} has parametrize, which is not supported; write a loop, or a test for each")
    arguments = function.args
    needed = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    given = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][own_arguments:needed]
    if given and not function.decorator_list:  # a decorator such as unittest.mock.patch may pass them
        raise UnsupportedTests(
            f"{name} takes {', '.join(given)}, and fixtures are not supported; create it in the test"
        )


def _is_decorated(function: _Function, word: str) -> bool:
    """Return True if a decorator has this name: `pytest.mark.parametrize(...)`, `unittest.skip("...")`, `fixture`."""
    called = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    return any(ast.unparse(one).rpartition(".")[2] == word for one in called)


def _assertions(module: ast.Module) -> Iterator[FoundTest]:
    """One test case for each statement with an assert: the statements before it, except those with other asserts.

    The last case also has the statements after it.
    """
    places = [place for place, one in enumerate(module.body) if _has_assert(one)]
    if not places:
        if all(
            isinstance(one, _DEFINING) or isinstance(getattr(one, "value", None), ast.Constant) for one in module.body
        ):
            raise UnsupportedTests("they contain no test; write asserts, functions test_..., or a unittest.TestCase")
        yield FoundTest(ast.unparse(module))  # the test is that its calls do not raise
        return
    for place in places:
        before = [one for one in module.body[:place] if not _has_assert(one)]
        after = module.body[place + 1 :] if place == places[-1] else []
        yield FoundTest(_source([*before, module.body[place], *after]))


def _has_assert(statement: ast.stmt) -> bool:
    return not isinstance(statement, _DEFINING) and any(isinstance(one, ast.Assert) for one in ast.walk(statement))


def _source(statements: Sequence[ast.stmt]) -> str:
    return ast.unparse(ast.Module(list(statements), type_ignores=[]))


RPC, RUN_TESTS = (Path(__file__).with_name(name) for name in ("unit_test_rpc.py", "run_tests.py"))
# Only stdout counts: stderr is dropped.
PROGRAM = """\
import os as _os; _os.dup2(_os.open("/dev/null", _os.O_WRONLY), 2); del _os
exec(compile({code!r}, "solution.py", "exec", dont_inherit=True))
"""
SPARE_CHARS = 10_000  # beyond the expected output: a longer output is wrong anyway
LINK = "exchange = lambda message: apis.other.say(message=message)\n"
TEST_PROGRAM = """\
{rpc}
exec(compile({run_tests!r}, "run_tests.py", "exec"))
{link}
run_test(tests_module(exchange, {setup!r}, {test!r}, {points!r}), {call!r}, {points!r})
"""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """Input of a program and its expected output."""

    given: str
    wanted: str
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class UnitTest:
    """Python that raises if the code is wrong, directly or in `call`; `setup` runs before it."""

    test: str
    call: str = ""  # `test_zero`, `TestAdd.test_zero`, or `check`, called with the first entry point
    setup: str = ""
    entry_points: tuple[str, ...] = ()  # names of the solution that the test may use; empty: all


Case = InputOutput | UnitTest


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one test case."""

    is_passed: bool
    fault: Fault | None = None


async def run_case(code: str, case: Case, limits: Limits, allow_weak: bool) -> Verdict:
    """Run the code on a test case."""
    if isinstance(case, InputOutput):
        return await _run_program(code, case, limits, allow_weak)
    return await _run_unit_test(code, case, limits, allow_weak)


async def _run_program(code: str, case: InputOutput, limits: Limits, allow_weak: bool) -> Verdict:
    enough = replace(limits, output_chars=len(case.wanted) + SPARE_CHARS)
    ran = await run_once(PROGRAM.format(code=code), case.given, enough, allows_weak=allow_weak)
    is_over = ran.error in (None, Fault.EXITED)
    return Verdict(is_over and same_output(ran.output, case.wanted, case.tolerance), ran.error)


async def _run_unit_test(code: str, case: UnitTest, limits: Limits, allow_weak: bool) -> Verdict:
    """Run tests and code in two sandboxes and relay their messages. The sandbox of the tests decides the verdict."""
    relay, rpc, run_tests = _Relay(), *(file.read_text(encoding="utf-8") for file in (RPC, RUN_TESTS))
    program = TEST_PROGRAM.format(
        rpc=rpc,
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
        serving = asyncio.create_task(solution.execute(f"{rpc}\n{LINK}serve(exchange, {code!r})\n"))
        trying = asyncio.create_task(tests.execute(program))
        try:
            await asyncio.wait((serving, trying), return_when=asyncio.FIRST_COMPLETED)
            first: Execution = trying.result() if trying.done() else serving.result()
            return Verdict(trying.done() and first.error is None, first.error)
        finally:
            await _cancel(serving, trying)


async def _cancel(*tasks: asyncio.Task[Execution]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Relay:
    """Passes messages between the tests and the code; each waits for the other."""

    def __init__(self) -> None:
        self._for_tests: asyncio.Queue[Any] = asyncio.Queue()
        self._for_code: asyncio.Queue[Any] = asyncio.Queue()

    async def from_tests(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        # The code sends the first message unprompted: the names it defines.
        if "hello" not in arguments["message"]:
            await self._for_code.put(arguments["message"])
        return await self._for_tests.get()

    async def from_code(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        await self._for_tests.put(arguments.get("message"))
        return await self._for_code.get()


def same_output(answer: str, wanted: str, tolerance: float | None = None) -> bool:
    """Return True if outputs match, ignoring trailing whitespace; numbers may differ by `tolerance`.

    >>> same_output("1 \\n2\\n\\n", "1\\n2"), same_output("1  2", "1 2"), same_output("0.3333", "0.33334", 1e-3)
    (True, False, True)
    """
    lines, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (answer, wanted))
    if lines == right or tolerance is None:
        return lines == right
    if len(lines) != len(right):
        return False
    return all(_same_words(one.split(), other.split(), tolerance) for one, other in zip(lines, right, strict=True))


def _same_words(answer: list[str], wanted: list[str], tolerance: float) -> bool:
    return len(answer) == len(wanted) and all(
        one == other or _near(one, other, tolerance) for one, other in zip(answer, wanted, strict=True)
    )


def _near(one: str, other: str, tolerance: float) -> bool:
    try:
        return abs(float(one) - float(other)) <= tolerance * max(1.0, abs(float(other)))
    except ValueError:
        return False


FENCED = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([^\s`]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
PYTHON = ("", "python", "python3", "py")


class Counting(StrEnum):
    """How passed tests become a reward."""

    SHARE = "share"  # the fraction that passes
    ALL = "all"  # all or nothing; stops at the first failure


class CodeTests:
    """Runs the code of an answer on the cases of its task, each in its own sandbox, several concurrently."""

    reads: ClassVar[Reads] = {"tests": any_value}

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
        """Counters: cases that ran, and cases that timed out."""
        return {"cases": self._cases, "timeouts": self._timeouts}

    async def score(self, answer: Answer) -> float:
        cases = self._cases_of(answer.task)
        code = found_code(answer.text, self._only_fenced)
        if code is None:
            return 0.0
        passed = await self._passed(code, cases)
        return passed / len(cases) if self._count is Counting.SHARE else float(passed == len(cases))

    async def close(self) -> None:
        """Do nothing: sandboxes end with their answers."""

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
            verdict = await run_case(code, case, self._limits, self._allow_weak)
        self._timeouts += verdict.fault in (Fault.TIMED_OUT, Fault.CPU)
        return verdict.is_passed

    def _cases_of(self, task: Task) -> list[Case]:
        tests, setup, entry_point = self._keys
        written = task_value(task, tests)
        cases = [written] if isinstance(written, str | Mapping) else written
        if not isinstance(cases, list | tuple) or not cases:
            raise RewardFailed(f"the tests of task {task.name[:60]!r} are {shown(written)}; a list of tests is needed")
        names = task.data.get(entry_point) or ()
        points = (names,) if isinstance(names, str) else tuple(names)
        found = (_cases(one, task.data.get(setup) or "", points, self._tolerance, task.name) for one in cases)
        return [case for some in found for case in some]


def _cases(written: Any, setup: str, points: tuple[str, ...], tolerance: float | None, task: str) -> list[Case]:
    """Test cases from an entry of a task's data."""
    match written:
        case {"input": given, "output": wanted}:
            return [InputOutput(_text(given), _text(wanted), tolerance)]
        case str():
            try:
                missing = [
                    name for text in (setup, written) for name in imported_modules(text) if not _is_installed(name)
                ]
                found = found_tests(written, bool(points))
            except UnsupportedTests as error:
                raise RewardFailed(f"the tests of task {task[:60]!r}: {error}") from error
            except (SyntaxError, ValueError) as error:
                raise RewardFailed(f"a test of task {task[:60]!r} is not Python: {error}") from error
            if missing:
                why = f"it is not installed here; install it, or import names of the tested code from {SOLUTION}"
                raise RewardFailed(f"the tests of task {task[:60]!r} import {missing[0]}: {why}")
            return [UnitTest(test.source, test.call, setup, points) for test in found]
    raise RewardFailed(
        f"a test of task {task[:60]!r} is {shown(written)}; write Python, or a mapping with input and output"
    )


@cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _text(written: Any) -> str:
    """Return text; a list is joined by newlines."""
    return "\n".join(map(str, written)) if isinstance(written, list | tuple) else str(written)


def found_code(text: str, only_fenced: bool = False) -> str | None:
    """Return the Python of an answer: its last fenced block, else the whole text; None if no block is Python.

    >>> found_code("So:\\n```python\\nprint(1)\\n```\\nDone."), found_code("print(2)"), found_code("```sh\\nls\\n```")
    ('print(1)\\n', 'print(2)', None)
    """
    blocks = FENCED.findall(text)
    if not blocks and not only_fenced:
        return text
    return next((code for _, language, code in reversed(blocks) if language.lower() in PYTHON), None)


IMPORTS = "import collections, functools, heapq, itertools, json, math, operator, random, re, string, sys\n"
CALLED = """\
_called = Solution().{name} if "Solution" in globals() else {name}
assert _called(*{arguments!r}) == {wanted!r}
"""


class RollCode(CodeTests):
    """ROLL's CodeSandboxRewardWorker: 1 if all cases of a row pass, else 0, or `on_error` where one raised.

    A row has `case_type`, `test_cases` (a list, or its JSON text) and `test_case_function`.
    """

    reads: ClassVar[Reads] = {"test_cases": any_value}

    def __init__(self, on_error: float = 0.0, limit_s: float = 20.0, **more: Any) -> None:
        super().__init__(tests="test_cases", count="all", limit_s=limit_s, **more)
        self._on_error = on_error

    async def score(self, answer: Answer) -> float:
        cases = self._cases_of(answer.task)
        text = answer.text.rpartition("<|begin_of_solution|>")[2].rpartition("</think>")[2]
        code = found_code(text)
        if code is None:
            return 0.0
        if await self._passed(code, cases) == len(cases):
            return 1.0
        if not self._on_error:
            return 0.0
        verdicts = [await run_case(code, case, self._limits, self._allow_weak) for case in cases]
        return self._on_error if any(verdict.fault is not None for verdict in verdicts) else 0.0

    def _cases_of(self, task: Task) -> list[Case]:
        written, kind = task_value(task, "test_cases"), str(task.data.get("case_type") or "")
        try:
            cases = json.loads(written) if isinstance(written, str) else written
        except ValueError as error:
            raise RewardFailed(f"test_cases of task {task.name[:60]!r} are not JSON: {error}") from error
        if not isinstance(cases, list) or not cases or not all(isinstance(case, Mapping) for case in cases):
            raise RewardFailed(f"test_cases of task {task.name[:60]!r} are {shown(written)}; a list of cases is needed")
        name = str(task.data.get("test_case_function") or "")
        found = [_roll_cases(dict(case), kind, name, task.name) for case in cases]
        return [case for some in found for case in some]


def _roll_cases(case: dict[str, Any], kind: str, name: str, task: str) -> list[Case]:
    if "assert_code" in case:
        if kind == "text":
            raise RewardFailed(f"task {task[:60]!r} has cases of type text, which put the code into the test")
        points = (name,) if kind == "check_based" and name else ()
        return _cases(str(case["assert_code"]), IMPORTS, points, None, task)
    given, wanted = (
        next((case[key] for key in keys if key in case), None)
        for keys in (("stdin", "input"), ("expected_stdout", "output"))
    )
    if given is None or wanted is None:
        raise RewardFailed(f"a test of task {task[:60]!r} is {shown(case)}; it has neither assert_code nor stdin")
    if not name:
        return [InputOutput(_text(given), _text(wanted))]
    try:
        arguments, result = [json.loads(line) for line in str(given).splitlines()], json.loads(str(wanted))
    except ValueError as error:
        raise RewardFailed(f"a test of task {task[:60]!r} has no JSON arguments: {error}") from error
    return [UnitTest(CALLED.format(name=name, arguments=arguments, wanted=result), setup=IMPORTS)]
