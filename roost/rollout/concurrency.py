"""Concurrent episodes: slots, and a controller that sets their number by the load of the engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from roost.engines.protocol import EngineLoad

FULL = 0.95  # KV cache usage beyond which engines preempt sequences and recompute their tokens
ROOM = 0.85  # KV cache usage below which more episodes fit
QUEUED = 0.1  # share of the running requests; a short queue keeps an engine busy, a long one only makes samples stale
SHRINK = 0.8  # new limit, as a share of the running episodes
GROW = 1 / 16  # share of the limit, per poll; a new episode fills the KV cache only after several polls
HALF_EMPTY, GROW_FAST = 0.5, 1 / 4  # KV cache usage below which the limit grows faster, and by how much
MIN_EPISODES = 8  # lowest limit
POLL_S = 2.0
SILENT_POLLS = 30  # in a row, with episodes but no load of any engine; weight updates take less


class Slots:
    """A semaphore for episodes whose limit may change; a lower limit takes effect as running episodes end."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def used(self) -> int:
        return self._used

    @property
    def has_waiting(self) -> bool:
        """Return True if episodes wait for a slot."""
        return any(not each.done() for each in self._waiting)

    async def acquire(self) -> None:
        if self._used < self._limit and not self._waiting:
            self._used += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release()  # cancelled between the grant and its use
            raise

    def release(self) -> None:
        self._used -= 1
        self._grant()

    def resize(self, limit: int) -> None:
        self._limit = limit
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._used < self._limit:
            granted = self._waiting.popleft()
            if not granted.done():  # else its episode was cancelled
                self._used += 1
                granted.set_result(None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and most episodes that a controller may allow."""

    least: int
    most: int

    def within(self, limit: float) -> int:
        return int(min(self.most, max(self.least, limit)))


def next_limit(limit: int, used: int, has_waiting: bool, loads: Sequence[EngineLoad], bounds: Bounds) -> int:
    """The number of episodes to allow next, given the loads of the engines.

    If an engine is full or has a queue, the limit becomes four fifths of the running episodes, unless more of them run
    than allowed: then an earlier cut has yet to take effect. If all engines have room and episodes wait for a slot, the
    limit grows by a sixteenth, or by a quarter while half of the KV cache is free.

    >>> busy, idle = EngineLoad(running=60, waiting=20, kv_usage=0.97), EngineLoad(10, 0, 0.3)
    >>> bounds = Bounds(8, 1024)
    >>> next_limit(100, 80, True, [idle, busy], bounds), next_limit(100, 100, True, [idle], bounds)
    (64, 125)
    >>> next_limit(100, 40, False, [idle], bounds), next_limit(100, 100, True, [], bounds)
    (100, 100)
    """
    if not loads or not used:  # unknown load, or load that is not from episodes
        return limit
    if any(is_overloaded(load) for load in loads):
        return min(limit, bounds.within(SHRINK * used)) if used <= limit else limit
    fullest = max((load.kv_usage for load in loads if load.kv_usage is not None), default=HALF_EMPTY)
    if has_waiting and fullest < ROOM:
        growth = GROW_FAST if fullest < HALF_EMPTY else GROW
        return bounds.within(limit + max(1, int(growth * limit)))
    return limit


def is_overloaded(load: EngineLoad) -> bool:
    """Return True if an engine has more requests than it can run."""
    is_queued = load.waiting > max(1.0, QUEUED * load.running)
    return is_queued or (load.kv_usage is not None and load.kv_usage > FULL)


class ConcurrencyControl:
    """Resizes slots by the load of the engines, and collects metrics."""

    def __init__(
        self,
        slots: Slots,
        loads: Callable[[], Awaitable[Sequence[EngineLoad]]],
        most: int,
        note: Callable[[str], None],
    ) -> None:
        self._slots, self._loads, self._note = slots, loads, note
        self._bounds = Bounds(min(MIN_EPISODES, most), most)
        self._polled: list[Sequence[EngineLoad]] = []  # since the last `pop_metrics`
        self._silent = 0  # polls in a row without a load
        self._is_held = False
        self._is_overloaded = False  # at the last poll

    def pop_metrics(self) -> dict[str, float]:
        """The limit now, and the longest queue and the fullest KV cache since the last call."""
        polled, self._polled = self._polled, []
        known = [load.kv_usage for loads in polled for load in loads if load.kv_usage is not None]
        return {
            "concurrency/limit": float(self._slots.limit),
            "concurrency/waiting": float(max((sum(load.waiting for load in loads) for loads in polled), default=0)),
            **({"concurrency/kv_usage": max(known)} if known else {}),
        }

    async def poll(self) -> None:
        """Read the load of the engines and resize the slots."""
        loads, slots = await self._loads(), self._slots
        self._polled.append(loads)
        self._silent = self._silent + 1 if slots.used and not loads else 0
        if self._silent == SILENT_POLLS:
            self._note(f"no engine reports its load, so the number of concurrent episodes stays at {slots.limit}")
        was_overloaded, self._is_overloaded = self._is_overloaded, any(map(is_overloaded, loads))
        if self._is_overloaded and not was_overloaded:
            return  # a queue is short-lived after an update and at the end of a step
        slots.resize(next_limit(slots.limit, slots.used, slots.has_waiting, loads, self._bounds))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll every POLL_S while the body runs."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the limit while the body runs: the load then has other causes, such as an evaluation."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(POLL_S)
                if not self._is_held:
                    await self.poll()
        except Exception as error:  # an unexpected answer of a server must not end the run
            why = f"{type(error).__name__}: {error}"
            self._note(f"the number of concurrent episodes stays at {self._slots.limit}, as {why}")
