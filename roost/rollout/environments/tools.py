"""Tools as an environment: a step calls some of them, on the user's servers or in a sandbox."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from roost.config.findings import Findings, Where, shown
from roost.engines.http_calls import HttpCalls, RetryRule
from roost.engines.protocol import EngineError
from roost.rollout.check_target import TOOL, check_target, located, own_keys
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task
from roost.sandbox.execution import Fault
from roost.sandbox.limits import Limits
from roost.sandbox.sandbox import TooWeak, run_once

NOTHING_FOUND = "No search results are found."
LONGEST_DOCUMENT = 5000  # characters


class ToolFailed(Exception):
    """A call failed; the message is shown to the policy."""


class Tool(Protocol):
    """A tool of agents. `_target_` names its class.

    class Clock:
        parameters = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
        description = "Tell the time."

        async def call(self, arguments):
            return time_in(arguments["zone"])

        async def close(self):
            pass
    """

    description: str
    parameters: Mapping[str, Any]  # a JSON schema, as in OpenAI's API

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the text to show to the policy. Raise ToolFailed if the call fails."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


def _texts(**described: str) -> dict[str, Any]:
    """The JSON schema of required text arguments."""
    properties = {name: {"type": "string", "description": text} for name, text in described.items()}
    return {"type": "object", "properties": properties, "required": list(described)}


class Search:
    """Search-R1's retrieval server: `POST URL/retrieve` with queries and `topk`. Without a URL nothing is found."""

    description = "Search a collection of documents."
    parameters = _texts(query="What to look for.")

    def __init__(
        self,
        url: str | None,
        topk: int = 3,
        at_a_time: int = 16,
        tries: int = 3,
        wait_s: float = 5.0,
        limit_s: float = 120.0,
    ) -> None:
        self._topk, self._limit_s = topk, limit_s
        self._calls = None if url is None else HttpCalls(url, retry=RetryRule(tries, wait_s, wait_s), trust_env=True)
        self._places = asyncio.Semaphore(at_a_time)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if self._calls is None:
            return NOTHING_FOUND
        body = {"queries": [arguments["query"]], "topk": self._topk, "return_scores": False}
        answer = await _posted(self._calls, "/retrieve", body, self._limit_s, self._places)
        try:
            found = [(str(one["contents"]), one.get("url", "")) for one in answer["result"][0][: self._topk]]
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ToolFailed(f"the search server answered {shown(answer)}, which has no result") from error
        documents = (f"[Doc {n}]({url}):\n{text[:LONGEST_DOCUMENT]}" for n, (text, url) in enumerate(found, start=1))
        return "\n\n".join(documents) or NOTHING_FOUND

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()


class Python:
    """Runs a program and returns what it prints, with the value of its last expression.

    It runs on a code judge (`POST URL/run/long-batch`), or in a sandbox here if there is no URL.
    """

    description = "Run a Python program with a standard input, and return what it prints. An error is returned as text."
    parameters = _texts(code="The program. It may read its input with input().", input="Its standard input.")

    def __init__(
        self,
        url: str | None = None,
        at_a_time: int = 16,
        tries: int = 10,
        wait_s: float = 1.0,
        limit_s: float = 60.0,
        run_limit_s: float = 10.0,
        memory_mb: int = 1024,
        allow_weak: bool = False,
    ) -> None:
        self._calls = None if url is None else HttpCalls(url, retry=RetryRule(tries, wait_s, wait_s), trust_env=True)
        self._limit_s, self._places, self._allow_weak = limit_s, asyncio.Semaphore(at_a_time), allow_weak
        self._limits = Limits(wall_s=run_limit_s, cpu_s=max(1, round(2 * run_limit_s)), memory_mb=memory_mb)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        code, given = printing_last(arguments["code"]), arguments["input"]
        if self._calls is None:
            return await self._in_sandbox(code, given)
        body = {"type": "batch", "submissions": [{"type": "python", "solution": code, "input": given}]}
        answer = await _posted(self._calls, "/run/long-batch", body, self._limit_s, self._places)
        try:
            ran = answer["results"][0]
            is_right, reason = bool(ran["success"] and ran["run_success"]), ran.get("reason")
            return _outcome(is_right, reason, ran.get("stdout"), ran.get("stderr"), float(ran.get("cost") or 0.0))
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise ToolFailed(f"the code judge answered {shown(answer)}, which has no result") from error

    async def close(self) -> None:
        if self._calls is not None:
            await self._calls.close()

    async def _in_sandbox(self, code: str, given: str) -> str:
        async with self._places:
            try:
                ran = await run_once(code, given, self._limits, allows_weak=self._allow_weak)
            except TooWeak as error:
                raise ToolFailed(str(error)) from error
        return _outcome(ran.error in (None, Fault.EXITED), ran.error, ran.output, "", ran.seconds)


