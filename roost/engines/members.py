"""The engines of a fleet: state of each, routing of requests, restart limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from roost.engines.command import ServerSpec
from roost.engines.protocol import Capabilities, Engine, EngineLost, EnginesBehind
from roost.engines.server_process import Owner
from roost.engines.weights.probe import Probe
from roost.placement.routes import WeightRoute
from roost.trace.spans import MOST_SPANS, Clock, Span


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """Limit of restarts within a time window.

    >>> limit = RestartLimit(most=2, within_s=60.0)
    >>> earlier = deque([0.0, 50.0])
    >>> limit.allows(earlier, now=55.0), limit.allows(earlier, now=61.0)
    (False, True)
    """

    most: int = 3
    within_s: float = 600.0

    def allows(self, earlier: deque[float], now: float) -> bool:
        """Return True if one more restart is allowed; old entries are removed from `earlier`."""
        while earlier and now - earlier[0] >= self.within_s:
            earlier.popleft()
        return len(earlier) < self.most


class WorkTimes:
    """Counts requests in flight, and records the spans of time with at least one.

    >>> ticks = iter([0, 0, 10, 30, 40])
    >>> times = WorkTimes(Clock(monotonic=lambda: next(ticks), wall=lambda: 1000))
    >>> times.begin(); times.begin(); times.end(); times.end()
    >>> [(span.name, span.start_ns, span.end_ns) for span in times.drain()], times.total_ns()
    ([('generate', 1010, 1030)], 20)
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._since = 0
        self._total = 0
        self.in_flight = 0

    def begin(self, count: int = 1) -> None:
        if self.in_flight == 0:
            self._since = self._clock.now()
        self.in_flight += count

    def end(self, count: int = 1) -> None:
        self.in_flight -= count
        if self.in_flight == 0:
            now = self._clock.now()
            self._total += now - self._since
            self._spans.append(Span("generate", "call", self._since, now))

    def total_ns(self) -> int:
        """Nanoseconds with at least one request, up to now."""
        return self._total + (self._clock.now() - self._since if self.in_flight else 0)

    def drain(self) -> list[Span]:
        """Return and clear the spans that ended since the last call."""
        spans = list(self._spans)
        self._spans.clear()
        return spans


class EngineState(StrEnum):
    """State of an engine. Only a ready one gets requests."""

    STOPPED = "stopped"  # not started yet, or stopped while the learner has the device
    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    ASLEEP = "asleep"
    LOST = "lost"  # dead or hung; being restarted, or waiting until the device is free
    BEHIND = "behind"  # running, but without the weights of the current version
    FAILED = "failed"  # lost too often; not restarted
    LEAVING = "leaving"  # removed from the fleet, and being stopped


IDLE_EVERY_S = 0.01


