"""The protocol of environments: one is opened for each episode and closed at its end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roost.procs.user_code import DaemonThread, in_daemon_thread
from roost.rollout.episode import Task


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation after a reset or a step."""

    content: Any  # text, an array, or a mapping of these, as the agent expects it
    reward: float = 0.0  # of the step alone
    is_over: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)  # `metrics` are reported
    is_truncated: bool = False  # over because of a limit, not because the task ended
    answer: str | None = None  # the policy's, for rewards to score instead of its last turn


class Environment(Protocol):
    """The environment of one episode. Calls are sequential: reset, steps, score, close.

    class Guess:
        async def reset(self, task, seed=None):
            self._wanted, self._tries = task.data["number"], 0
            return Observation("a number from 1 to 9?")

        async def step(self, action):
            self._tries += 1
            return Observation("higher" if int(action) < self._wanted else "lower", is_over=int(action) == self._wanted)

        async def score(self):
            return 1.0 / self._tries

        async def close(self):
            pass
    """

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Start the task; equal seeds give equal starts."""
        ...

    async def step(self, action: Any) -> Observation:
        """Take an action and return the observation."""
        ...

    async def score(self) -> float:
        """Return the reward of the episode as of now."""
        ...

    async def close(self) -> None:
        """Release resources; called once, however the episode ended."""
        ...


class Environments(Protocol):
    """Source of environments for many concurrent episodes: `_target_` names the class.

    One is created in each process that hosts environments, with the config's other keys. If the process has declared
    devices, such as robots, it also gets their configs, as `hardware`.
    """

    async def open(self) -> Environment:
        """Open an environment for an episode; wait while all are in use."""
        ...

    async def close(self) -> None:
        """Close everything: servers, simulators, connections."""
        ...


class Questions:
    """Environments for tasks that are questions: the first observation is the question, the one step is the answer.

    The answer is scored by `train.rewards`. An agent that takes no step is scored by the policy's last turn.
    """

    async def open(self) -> Environment:
        return Question()

    async def close(self) -> None:
        pass


class Question:
    """One question, which ends with its answer."""

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        return Observation(question_of(task))

    async def step(self, action: Any) -> Observation:
        return Observation("", is_over=True, answer=str(action))

    async def score(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass


def question_of(task: Task) -> str:
    """The last message of the user in a task from data; the name of any other task.

    >>> messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    >>> question_of(Task("sum", {"messages": messages})), question_of(Task("sum"))
    ('2+2?', 'sum')
    """
    users = [one.get("content") for one in task.data.get("messages", ()) if one.get("role") == "user"]
    return users[-1] if users and isinstance(users[-1], str) else task.data.get("prompt_text") or task.name


def is_blocking(environments: Any) -> bool:
    """Return True if `open` is not a coroutine function; then all methods are assumed to block.

    >>> class Plain:
    ...     def open(self): ...
    >>> is_blocking(Plain())
    True
    """
    return not inspect.iscoroutinefunction(environments.open)


class BlockingEnvironments:
    """Runs blocking environments in threads, so that the event loop is not blocked."""

    def __init__(self, environments: Any) -> None:
        self._environments = environments

    async def prepare(self) -> None:
        """Call `prepare`, if the environments have one."""
        await asyncio.wrap_future(
            in_daemon_thread("environments", getattr(self._environments, "prepare", lambda: None))
        )

    async def open(self) -> Environment:
        """Open an environment for an episode; `open` may block while all are in use."""
        thread = DaemonThread("environment")
        opening = thread.submit(self._environments.open)
        try:
            return BlockingEnvironment(await asyncio.shield(asyncio.wrap_future(opening)), thread)
        except asyncio.CancelledError:
            # It may still open after the cancellation, and must be closed then.
            thread.submit(lambda: opening.exception() or opening.result().close())
            thread.shutdown()
            raise
        except Exception:
            thread.shutdown()
            raise

    async def close(self) -> None:
        await asyncio.wrap_future(in_daemon_thread("environments", self._environments.close))


class BlockingEnvironment:
    """A blocking environment. Calls are sequential even after a cancellation: a started call is awaited."""

    def __init__(self, environment: Any, thread: DaemonThread) -> None:
        self._environment, self._thread = environment, thread

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        seen: Observation = await self._called(self._environment.reset, task, seed)
        return seen

    async def step(self, action: Any) -> Observation:
        seen: Observation = await self._called(self._environment.step, action)
        return seen

    async def score(self) -> float:
        return float(await self._called(self._environment.score))

    async def close(self) -> None:
        try:
            await self._called(self._environment.close)
        finally:
            self._thread.shutdown()

    async def _called(self, method: Callable[..., Any], *arguments: Any) -> Any:
        # Shielded, because cancellation would drop a queued call, and `close` must always run.
        call = self._thread.submit(method, *arguments)
        return await asyncio.shield(asyncio.wrap_future(call))


def make_environments(
    config: Mapping[str, Any] | Environments, hardware: Sequence[Mapping[str, Any]] = ()
) -> Environments:
    """Instantiate the `_target_` of a config, with the configs of declared hardware if there are any.

    An instance is returned as it is. Classes with blocking methods are wrapped to run in threads.
    """
    from hydra.utils import instantiate

    built: Environments
    if isinstance(config, Mapping):
        # Not passed through the config, where `$` or `???` in a declared value would be interpreted.
        more = {"hardware": [dict(each) for each in hardware]} if hardware else {}
        built = instantiate(dict(config), _convert_="all", _recursive_=False, _partial_=True)(**more)
    else:
        built = config
    return BlockingEnvironments(built) if is_blocking(built) else built
