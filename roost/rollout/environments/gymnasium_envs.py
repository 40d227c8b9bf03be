"""Gymnasium environments: independent episodes that are stepped together."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete, Text, Tuple

from roost.config.findings import bug
from roost.procs.user_code import DaemonThread
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Task

if TYPE_CHECKING:
    from roost.rollout.environments.gymnasium_slots import VectorSlots

T = TypeVar("T")
RESET, STEP = "reset", "step"
NO_SLOT = -1  # sent to callers that wait for a slot at shutdown


class GymnasiumEnvironments:
    """Environments of one ID in a gymnasium vector environment (1.1 or newer).

    The vector steps once every running episode has an action. While others wait, an episode that has not acted for
    `stall_s` is paused until it acts again.
    """

    def __init__(
        self,
        id: str,
        slots: int = 8,
        vectorization: str = "sync",
        stall_s: float = 30.0,
        as_text: bool = False,
        **make_kwargs: Any,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; episodes need at least 1")
        if vectorization not in ("sync", "async"):
            raise ValueError(
                f"vectorization is {vectorization!r}; write sync (one process) or async (one for each slot)"
            )
        self._id, self._slots, self._vectorization, self._stall_s = id, slots, vectorization, stall_s
        self._as_text, self._make_kwargs = as_text, make_kwargs
        self._vector: VectorSlots | None = None
        self._thread = DaemonThread("simulator")  # simulators may be bound to a thread
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(slots):
            self._free.put_nowait(slot)
        self._open: set[GymnasiumEnvironment] = set()
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._is_closed = False

    async def open(self) -> GymnasiumEnvironment:
        slot = NO_SLOT if self._is_closed else await self._free.get()
        if slot == NO_SLOT:
            self._free.put_nowait(NO_SLOT)  # for the next caller that waits
            raise RuntimeError("the environments were closed; open episodes before that")
        if self._work is None:
            self._work = asyncio.create_task(self._serve())
        environment = GymnasiumEnvironment(slot, self._fitted, self._described, self._changed, self._release)
        self._open.add(environment)
        return environment

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._free.put_nowait(NO_SLOT)
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        for environment in list(self._open):
            environment.lose(RuntimeError("the environments were closed during the episode"))
        try:
            await self._drop_vector()
        finally:
            self._thread.shutdown()

    def _release(self, environment: GymnasiumEnvironment) -> None:
        if environment in self._open:
            self._open.remove(environment)
            self._free.put_nowait(environment.slot)
            self._changed.set()

    async def _serve(self) -> None:
        while True:
            self._changed.clear()
            beginning = [each for each in self._open if each.wants_reset]
            if beginning:
                await self._make(beginning, _reset)
            elif acting := self._due():
                await self._make(acting, _step)
            else:
                await self._change()

    def _due(self) -> list[GymnasiumEnvironment]:
        """Environments with an action; empty while another running episode may still act."""
        acting = [each for each in self._open if each.wants_step]
        awaited = any(each.is_under_way and not each.wants_step and not each.is_stalled for each in self._open)
        return [] if awaited else acting

    async def _change(self) -> None:
        """Wait for a change; at most until the stall limit while an action waits."""
        now = asyncio.get_running_loop().time()
        waiting = [each.requested_at for each in self._open if each.wants_step]
        left = max(min(waiting) + self._stall_s - now, 0.0) if waiting else None
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except TimeoutError:
            for each in self._open:
                each.is_stalled = each.is_stalled or (each.is_under_way and not each.wants_step)

    async def _make(
        self,
        environments: list[GymnasiumEnvironment],
        make: Callable[[VectorSlots, Mapping[int, Any]], dict[int, Observation]],
    ) -> None:
        requests = {each.slot: each.accept() for each in environments}
        try:
            vector = await self._in_thread(self._made_vector) if self._vector is None else self._vector
            self._vector = vector
            shown = await self._in_thread(lambda: make(vector, {slot: ask.argument for slot, ask in requests.items()}))
        except Exception as error:  # the vector's state is unknown after an error: create a new one
            failure = RuntimeError(
                f"{self._id} failed, and with it all of its episodes: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            for each in self._open:
                if not each.wants_reset:  # a pending reset is served by the next vector
                    each.lose(failure)
            await self._drop_vector()
            return
        for each in environments:
            each.tell(requests[each.slot], shown[each.slot])

    def _described(self, shown: Observation) -> Observation:
        """Convert an observation for agents."""
        if not self._as_text:
            return shown
        return replace(shown, content=text_of(shown.content))

    def _made_vector(self) -> VectorSlots:
        try:
            from roost.rollout.environments.gymnasium_slots import VectorSlots
        except ImportError as error:
            raise ImportError(f"{error}; install gymnasium 1.1 or newer: pip install 'roost[agents]'") from error
        return VectorSlots(self._id, self._slots, self._vectorization, self._make_kwargs)

    def _fitted(self, action: Any) -> Any:
        return action if self._vector is None else fitted(self._vector.action_space, action)

    async def _drop_vector(self) -> None:
        vector, self._vector = self._vector, None
        if vector is None:
            return
        with contextlib.suppress(Exception):  # a simulator that failed may fail again when closed
            await self._in_thread(vector.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(work))


@dataclass(eq=False)
class Ask:
    """A request of an episode to its slot."""

    kind: str
    argument: Any  # the action, or the seed and the options
    at: float
    answer: asyncio.Future[Observation]


class GymnasiumEnvironment:
    """One slot, for one episode."""

    def __init__(
        self,
        slot: int,
        fitted: Callable[[Any], Any],
        described: Callable[[Observation], Observation],
        changed: asyncio.Event,
        release: Callable[[GymnasiumEnvironment], None],
    ) -> None:
        self.slot = slot
        self.is_under_way = False  # reset and not over, so that its next action is waited for
        self.is_stalled = False
        self._fitted, self._described, self._changed, self._release = fitted, described, changed, release
        self._ask: Ask | None = None
        self._is_accepted = False  # the request is being processed
        self._lost: Exception | None = None
        self._return = 0.0

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Start an episode; `options` of the task's data go to the environment."""
        if seed is not None and seed < 0:
            raise ValueError(f"the seed is {seed}; gymnasium takes none below 0")
        self._lost, self._return, self.is_under_way = None, 0.0, False
        return self._described(await self._request(RESET, (seed, task.data.get("options"))))

    async def step(self, action: Any) -> Observation:
        if self._lost is not None:
            raise self._lost
        if not self.is_under_way:
            raise RuntimeError("the episode is over, or has not begun; reset it before the next step")
        shown = await self._request(STEP, self._fitted(action))
        self._return += shown.reward
        return self._described(shown)

    async def score(self) -> float:
        """Sum of rewards so far."""
        return self._return

    async def close(self) -> None:
        self.lose(RuntimeError("the episode was closed during a call"))
        self._release(self)

    @property
    def wants_reset(self) -> bool:
        return self._wants(RESET)

    @property
    def wants_step(self) -> bool:
        return self._wants(STEP)

    @property
    def requested_at(self) -> float:
        return self._ask.at if self._ask is not None else 0.0

    def accept(self) -> Ask:
        """Return the pending request and mark it as being processed."""
        if self._ask is None:
            raise bug(f"slot {self.slot} has no request")
        self._is_accepted = True
        return self._ask

    def tell(self, ask: Ask, shown: Observation) -> None:
        self.is_under_way = not shown.is_over
        if not ask.answer.done():  # done if the episode was cancelled
            ask.answer.set_result(shown)

    def lose(self, error: Exception) -> None:
        """Fail the episode."""
        self._lost, self.is_under_way = error, False
        if self._ask is not None and not self._ask.answer.done():
            self._ask.answer.set_exception(error)

    def _wants(self, kind: str) -> bool:
        return self._ask is not None and self._ask.kind == kind and not self._is_accepted

    async def _request(self, kind: str, argument: Any) -> Observation:
        if self._ask is not None:
            raise RuntimeError(f"a {self._ask.kind} is still in progress; wait for one call before the next")
        loop = asyncio.get_running_loop()
        self._ask = Ask(kind, argument, loop.time(), loop.create_future())
        self._is_accepted = self.is_stalled = False
        self._changed.set()
        try:
            return await self._ask.answer
        finally:
            self._ask = None
            self._changed.set()