class Member:
    """One engine of a fleet."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.state = EngineState.STOPPED
        self.version = 0
        self.adapter: str | None = None  # name of the adapter that is the policy, if any
        self.work = WorkTimes()
        self.capabilities = Capabilities(frozenset())
        self.useless_routes: set[WeightRoute] = set()  # weight routes that this server refused, or that did not work
        self.answers_before: tuple[float, ...] | None = None  # probe answers before the current update
        self.probe: Probe | None = None  # the learner's probe of its weights, if known
        self.baseline = 0.0  # difference of its probe answers from the learner's with equal weights
        self.restarts: deque[float] = deque()
        self.last_error = ""
        self.changing = asyncio.Lock()  # one change (start, update, sleep, restart) at a time
        self.is_joining = False  # its first start, which no update waits for
        self._engine: Engine | None = None

    @property
    def in_flight(self) -> int:
        return self.work.in_flight

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def spec(self) -> ServerSpec:
        return self.owner.spec

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineLost(f"{self.name} is {self.state}: {self.last_error or 'it has not been started'}")
        return self._engine

    @property
    def client(self) -> Engine | None:
        """Client of its server, or None if it is not connected."""
        return self._engine

    @property
    def is_connected(self) -> bool:
        return self._engine is not None

    async def connect(self, engine: Engine) -> None:
        """Connect to a ready server and query its capabilities."""
        await self.disconnect()
        self._engine = engine
        self.capabilities = await engine.capabilities()
        self.adapter = None

    async def idle(self, limit_s: float) -> None:
        """Wait until no request is in flight, for at most `limit_s` seconds."""
        end = asyncio.get_running_loop().time() + limit_s
        while self.in_flight and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(IDLE_EVERY_S)

    async def disconnect(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


MOST_EPISODES = 100_000


class Router:
    """Routes requests of an episode to the same engine, which has its prompts in the prefix cache.

    >>> router = Router()
    >>> router.choose({"a": 3, "b": 1}, episode="7")
    'b'
    >>> router.choose({"a": 0, "b": 9}, episode="7")
    'b'
    >>> router.choose({"a": 0}, episode="7")
    'a'
    """

    def __init__(self, most_episodes: int = MOST_EPISODES) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._most = most_episodes
        self._turn = 0

    def choose(self, loads: Mapping[str, int], episode: str | None = None) -> str | None:
        """Choose an engine by load; None if there is none.

        An episode whose engine is not ready moves to another one and stays there.
        """
        if not loads:
            return None
        home = self._homes.get(episode) if episode is not None else None
        chosen = home if home is not None and home in loads else self._least_loaded(loads)
        if episode is not None:
            self._homes[episode] = chosen
            self._homes.move_to_end(episode)
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)
        return chosen

    def forget(self, episode: str) -> None:
        """Forget an ended episode."""
        self._homes.pop(episode, None)

    def forget_engine(self, name: str) -> None:
        """Forget an engine that has left; its episodes move."""
        for episode in [episode for episode, home in self._homes.items() if home == name]:
            del self._homes[episode]

    def _least_loaded(self, loads: Mapping[str, int]) -> str:
        least = min(loads.values())
        equal = [name for name, load in loads.items() if load == least]
        # Round-robin among equally loaded engines, so that an idle fleet is used evenly.
        self._turn += 1
        return equal[self._turn % len(equal)]


T = TypeVar("T")


class FleetMembers:
    """Members of a fleet by name, and waits for their states."""

    def __init__(self, owners: Sequence[Owner]) -> None:
        names = [owner.spec.name for owner in owners]
        if not names:
            raise ValueError("a fleet needs at least one engine")
        if len(set(names)) != len(names):
            raise ValueError(f"the engines of a fleet need different names, not {names}")
        self.members = {owner.spec.name: Member(owner) for owner in owners}
        self.router = Router()
        self._changed = asyncio.Condition()
        self._is_closed = False

    def in_state(self, *states: EngineState) -> list[Member]:
        """Members in one of these states."""
        return [member for member in self.members.values() if member.state in states]

    def has(self, member: Member) -> bool:
        return self.members.get(member.name) is member

    def add(self, owner: Owner) -> Member:
        """Add a member, which is stopped."""
        if self._is_closed:
            raise EngineLost("the fleet is closed")
        if owner.spec.name in self.members:
            raise ValueError(f"the fleet has an engine {owner.spec.name} already; give this one another name")
        member = self.members[owner.spec.name] = Member(owner)
        return member

    async def remove(self, names: Collection[str], are_gone: bool = False) -> list[Member]:
        """Remove members and return them; they get no more requests. `are_gone`: their nodes are lost.

        Raise ValueError if requests would have no engine left.
        """
        unknown = [name for name in names if name not in self.members]
        if unknown:
            raise ValueError(f"the fleet has no engine {', '.join(unknown)}; it has {', '.join(self.members)}")
        leaving = [self.members[name] for name in names]
        staying = [member for member in self.members.values() if member not in leaving]
        if not staying:
            raise ValueError(f"{', '.join(names)} cannot be removed: a run needs at least one engine")
        has_ready = not are_gone and any(member.state is EngineState.READY for member in leaving)
        if has_ready and all(member.state in (EngineState.FAILED, EngineState.BEHIND) for member in staying):
            others = ", ".join(f"{member.name} is {member.state}" for member in staying)
            raise ValueError(
                f"{', '.join(names)} cannot be removed now: no other engine has the current weights ({others})"
            )
        for member in leaving:
            del self.members[member.name]
            self.router.forget_engine(member.name)
        await self.set_state(leaving, EngineState.LEAVING)
        return leaving

    async def set_state(self, members: Collection[Member], state: EngineState) -> None:
        """Set the state of members and wake all waiters."""
        async with self._changed:
            for member in members:
                member.state = state
                if state is EngineState.READY:
                    member.last_error = ""
            self._changed.notify_all()

    async def close(self) -> None:
        """Accept no more requests; waiting ones raise EngineLost."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @asynccontextmanager
    async def ready_member(self, episode: str | None, wait_s: float, count: int = 1) -> AsyncIterator[Member]:
        """Context with a ready member for a request of `count` completions; waits until there is one."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(self._can_stop_waiting)
            except TimeoutError:
                raise EngineLost(f"no engine was available for {wait_s:g} s: {self.describe()}") from None
            if self._is_closed:
                raise EngineLost("the fleet is closed")
            ready = {member.name: member.in_flight for member in self.in_state(EngineState.READY)}
            chosen = self.router.choose(ready, episode)
            if chosen is None:
                raise EngineLost(f"every engine has failed: {self.describe()}")
            member = self.members[chosen]
            member.work.begin(count)
        try:
            yield member
        finally:
            member.work.end(count)

    async def serve(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that needs engines and ends before the next update; raise EngineLost once none is left for it."""
        working = asyncio.ensure_future(work)
        unserved = asyncio.ensure_future(self._until_unserved())
        try:
            await asyncio.wait([working, unserved], return_when=asyncio.FIRST_COMPLETED)
            self._raise_unserved(is_over=_has_succeeded(working))
            if not working.done():
                unserved.result()  # the error
            return await working
        finally:
            working.cancel()
            unserved.cancel()
            await asyncio.gather(working, unserved, return_exceptions=True)

    async def _until_unserved(self) -> None:
        """Wait until no member will be ready before the next update; then raise EngineLost."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._all_in_state(EngineState.FAILED, EngineState.BEHIND))
            self._raise_unserved()

    def _raise_unserved(self, is_over: bool = False) -> None:
        """Raise if no member will be ready before the next update, or after it if the work `is_over`."""
        if self._all_in_state(EngineState.FAILED):
            raise EngineLost(f"every engine has failed: {self.describe()}")
        if not is_over and self._all_in_state(EngineState.FAILED, EngineState.BEHIND):
            raise EnginesBehind(f"no engine has the current weights, and none can get them: {self.describe()}")

    def describe(self) -> str:
        return "; ".join(
            f"{member.name} is {member.state}{f' ({member.last_error})' if member.last_error else ''}"
            for member in self.members.values()
        )

    def _can_stop_waiting(self) -> bool:
        return self._is_closed or self._all_in_state(EngineState.FAILED) or bool(self.in_state(EngineState.READY))

    def _all_in_state(self, *states: EngineState) -> bool:
        return len(self.in_state(*states)) == len(self.members)


def _has_succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
