"""Score answers with local rewards and groups of reward workers; and the worker itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

from roost.procs.user_code import call_async, within
from roost.rollout.env_worker import import_from
from roost.rollout.episode import Decode, Episode, LazyMessages, Split, token_numbers
from roost.rollout.episode_runner import EpisodeFailed, EpisodeRequest, EpisodeRunner, release_slot, whole_traceback
from roost.rollout.rewards.config import Route, Routing, domain_of, make_reward
from roost.rollout.rewards.reward import Answer, Reward, RewardFailed, Scored, as_scored, finite, prepare_reward
from roost.runtime.worker import Worker, WorkerGroup
from roost.transport.context import Failure, FailureKind, WaitedTooLong, WorkerFailed

GATHER_S = 0.005  # batching delay: the episodes of a group often end together
LARGEST = 64  # answers per call
RETRY_S = 0.1  # between calls to a worker that is restarting


class _Waiting(NamedTuple):
    answer: Answer
    score: asyncio.Future[Any]


def spread(loads: Mapping[int, int], count: int) -> list[int]:
    """Choose a rank for each of `count` answers: always the least loaded one.

    >>> spread({0: 3, 1: 1}, 4)
    [1, 1, 0, 1]
    """
    filled = dict(loads)
    ranks = []
    for _ in range(count):
        rank = min(filled, key=lambda rank: (filled[rank], rank))
        filled[rank] += 1
        ranks.append(rank)
    return ranks


class RemoteReward:
    """Sends answers to a group of `RewardWorker`s, batched and balanced by load.

    Answers of a worker that died are scored once more by another one.
    """

    def __init__(self, group: WorkerGroup, gather_s: float = GATHER_S, largest: int = LARGEST) -> None:
        self._group, self._gather_s, self._largest = group, gather_s, largest
        self._loads = dict.fromkeys(range(group.world_size), 0)  # of ranks not lost for good
        self._gathered: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def prepare(self) -> None:
        wrong = [error for error in await self._group.prepare() if error]
        if wrong:
            raise RewardFailed(wrong[0])

    async def score(self, answer: Answer) -> Any:
        if self._is_closed:
            raise self._closed()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(answer, loop.create_future())
        self._gathered.append(waiting)
        if self._timer is None:
            self._timer = loop.call_later(self._gather_s, self._send)
        return await waiting.score

    async def counts(self) -> dict[str, int]:
        """Sum of the workers' counters."""
        total: dict[str, int] = defaultdict(int)
        if self._loads:
            for one in await self._group.execute_on(list(self._loads)).counts():
                for name, count in one.items():
                    total[name] += count
        return dict(total)

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            call.cancel()
        _fail(self._gathered, self._closed())
        if self._loads:
            with contextlib.suppress(WorkerFailed, WaitedTooLong):  # a dead worker has nothing to close
                await self._group.execute_on(list(self._loads)).close_reward()

    def _closed(self) -> RewardFailed:
        return RewardFailed(f"{self._group.name} was closed")

    def _send(self) -> None:
        """Send the gathered answers."""
        wanted = [waiting for waiting in self._gathered if not waiting.score.done()]  # some were cancelled
        self._gathered, self._timer = [], None
        self._distribute(wanted, self._loads)

    def _distribute(self, batch: Sequence[_Waiting], loads: Mapping[int, int], lost: str | None = None) -> None:
        """Divide answers among workers; `lost` is the failure that they were lost to before, if any."""
        if not loads:
            _fail(batch, RewardFailed(f"no worker of {self._group.name} is left"))
            return
        shares: dict[int, list[_Waiting]] = defaultdict(list)
        for rank, waiting in zip(spread(loads, len(batch)), batch, strict=True):
            shares[rank].append(waiting)
        for rank, share in shares.items():
            for begin in range(0, len(share), self._largest):
                self._call(rank, share[begin : begin + self._largest], lost)

    def _call(self, rank: int, batch: Sequence[_Waiting], lost: str | None) -> None:
        self._loads[rank] += len(batch)
        call = asyncio.create_task(self._answered(rank, batch, lost))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answered(self, rank: int, batch: Sequence[_Waiting], lost: str | None) -> None:
        try:
            try:
                returned = await self._group.execute_on(rank).score([waiting.answer for waiting in batch])
                _settle(batch, returned[0])
            except WorkerFailed as error:
                await self._lost(rank, batch, lost, error)
        except Exception as error:  # any error goes to the callers that wait
            _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, self._closed())
            raise
        finally:
            if rank in self._loads:
                self._loads[rank] -= len(batch)

    async def _lost(self, rank: int, batch: Sequence[_Waiting], lost: str | None, error: WorkerFailed) -> None:
        own = [failure for failure in error.failures if failure.address == (self._group.name, rank)]
        if not own:
            _fail(batch, error)  # another worker of the job failed, which ends the run
            return
        restarts = _will_restart(own)
        if restarts is False:
            self._loads.pop(rank, None)
        death = own[0].summary
        if restarts is None or lost not in (None, death):
            _fail(batch, RewardFailed(f"its worker {self._group.name}:{rank} was lost: {death}"))
            return
        if lost == death:  # calls fail with the same error until the worker has restarted
            await asyncio.sleep(RETRY_S)
        others = {other: load for other, load in self._loads.items() if other != rank}
        wanted = [waiting for waiting in batch if not waiting.score.done()]
        self._distribute(wanted, others or self._loads, death)


