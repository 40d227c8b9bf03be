"""A user's plain function as a reward."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from roost.procs.user_code import begun, within
from roost.rollout.located import located
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.finite import finite
from roost.rollout.rewards.reward import Answer

OFFERED = ("answer", "task", "data", "text", "reward")  # the whole, and its parts


class Function:
    """Calls a function, asynchronous or not, with those of `answer`, `task`, `data`, `text` and `reward` that it names.

    >>> def short(text, most=10):
    ...     return len(text) <= most
    >>> from roost.rollout.scenario import Task
    >>> asyncio.run(Function(short, keys={"most": 3}).score(Answer(Task("say hello"), "hello")))
    0.0
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        keys: dict[str, Any] | None = None,
        threads: int = 4,
        limit_s: float = 60.0,
    ) -> None:
        if threads < 1 or limit_s <= 0:
            raise ValueError(f"threads is {threads} and limit_s {limit_s}; both must be above 0")
        self._function = located(function) if isinstance(function, str) else function
        self._name = getattr(self._function, "__name__", type(self._function).__name__)
        self._keys = dict(keys or {})
        self._named = named_arguments(self._function, self._keys)
        self._limit_s = limit_s
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._places = asyncio.Semaphore(threads)  # the limit counts from when there is one for it

    async def score(self, answer: Answer) -> float:
        offered = dict(zip(OFFERED, (answer, answer.task, answer.task.data, answer.text, answer.reward), strict=True))
        arguments = {name: offered[name] for name in self._named} | self._keys
        try:
            async with self._places if not self._is_async else contextlib.nullcontext():
                return finite(await within(self._limit_s, self._called(arguments)), self._name)
        except TimeoutError as error:
            raise RewardFailed(f"{self._name} was not over after {self._limit_s:g} s") from error

    async def close(self) -> None:
        """A thread cannot be ended; one that still runs is left behind."""

    async def _called(self, arguments: dict[str, Any]) -> Any:
        if self._is_async:
            return await self._function(**arguments)
        # A thread for each call: one that hangs takes none from the answers after it.
        result = await asyncio.wrap_future(begun(f"reward {self._name}", lambda: self._function(**arguments)))
        return await result if inspect.isawaitable(result) else result


def named_arguments(function: Callable[..., Any], keys: dict[str, Any]) -> tuple[str, ...]:
    """Which of what is offered a function takes; TypeError where it needs, or is given, anything else.

    >>> named_arguments(lambda text, data, most=1: 0, {"most": 2})
    ('data', 'text')
    """
    parameters = inspect.signature(function).parameters.values()
    by_name = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    missing = [name for name in needed if name not in by_name or name not in (*OFFERED, *keys)]
    if missing:
        raise TypeError(f"it needs {', '.join(missing)}; it may name {', '.join(OFFERED)}, and keys of the config")
    unknown = [name for name in keys if name not in by_name and not takes_any]
    if unknown:
        raise TypeError(f"it does not take {', '.join(unknown)}; it takes {', '.join(by_name) or 'nothing'}")
    return tuple(name for name in OFFERED if (name in by_name or takes_any) and name not in keys)
