"""The loop: take groups, learn from them, give the engines the new policy. All modes are this loop.

Synchronous and collocated runs have a lag of 0, so that a step begins its groups only after the last update, and waits
for all of them. With a lag the groups of later steps are under way while the learner learns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from roost.engines.fleet import Fleet
from roost.learner.sample import Floats, Sample
from roost.learner.token_weights import Totals
from roost.rollout.episode import Group
from roost.rollout.order import draw_seed
from roost.runtime.trace.spans import SpanRecorder
from roost.spec.training import Behaviour, Estimator, TrainSettings
from roost.trainer.batch import Batch, batch_of, lags, minibatches, with_advantages, with_scores
from roost.trainer.checkpoints import TrainerState
from roost.trainer.feed import Feed
from roost.trainer.figures import Learnt, of_all, of_groups, of_time
from roost.trainer.learners import Learners, totals_of
from roost.trainer.turns import Turns

Figures = dict[str, float]


class LagExceeded(RuntimeError):
    """A token was made by a policy that is older than the run allows: a bug, as the feed prevents it."""


@dataclass(frozen=True)
class Models:
    """Everybody who has a model."""

    fleet: Fleet
    policy: Learners
    critic: Learners | None = None
    reference: Learners | None = None  # None with an adapter: the policy without it is the reference


class Watcher(Protocol):
    """Who is told how the run goes."""

    def phase(self, name: str, total: int | None = None) -> None: ...
    def step_done(self, state: TrainerState, figures: Mapping[str, float], groups: Sequence[Group]) -> None: ...


@dataclass
class Loop:
    """One run of the algorithm; what surrounds it (checkpoints, evaluation, people) hangs on `after_step`."""

    settings: TrainSettings
    models: Models
    feed: Feed
    turns: Turns
    recorder: SpanRecorder
    watcher: Watcher
    state: TrainerState
    after_learning: Callable[[TrainerState], Awaitable[None]]  # the learner still has its devices
    after_step: Callable[[TrainerState], Awaitable[None]]  # the engines have the new policy
    is_stopped: Callable[[], bool] = lambda: False
    _seconds: dict[str, float] = field(default_factory=dict)

    async def run(self) -> TrainerState:
        """Do the steps that are left, or those until somebody stops it."""
        while self.state.step < self.settings.steps and not self.is_stopped():
            await self._step()
        return self.state

    async def _step(self) -> None:
        began = time.perf_counter()
        self._seconds = {}
        version = self.state.version
        self.feed.begin(version)
        groups: list[Group] = []
        learnt: list[Learnt] = []
        parts = 1 if not self._streams else self.settings.minibatches
        for part in range(parts):
            taken = await self._take(version, parts)
            if part == 0:
                async with self._phase("switch"):
                    await self.turns.to_learner(self.models.fleet, self.models.policy)
            learnt.append(await self._learn(batch_of(taken), self.settings.minibatches // parts, part))
            groups += taken
        figures = of_groups(groups, version, self.feed.pop_tally()) | of_all(learnt)
        state = TrainerState(self.state.step + 1, version + 1, self.feed.position)
        await self.after_learning(state)
        async with self._phase("sync"):
            release = await self.models.policy.release(version + 1)
            await self.turns.to_engines(self.models.fleet, self.models.policy, release)
        self.state = state
        figures |= of_time(self._seconds, time.perf_counter() - began, figures["tokens/generated"])
        self.watcher.step_done(self.state, figures, groups)
        await self.after_step(self.state)

    @property
    def _streams(self) -> bool:
        """Whether a minibatch is learnt from while the groups of the next are still being generated.

        That needs engines that go on meanwhile, minibatches of whole groups that are gone through once, nothing that is
        taken over all samples of a step, and log-probabilities that do not have to be those of before its first part.
        """
        settings = self.settings
        is_whole = settings.collect.groups % settings.minibatches == 0 and settings.epochs == 1
        is_apart = settings.advantage.estimator not in (Estimator.REINFORCE, Estimator.GAE)
        can_learn_late = settings.learner.loss.behaviour is not Behaviour.RECOMPUTED
        return settings.minibatches > 1 and is_whole and is_apart and can_learn_late and not self.turns.are_taken

    async def _take(self, version: int, parts: int) -> list[Group]:
        collect = self.settings.collect
        async with self._phase("generate", collect.groups // parts * collect.group_size):
            groups = await self.feed.take(version, collect.groups // parts)
        oldest = max(lags(groups, version), default=0)
        if oldest > self.settings.max_policy_lag:
            raise LagExceeded(f"a token is {oldest} versions old; the run allows {self.settings.max_policy_lag}")
        return groups

    async def _learn(self, batch: Batch, cut_into: int, part: int) -> Learnt:
        settings = self.settings
        async with self._phase("score"):
            batch = await self._scored(batch)
        chosen, selection, alone = with_advantages(batch, settings.advantage)
        told: list[Mapping[str, float]] = []
        async with self._phase("learn"):
            for epoch in range(settings.epochs if len(chosen) else 0):
                seed = draw_seed(settings.seed, self.state.step, part, epoch)
                for samples in minibatches(chosen, cut_into, seed):
                    totals = totals_of(samples, settings.draw.max_tokens)
                    if totals.tokens:
                        told.append(await self._optimizer_step(samples, totals))
        return Learnt(batch.samples, selection, alone, tuple(told))

    async def _optimizer_step(self, part: Sequence[Sample], totals: Totals) -> Figures:
        if self.models.critic is None:
            return await self.models.policy.learn(part, totals)
        policy, critic = await asyncio.gather(
            self.models.policy.learn(part, totals), self.models.critic.learn(part, totals)
        )
        return policy | {f"critic/{name}": value for name, value in critic.items()}

    async def _scored(self, batch: Batch) -> Batch:
        """What the models say of the samples before the first step on them."""
        loss = self.settings.learner.loss
        old: list[Floats] | None = None
        reference: list[Floats] | None = None
        values: list[Floats] | None = None
        if loss.behaviour is not Behaviour.ENGINE:
            old = await self.models.policy.score(batch.samples)
        if loss.kl_coefficient:
            scorer = self.models.reference or self.models.policy
            reference = await scorer.score(batch.samples, self.models.reference is None)
        if self.models.critic is not None and self.settings.advantage.estimator is Estimator.GAE:
            values = await self.models.critic.values(batch.samples)
        return with_scores(batch, old, reference, values)

    @asynccontextmanager
    async def _phase(self, name: str, total: int | None = None) -> AsyncIterator[None]:
        self.watcher.phase(name, total)
        began = time.perf_counter()
        with self.recorder.timer(name, "work", True, step=self.state.step):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began