def _will_restart(failures: Sequence[Failure]) -> bool | None:
    """Return True if a dead worker restarts, False if not; None if it is alive and only raised an error."""
    ends = [failure for failure in failures if failure.kind is not FailureKind.RAISED]
    return any(failure.will_restart for failure in ends) if ends else None


def _settle(batch: Sequence[_Waiting], returned: Sequence[Any]) -> None:
    for waiting, score in zip(batch, returned, strict=True):
        if isinstance(score, str):
            _fail([waiting], RewardFailed(score))
        elif not waiting.score.done():
            waiting.score.set_result(score)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.score.done():
            waiting.score.set_exception(error)


LIMIT_S = 600.0
CLOSE_LIMIT_S = 30.0
COUNTS_LIMIT_S = 10.0  # metrics only: not worth a long wait


class BatchedReward:
    """Collects answers that arrive within `gather_s` and scores them together, with `score_batch`."""

    def __init__(self, reward: Any, gather_s: float = GATHER_S, largest: int = LARGEST) -> None:
        self._reward, self._gather_s, self._largest = reward, gather_s, largest
        self._gathered: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> Any:
        return getattr(self._reward, "counts", {})

    async def prepare(self) -> None:
        await prepare_reward(self._reward)

    async def score(self, answer: Answer) -> Any:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(answer, loop.create_future())
        self._gathered.append(waiting)
        if len(self._gathered) == 1:
            loop.call_later(self._gather_s, self._send)
        return await waiting.score

    async def close(self) -> None:
        for task in self._calls:
            task.cancel()
        _fail(self._gathered, RewardFailed("it was closed"))
        await call_async(self._reward.close)

    def _send(self) -> None:
        wanted = [waiting for waiting in self._gathered if not waiting.score.done()]  # some were cancelled
        self._gathered = []
        for begin in range(0, len(wanted), self._largest):
            task = asyncio.create_task(self._answered(wanted[begin : begin + self._largest]))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answered(self, batch: Sequence[_Waiting]) -> None:
        try:
            _settle(batch, await score_batch(self._reward, [waiting.answer for waiting in batch]))
        except Exception as error:  # anything a user's reward raises
            _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, RewardFailed("it was closed"))
            raise


async def score_batch(reward: Any, answers: Sequence[Answer]) -> Sequence[Any]:
    """Call `score_batch` of a reward, and check that it scores every answer."""
    found = list(await call_async(reward.score_batch, answers))
    if len(found) != len(answers):
        raise RewardFailed(f"score_batch returned {len(found)} rewards for {len(answers)} answers")
    return found


CACHED = 10_000  # answers


class CachedReward:
    """Scores equal answers to equal tasks once; equal ones in flight wait for the first."""

    def __init__(self, reward: Reward, most: int = CACHED) -> None:
        self._reward, self._most = reward, most
        self._found: dict[bytes, asyncio.Task[Any]] = {}  # the oldest first
        self._hits = 0

    async def counts(self) -> dict[str, int]:
        return {**await _counts(self._reward), "cached": self._hits}

    async def prepare(self) -> None:
        await prepare_reward(self._reward)

    async def score(self, answer: Answer) -> Any:
        key = answer_key(answer)
        scoring = self._found.get(key)
        if scoring is None:
            scoring = asyncio.create_task(self._scored(key, answer))
            self._found[key] = scoring
            if len(self._found) > self._most:
                del self._found[next(iter(self._found))]
        else:
            self._hits += 1
        return await asyncio.shield(scoring)  # others may wait for it when this caller is cancelled

    async def close(self) -> None:
        for scoring in self._found.values():
            scoring.cancel()
        await call_async(self._reward.close)

    async def _scored(self, key: bytes, answer: Answer) -> Any:
        try:
            return await call_async(self._reward.score, answer)
        except BaseException:
            self._found.pop(key, None)  # the next caller scores it again
            raise