def _outcome(is_right: bool, reason: Any, stdout: Any, stderr: Any, seconds: float) -> str:
    """The outcome of a program as RLinf's agents show it. Raise ToolFailed for a failure."""
    printed = [f"{name}: {text}" for name, text in (("stdout", stdout), ("stderr", stderr)) if text]
    lines = [*printed, f" execution time: {seconds:.2f}s"]
    if is_right:
        return "\n".join(["Tool call success", *lines])
    raise ToolFailed("\n".join(["Tool call failure", f"reason: {reason}", *lines]))


def printing_last(code: str) -> str:
    """The program, with the value of its last expression printed, as in a notebook.

    >>> print(printing_last("x = 6\\nx * 7"))
    x = 6
    _ = (x * 7)
    if _ is not None: print(repr(_))
    >>> printing_last("x  # shown\\n\\n# end") == printing_last("x")
    True
    """
    try:
        last = ast.parse(code).body[-1]
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return code  # running it will show the error
    written = ast.get_source_segment(code, last) if isinstance(last, ast.Expr) else None
    if written is None or last.col_offset:
        return code
    before = code.split("\n")[: last.lineno - 1]  # only comments and blank lines come after it
    return "\n".join([*before, f"_ = ({written})", "if _ is not None: print(repr(_))"])


async def _posted(calls: HttpCalls, path: str, body: Any, limit_s: float, places: asyncio.Semaphore) -> Any:
    async with places:
        try:
            return await calls.post(path, body, limit_s=limit_s, is_idempotent=True)
        except EngineError as error:
            raise ToolFailed(str(error)) from error


class ToolEnvironments:
    """Environments whose actions are calls of tools; `tools` maps the name of each to its class, by `_target_`.

    Tasks have no reward here: `train.rewards` scores answers.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools: dict[str, Tool] = {
            str(name): located(config["_target_"])(**own_keys(config)) for name, config in tools.items()
        }

    @staticmethod
    def check_config(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
        """Report tools that cannot be created."""
        tools = config.get("tools")
        if not isinstance(tools, Mapping) or not tools:
            fix = "write tools: {search: {_target_: roost.rollout.environments.tools.Search, url: http://HOST:8000}}"
            findings.error("RST-A029", where.under("tools"), "names no tools", f"it is {shown(tools)}", fix)
            return
        for name, tool in tools.items():
            check_target(tool, where.under("tools", str(name)), TOOL, findings)

    @staticmethod
    def offered(config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tools of a config as a chat template shows them, as far as class attributes describe them."""
        return shown_tools({name: located(tool["_target_"]) for name, tool in config["tools"].items()})

    async def open(self) -> ToolEnvironment:
        return ToolEnvironment(self._tools)

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()


class ToolEnvironment:
    """The tools of one episode. An action is a sequence of calls, each with `name` and `arguments`.

    The observation is a list of texts, one for each call; `failed` in its info says how many calls failed.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._calls = self._failed = 0

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        return Observation("", info={"tools": shown_tools(self._tools), "metrics": self._metrics})

    async def step(self, action: Sequence[Mapping[str, Any]]) -> Observation:
        answers = await asyncio.gather(*(self._called(str(one["name"]), one["arguments"]) for one in action))
        failed = sum(not is_right for is_right, _ in answers)
        self._calls, self._failed = self._calls + len(answers), self._failed + failed
        return Observation([text for _, text in answers], info={"failed": failed, "metrics": self._metrics})

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        """Do nothing: episodes share the tools."""

    @property
    def _metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self._calls), "failed_tool_calls": float(self._failed)}

    async def _called(self, name: str, arguments: Any) -> tuple[bool, str]:
        """Return True and the tool's answer, or False and the error that the policy is shown."""
        tool = self._tools.get(name)
        if tool is None:
            return False, f"error: tool {name} not exist"
        wrong = wrong_arguments(arguments, tool.parameters)
        if wrong:
            return False, wrong
        try:
            return True, await tool.call(arguments)
        except ToolFailed as error:
            return False, str(error)


def shown_tools(tools: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tools, or their classes, as a chat template shows them: as functions of OpenAI's API."""
    found = []
    for name, tool in tools.items():
        about = {key: getattr(tool, key, None) for key in ("description", "parameters")}
        kept = {key: value for key, value in about.items() if value and isinstance(value, str | Mapping)}
        found.append({"type": "function", "function": {"name": name, **kept}})
    return found


def wrong_arguments(arguments: Any, parameters: Mapping[str, Any]) -> str:
    """Errors in the arguments of a call, one per line; empty if there are none.

    >>> wrong_arguments({"code": 1}, _texts(code="", input=""))
    "parameters format error, 'code' should be a string\\nparameters format error, 'input' is missing"
    """
    if not isinstance(arguments, Mapping):
        return "parameters format error, arguments should be a JSON object"
    missing = {name: "is missing" for name in parameters.get("required", ()) if name not in arguments}
    texts = (name for name, about in parameters.get("properties", {}).items() if about.get("type") == "string")
    no_text = {name: "should be a string" for name in texts if not isinstance(arguments.get(name, ""), str)}
    return "\n".join(f"parameters format error, {name!r} {what}" for name, what in {**no_text, **missing}.items())