def _reset(
    vector: VectorSlots, requests: Mapping[int, tuple[int | None, Mapping[str, Any] | None]]
) -> dict[int, Observation]:
    """Reset slots together; a vector has one set of options, so those with their own are reset one by one."""
    plain = {slot: seed for slot, (seed, options) in requests.items() if not options}
    shown = vector.reset(plain) if plain else {}
    for slot, (seed, options) in requests.items():
        if options:
            shown |= vector.reset({slot: seed}, options)
    return shown


def _step(vector: VectorSlots, requests: Mapping[int, Any]) -> dict[int, Observation]:
    return vector.step(requests)


def text_of(content: Any) -> str:
    """Format an observation as text: numbers of an array in a row, parts of a mapping or tuple on lines.

    >>> text_of({"at": np.array([0.5, -2.0]), "has key": np.int64(1)})
    'at: 0.5 -2\\nhas key: 1'
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return "\n".join(f"{name}: {text_of(value)}" for name, value in content.items())
    if isinstance(content, tuple | list):
        return "\n".join(map(text_of, content))
    numbers = np.asarray(content)
    if numbers.ndim > 2:
        raise ValueError(f"an observation of shape {numbers.shape} cannot be shown as text; leave out as_text")
    return "\n".join(" ".join(f"{number:.4g}" for number in row) for row in np.atleast_2d(numbers).tolist())


def fitted(space: gymnasium.Space[Any], action: Any) -> Any:
    """Return the action as the space expects it. Raise for an invalid one, before it reaches the vector.

    Text is read as JSON, or as numbers with spaces or commas between them.

    >>> fitted(Box(-1, 1, (2,)), [0, 0.5]), fitted(Box(-1, 1, (2,)), "0 -0.5")
    (array([0. , 0.5], dtype=float32), array([ 0. , -0.5], dtype=float32))
    """
    try:
        found = _cast(space, action)
    except (TypeError, ValueError, KeyError):
        found = None
    if found is None or not space.contains(found):
        raise ValueError(f"{action!r} is not an action of {space}")
    return found


def _cast(space: gymnasium.Space[Any], action: Any) -> Any:
    if isinstance(action, str) and not isinstance(space, Text):
        action = _read(action)
    if isinstance(space, Box | MultiDiscrete | MultiBinary):
        return np.asarray(action, space.dtype)
    if isinstance(space, Tuple):
        return tuple(_cast(part, each) for part, each in zip(space.spaces, action, strict=True))
    if isinstance(space, Dict):
        return {name: _cast(part, action[name]) for name, part in space.spaces.items()}
    return action


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [float(part) for part in text.replace(",", " ").split()]