def answer_key(answer: Answer) -> bytes:
    """Digest of everything in an answer that a reward may read.

    >>> from roost.rollout.episode import Task
    >>> one, other = (Answer(Task("1+1", {"answer": right}), "2") for right in (2, 3))
    >>> answer_key(one) == answer_key(one), answer_key(one) == answer_key(other)
    (True, False)
    """
    task, messages = answer.task, [(message["role"], message["content"]) for message in answer.messages]
    data = sorted((str(name), repr(value)) for name, value in task.data.items())
    read = (task.name, task.tag, data, answer.text, answer.reward, messages, answer.turns, answer.split)
    return hashlib.blake2b(repr(read).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Rewards:
    """Scores answers with the rewards that match their tag: local ones, and groups of `RewardWorker`s by name."""

    def __init__(
        self,
        routing: Routing,
        local: Mapping[str, Reward],
        groups: Mapping[str, WorkerGroup] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.routing, self._limit_s = routing, limit_s
        self._counted: dict[str, int] = {}
        batched = {name: BatchedReward(one) if hasattr(one, "score_batch") else one for name, one in local.items()}
        remote = {name: RemoteReward(group) for name, group in (groups or {}).items()}
        self._rewards: dict[str, Reward] = {**batched, **remote}
        for route in routing.routes:
            if route.is_cached and route.name in self._rewards:
                self._rewards[route.name] = CachedReward(self._rewards[route.name])
        missing = [route.name for route in routing.routes if route.name not in self._rewards]
        if missing:
            raise ValueError(f"there is no reward {', '.join(missing)}; there is {', '.join(self._rewards) or 'none'}")

    async def prepare(self) -> None:
        """Prepare all rewards, e.g. load models. Raise RewardFailed if one cannot."""
        await asyncio.gather(*(_prepared(name, reward) for name, reward in self._rewards.items()))

    async def score(self, answer: Answer) -> Scored:
        """Score an answer. Raise RewardFailed if a matching reward fails."""
        tag, domain = answer.task.tag, domain_of(answer.task)
        routes = self.routing.of(tag, domain)
        # Wait for all, even if one fails, so that none keeps running unnoticed.
        found = await asyncio.gather(*(self._scored(route, answer) for route in routes), return_exceptions=True)
        scored: dict[Route, Scored] = {}
        for route, one in zip(routes, found, strict=True):
            if isinstance(one, BaseException):
                raise one
            scored[route] = one
        rewards = {route.name: one.reward for route, one in scored.items()}
        total = finite(self.routing.total(tag, answer.reward, rewards, domain), "the sum of all rewards")
        inner = {f"{route.name}/{name}": part for route, one in scored.items() for name, part in one.parts.items()}
        by_turn = [(route.weight, one.turn_rewards) for route, one in scored.items() if one.turn_rewards]
        turn_rewards = tuple(
            sum(weight * one[turn] for weight, one in by_turn) for turn in range(answer.turns if by_turn else 0)
        )
        return Scored(total, self.routing.parts(tag, answer.reward, rewards, domain) | inner, turn_rewards)

    async def counts(self) -> dict[str, dict[str, int]]:
        """Counters of the rewards, such as timeouts; nothing for one that fails to return them."""
        returned = await asyncio.gather(*map(_counts, self._rewards.values()), return_exceptions=True)
        found = zip(self._rewards, returned, strict=True)
        return {name: counts for name, counts in found if not isinstance(counts, BaseException) and counts}

    async def new_counts(self) -> dict[str, int]:
        """Counters since the last call, by metric name."""
        every = await self.counts()
        now = {f"reward/{name}/count/{key}": count for name, counts in every.items() for key, count in counts.items()}
        # A restarted worker counts from 0.
        new = {name: count - min(count, self._counted.get(name, 0)) for name, count in now.items()}
        self._counted |= now
        return new

    async def close(self) -> None:
        """Close all rewards. Errors are ignored, so that the others close and the run is not lost."""
        closing = (within(CLOSE_LIMIT_S, call_async(reward.close)) for reward in self._rewards.values())
        await asyncio.gather(*closing, return_exceptions=True)

    async def _scored(self, route: Route, answer: Answer) -> Scored:
        try:
            value = await within(self._limit_s, call_async(self._rewards[route.name].score, answer))
            return as_scored(value, route.name, answer.turns)
        except WorkerFailed:
            raise  # a worker other than a reward's failed: more is lost than this answer
        except RewardFailed as error:
            raise RewardFailed(f"reward {route.name}: {error}") from error
        except Exception as error:  # anything a user's reward raises
            raise RewardFailed(f"reward {route.name}: {type(error).__name__}: {error}") from error


async def _counts(reward: Reward) -> dict[str, int]:
    counts = getattr(reward, "counts", {})
    returned = await within(COUNTS_LIMIT_S, counts()) if inspect.iscoroutinefunction(counts) else counts
    return {str(key): int(count) for key, count in dict(returned).items()}


async def _prepared(name: str, reward: Reward) -> None:
    try:
        await prepare_reward(reward)
    except RewardFailed as error:
        raise RewardFailed(f"reward {name}: {error}") from error


class RewardedEpisodeRunner:
    """Runs episodes with another runner, then scores them with rewards; `decode` decodes the tokens of messages."""

    def __init__(
        self, runner: EpisodeRunner, rewards: Rewards, decode: Decode = token_numbers, split: Split = Split.TRAIN
    ) -> None:
        self._runner, self._rewards, self._decode, self._split = runner, rewards, decode, split

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        episode = await self._runner.run_episode(request)
        given = episode.score
        release_slot()  # let engines run other episodes meanwhile
        turns = len(given.turn_rewards) or episode.num_turns
        try:
            text = given.shown if given.answer is None else given.answer
            messages = LazyMessages(episode, self._decode)
            scored = await self._rewards.score(
                Answer(request.task, text, given.reward, messages, turns, episode.completion_tokens, self._split)
            )
        except RewardFailed as error:
            raise EpisodeFailed(f"it could not be scored: {error}", whole_traceback(error)) from error
        weight = self._rewards.routing.own_weight(request.task.tag, domain_of(request.task))
        own = [weight * reward for reward in given.turn_rewards] if weight else []
        by_turn = zip_longest(own, scored.turn_rewards, fillvalue=0.0)
        turn_rewards = tuple(one + other for one, other in by_turn)
        return replace(
            episode,
            score=replace(
                given, reward=scored.reward, turn_rewards=turn_rewards, parts={**given.parts, **scored.parts}
            ),
        )


AT_A_TIME = 256  # answers that a worker scores concurrently; a reward may have a lower limit


class RewardWorker(Worker):
    """Scores answers with one reward. Errors of an answer are returned, and do not fail the worker."""

    def __init__(
        self,
        name: str,
        keys: Mapping[str, Any],
        paths: Sequence[str] = (),
        at_a_time: int = AT_A_TIME,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__()
        import_from(paths)
        self._name, self._limit_s = name, limit_s
        self._reward = make_reward(name, keys)
        self._slots = asyncio.Semaphore(at_a_time)

    async def prepare(self) -> str:
        """Prepare the reward. Return the error; empty if there is none."""
        try:
            await prepare_reward(self._reward)
        except Exception as error:  # anything a user's reward raises
            return _reason(error)
        return ""

    async def score(self, answers: Sequence[Answer]) -> list[Scored | str]:
        """Return for each answer its reward, or the error as text."""
        if not hasattr(self._reward, "score_batch"):
            return list(await asyncio.gather(*map(self._scored, answers)))
        async with self._slots:
            try:
                found = await within(self._limit_s, score_batch(self._reward, answers))
                return [as_scored(one, self._name, answer.turns) for one, answer in zip(found, answers, strict=True)]
            except Exception as error:  # anything a user's reward raises
                return [_reason(error)] * len(answers)

    async def counts(self) -> dict[str, int]:
        return dict(getattr(self._reward, "counts", {}))

    async def close_reward(self) -> None:
        await call_async(self._reward.close)

    async def _scored(self, answer: Answer) -> Scored | str:
        async with self._slots:
            try:
                # The driver has timed out by then, but a hanging answer must free its slot.
                value = await within(self._limit_s, call_async(self._reward.score, answer))
                return as_scored(value, self._name, answer.turns)
            except Exception as error:  # anything a user's reward raises
                return _reason(error)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, RewardFailed) else f"{type(error).__name__}: {error}"
