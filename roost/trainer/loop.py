"""The training loop: take groups, learn from them, sync weights to the engines. All modes use this loop.

With max_staleness 0 (synchronous and collocated runs) a step starts its groups after the last update and waits for all
of them. With a larger value, groups of later steps are generated while the learner trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from roost.config.train import AdvantageEstimator, OldLogprobs, RewardScope, TrainSettings, Whitening
from roost.engines.fleet import Fleet
from roost.engines.residency import EngineSwitch
from roost.engines.weights.update import WeightUpdate
from roost.learner.advantages import adapted_kl_coef
from roost.learner.losses import OVER_KL, REJECTED, Totals
from roost.learner.residence import GRADIENTS, MOMENTS, PARTS, WEIGHTS
from roost.learner.sample import APART, Floats, Sample
from roost.procs.signals import Preempted
from roost.rollout.episode import Group
from roost.rollout.order import sample_seed
from roost.trace.spans import SpanRecorder
from roost.trainer.batch import (
    FRESH_LEAST,
    Batch,
    batch_of,
    continuations,
    down_sampled,
    fresh,
    mean_kl,
    minibatches,
    reward_of_tag,
    staleness_of,
    taught_by,
    with_advantages,
    with_scores,
    with_teachers,
    with_values,
)
from roost.trainer.feed import Feed
from roost.trainer.guards import (
    SKIPPED,
    Diverged,
    MismatchGuard,
    SkippedSteps,
    check_mismatch,
    check_skipped,
    explained,
)
from roost.trainer.learners import Learners, totals_of
from roost.trainer.metrics import (
    Learnt,
    TokenRatio,
    compared_tokens,
    group_metrics,
    largest_ratios,
    learnt_metrics,
    mismatch_metrics,
    reward_metrics,
    time_metrics,
)
from roost.trainer.records.checkpoints import TrainerState

Figures = dict[str, float]
DROPPED = "steps/dropped"  # minibatches left out because an earlier one of the step exceeded early_stop_kl


async def no_metrics() -> Mapping[str, float]:
    return {}


async def await_all(work: Coroutine[Any, Any, Any]) -> Any:
    """Await work that cannot be preempted."""
    return await work


class StalenessExceeded(RuntimeError):
    """A token comes from a policy version older than the run allows. This is a bug: the feed prevents it."""


@dataclass(frozen=True)
class Models:
    """Engines and learners of a job."""

    fleet: Fleet
    policy: Learners
    critic: Learners | None = None
    reference: Learners | None = None  # None with an adapter: the policy without it is the reference
    inference: Learners | None = None  # computes old log-probs with the weights of the start of a step
    sharing: Sequence[Learners] = ()  # learners that share a device with an engine
    teachers: Mapping[str, Learners] = field(default_factory=dict)

    @property
    def learners(self) -> list[Learners]:
        """All learners that the job has."""
        possible = (self.policy, self.critic, self.reference, self.inference, *self.teachers.values())
        return [learners for learners in possible if learners is not None]

    @property
    def trained(self) -> list[Learners]:
        """The policy, and the critic if there is one."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def saved(self, settings: TrainSettings) -> list[Learners]:
        """Learners whose state is in checkpoints: those that are trained, and a reference that moves."""
        moving = self.reference if settings.moves_reference else None
        return self.trained if moving is None else [*self.trained, moving]

    async def follow_policy(self) -> None:
        """Copy the policy's weights to `inference`, if there is one."""
        if self.inference is not None:
            await self.policy.give_weights(self.inference)


@dataclass(frozen=True, eq=False)
class Ready:
    """Groups with a scored batch, ready to learn from."""

    groups: list[Group]
    batch: Batch
    down_sampled: int = 0  # episodes of the groups that are not in the batch


class Watcher(Protocol):
    """Receives the phase and the metrics of each step."""

    def phase(self, name: str, total: int | None = None) -> None: ...
    def step_done(
        self,
        state: TrainerState,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        tokens: Sequence[TokenRatio] = (),
    ) -> None: ...


@dataclass
class Loop:
    """One run of the algorithm. Checkpoints and evaluation are hooked in through `after_learning` and `after_step`."""

    settings: TrainSettings
    models: Models
    feed: Feed
    switch: DeviceSwitch
    recorder: SpanRecorder
    watcher: Watcher
    state: TrainerState
    after_learning: Callable[[TrainerState], Awaitable[None]]  # called while the learner still holds its devices
    after_step: Callable[[TrainerState], Awaitable[None]]  # called when the engines have the new policy
    is_stopped: Callable[[], bool] = lambda: False
    unless_preempted: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]] = await_all  # raises Preempted
    more_metrics: Callable[[], Awaitable[Mapping[str, float]]] = no_metrics  # extra metrics of a step
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    guard: MismatchGuard = field(default_factory=MismatchGuard)
    _seconds: dict[str, float] = field(default_factory=dict)
    _is_stopped_early: bool = False  # the policy does not learn from the rest of this step

    async def run(self) -> TrainerState:
        """Run the remaining steps, or until stopped; on preemption a step that has learnt nothing yet is dropped."""
        with contextlib.suppress(Preempted):
            while self.state.step < self.settings.step_count and not self.is_stopped():
                await self._step()
        return self.state

    async def _step(self) -> None:
        began = time.perf_counter()
        self._seconds, self._is_stopped_early = {}, False
        version = self.state.version
        self.feed.begin(version)
        groups, learnt, kl = await self._learn_all(version)
        among = self.settings.advantage.compared_among
        metrics = group_metrics(groups, version, self.feed.pop_tally(), among)
        metrics |= reward_metrics(groups, self.settings.rewards, among)
        # Parts whose old log-probs are of this version: later parts of a stream are scored after the first was learnt.
        unmoved = len(learnt) if not self._streams or self.models.inference is not None else 1
        are_same_weights = metrics["staleness/max"] == 0 and unmoved == len(learnt)
        metrics |= learnt_metrics(learnt, are_same_weights, version, unmoved, self.settings.learner.loss)
        tokens = largest_ratios(compared_tokens(learnt, version))
        used = self.settings.advantage.kl_penalty_coef if self.state.kl_coef is None else self.state.kl_coef
        if kl is not None:
            metrics |= {"loss/kl_penalty": kl, "loss/kl_penalty_coef": used}
        kl_coef = self._next_kl_coef(used, kl, sum(len(part.samples) for part in learnt))
        state = TrainerState(self.state.step + 1, version + 1, self.feed.position, kl_coef)
        try:
            check_skipped(self.skipped, self.settings)
            await self._move_reference(state.step)
            await self.after_learning(state)
            async with self._phase("sync"):
                await self._sync(version + 1)
        except Diverged as error:
            metrics |= time_metrics(self._seconds, time.perf_counter() - began, metrics["tokens/generated"])
            self.watcher.step_done(state, metrics, groups, tokens)  # record the failed step; a resumed run repeats it
            raise explained(error, self.settings, state.step, metrics) from None
        self.state = state
        metrics |= time_metrics(self._seconds, time.perf_counter() - began, metrics["tokens/generated"])
        metrics |= self.feed.data_metrics
        metrics |= await self.more_metrics()
        self.watcher.step_done(self.state, metrics, groups, tokens)
        await self.after_step(self.state)

    async def _learn_all(self, version: int) -> tuple[list[Group], list[Learnt], float | None]:
        """Learn from the groups of a step, all at once or part by part.

        Returns the groups, what was learnt from each part, and the mean KL from the reference before the step, or None
        without a KL penalty.
        """
        kls: list[float] = []
        parts = self.settings.minibatches if self._streams else 1
        groups: list[Group] = []
        learnt: list[Learnt] = []
        ahead: asyncio.Task[Ready] | None = None
        try:
            for part in range(parts):
                ready = await (
                    self._make_ready(version, parts, part) if ahead is None else self._await_part(ahead, parts)
                )
                if part + 1 < parts and self._scores_apart:
                    ahead = asyncio.create_task(self._make_ready_ahead(version, parts, part + 1))
                learnt.append(await self._learn(ready, self.settings.minibatches // parts, part))
                if self.settings.advantage.kl_penalty_coef:
                    kls.append(mean_kl(ready.batch, self.settings.advantage, version))
                groups += ready.groups
                if self.skipped.exceeds(self.settings):
                    break
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
        return groups, learnt, fmean(kls) if kls else None

    def _next_kl_coef(self, coef: float, kl: float | None, samples: int) -> float | None:
        """The coefficient of the KL penalty for the next step; None if it does not adapt."""
        if self.settings.advantage.kl_penalty_target is None or kl is None:
            return None
        return adapted_kl_coef(coef, kl, samples, self.settings.advantage)

    async def _make_ready(self, version: int, parts: int, part: int) -> Ready:
        """Return the next part of a step, scored; afterwards the learner has the shared devices."""
        is_resynced = False
        while True:
            async with self._phase("generate", self._samples(parts)):
                taking = self._take_checked(version, parts, part)
                # Until the first part is learnt from, the learner is as it was after the step before.
                groups = await (taking if part else self.unless_preempted(taking))
            async with self._phase("switch"):
                await self.switch.to_learner(self.models.fleet, self.models.sharing)
            async with self._phase("score"):
                ready = await self._scored_groups(groups)
                if part == 0:  # later parts are scored by a policy that has learnt from earlier ones
                    await self._check_mismatch(ready, version)
            jump = self._jump(ready, version, is_resynced) if part == 0 else ""
            if not jump:
                return ready
            await self._discard(groups, version, part, f"{jump}. The engines get their weights again")
            async with self._phase("sync"):
                update = self.models.fleet.current_update or await self.models.policy.weight_update(version)
                await self.switch.to_engines(self.models.fleet, self.models.sharing, update)
            is_resynced = True

    def _jump(self, ready: Ready, version: int, is_resynced: bool) -> str:
        """Return why the groups of a step are discarded, because their mismatch is unusual for this run; else "".

        Right after a verified resync of the engines, the mismatch is accepted as the new usual.
        """
        metrics = mismatch_metrics(fresh(ready.batch.samples, ready.batch.sources, version, FRESH_LEAST))
        jump = self.guard.jump(metrics)
        if jump and is_resynced:
            self.models.fleet.report(f"{jump}, also after the engines got their weights again: it counts as usual now")
        if not jump or is_resynced:
            self.guard.accept(metrics, is_new_usual=bool(jump))
            return ""
        return jump

    async def _discard(self, groups: Sequence[Group], version: int, part: int, why: str) -> None:
        """Discard groups and everything under way; all of them are generated again.

        Parts of the step that were already learnt from stay: the engines were checked after each of them.
        """
        what = f"{'the rest of ' if part else ''}step {self.state.step + 1}"
        self.models.fleet.report(f"{what} is discarded and generated again: {why}")
        await self.feed.discard(groups)
        self.feed.begin(version)

    async def _make_ready_ahead(self, version: int, parts: int, part: int) -> Ready:
        """Like `_make_ready`, in the background while the previous part is learnt from, so no phase is recorded."""
        groups = await self._take_checked(version, parts, part)
        with self.recorder.timer("score ahead", "work", True, step=self.state.step):
            return await self._scored_groups(groups)

    async def _scored_groups(self, groups: list[Group]) -> Ready:
        """The samples that are learnt from, with log-probs and values."""
        settings = self.settings
        chosen = down_sampled(groups, settings.advantage)
        batch = batch_of(chosen, reward_of_tag(settings.rewards), settings.advantage.max_learn_tokens)
        left_out = sum(len(group.episodes) for group in groups) - sum(len(group.episodes) for group in chosen)
        return Ready(groups, await self._scored(batch), left_out)

    async def _check_mismatch(self, ready: Ready, version: int) -> None:
        """Raise Diverged if log-probs of engine and learner differ too much in a token, with the same weights."""
        loss = self.settings.learner.loss
        if not loss.max_logprob_mismatch:
            return
        samples = fresh(ready.batch.samples, ready.batch.sources, version)
        if not loss.scores_policy:
            if self.state.step or not samples:
                return
            scores = await self.models.policy.score(samples)
            samples = [replace(each, old_logprobs=array) for each, array in zip(samples, scores, strict=True)]
        check_mismatch(mismatch_metrics(samples), loss.max_logprob_mismatch)

    async def _await_part(self, ahead: asyncio.Task[Ready], parts: int) -> Ready:
        async with self._phase("generate", self._samples(parts)):
            return await ahead

    def _samples(self, parts: int) -> int:
        return self.settings.rollout.prompts_per_step // parts * self.settings.rollout.num_generations

    @property
    def _streams(self) -> bool:
        """Return True if a minibatch is learnt from while the groups of the next are still being generated.

        This needs engines that keep generating, minibatches of whole groups in a single epoch, no statistic over all
        samples of a step, and old log-probs that need not come from the policy before the first part, unless
        `inference` still holds that policy.
        """
        settings = self.settings
        is_whole = settings.rollout.prompts_per_step % settings.minibatches == 0 and settings.ppo_epochs == 1
        advantage, compared = settings.advantage, (RewardScope.TAG, RewardScope.BATCH)
        is_apart = (
            advantage.advantage_estimator
            not in (AdvantageEstimator.REINFORCE, AdvantageEstimator.GAE, AdvantageEstimator.GIGPO)
            and advantage.whiten_advantages is Whitening.NONE
            and not (advantage.whiten_rewards or advantage.kl_penalty_target)
            and not {advantage.reward_baseline, advantage.reward_std} & set(compared)
        )
        keeps_old_policy = self.models.inference is not None
        can_score_later = keeps_old_policy or settings.learner.loss.old_logprobs is not OldLogprobs.RECOMPUTE
        return settings.minibatches > 1 and is_whole and is_apart and can_score_later and not self.switch.is_shared

    @property
    def _scores_apart(self) -> bool:
        """Return True if scoring can overlap with learning, because the policy's learner does no scoring."""
        loss = self.settings.learner.loss
        is_own_scorer = loss.scores_policy and self.models.inference is None
        is_own_reference = self.settings.uses_reference and self.models.reference is None
        return not is_own_scorer and not is_own_reference

    async def _take_checked(self, version: int, parts: int, part: int) -> list[Group]:
        """Return the groups of a part; regenerate them if an engine does not have the weights of its version."""
        while True:
            groups = await self._take(version, parts)
            wrong = await self.models.fleet.weights.wrong()
            if not wrong:
                return groups
            await self.models.fleet.replace_wrong(wrong)
            reasons = "; ".join(f"{one.name}: {one.why}" for one in wrong)
            await self._discard(groups, version, part, f"{reasons}. The engine is started again with its weights")

    async def _take(self, version: int, parts: int) -> list[Group]:
        groups = await self.models.fleet.serve(self.feed.take(version, self.settings.rollout.prompts_per_step // parts))
        oldest = max(staleness_of(groups, version), default=0)
        if oldest > self.settings.max_staleness:
            raise StalenessExceeded(f"a token is {oldest} versions old; the run allows {self.settings.max_staleness}")
        return groups

    async def _learn(self, ready: Ready, cut_into: int, part: int) -> Learnt:
        settings, batch = self.settings, ready.batch
        chosen, selection, alone = with_advantages(batch, settings.advantage, self.state.kl_coef)
        metrics: list[Mapping[str, float]] = []
        async with self._phase("learn"):
            for epoch in range(settings.ppo_epochs if len(chosen) else 0):
                seed = sample_seed(settings.seed, self.state.step, part, epoch)
                # The schedule also counts minibatches that are not learnt from: it ends with the run.
                position = self.state.step * settings.optimizer_steps + (part * settings.ppo_epochs + epoch) * cut_into
                parts = minibatches(chosen, cut_into, seed, settings.shuffle_minibatches)
                for number, samples in enumerate(parts):
                    totals = totals_of(samples, settings.sampling.max_new_tokens, settings.learner.loss)
                    if not totals.tokens or self.skipped.exceeds(settings):
                        continue
                    figures = await self._optimizer_step(samples, totals, position + number)
                    # In later epochs the weights have already learnt from these samples.
                    metrics.append({name: figures[name] for name in figures if not epoch or not name.startswith(APART)})
                    if not self._left_out(totals) or any(metrics[-1].get(name) for name in SKIPPED):
                        self.skipped = self.skipped.after(metrics[-1], self.state.step)
                    self._is_stopped_early |= bool(metrics[-1].get(OVER_KL))
        counts = batch.cut, ready.down_sampled
        return Learnt(batch.samples, selection, alone, tuple(metrics), batch.teacher_kl, *counts, batch.sources)

    async def _optimizer_step(self, part: Sequence[Sample], totals: Totals, position: int) -> Figures:
        """One optimizer step of the policy, unless the minibatch is left out, and of the critic, if there is one."""
        left_out = self._left_out(totals)
        if self._is_critic_alone or left_out:
            return {**await self._critic_step(part, totals, position), **left_out}
        own = position - self.settings.critic_alone_steps * self.settings.optimizer_steps
        policy, critic = await asyncio.gather(
            self.models.policy.learn(part, totals, own), self._critic_step(part, totals, position)
        )
        return {**policy, **critic}

    def _left_out(self, totals: Totals) -> Figures:
        """Metrics of a minibatch that the policy does not learn from; empty if it does."""
        if self._is_critic_alone:
            return {}
        if not totals.kept.tokens:
            sizes = {"tokens": float(totals.tokens), "sequences": float(totals.sequences)}
            return {REJECTED: 1.0, "rejected": 1.0, "rejected_sequences": 1.0, **sizes}
        return {DROPPED: 1.0} if self._is_stopped_early else {}

    @property
    def _is_critic_alone(self) -> bool:
        """Return True in the first steps of a run, if the policy does not learn in them."""
        return self.models.critic is not None and self.state.step < self.settings.critic_alone_steps

    async def _critic_step(self, part: Sequence[Sample], totals: Totals, position: int) -> Figures:
        """An optimizer step of the critic, if there is one; it learns from what the policy leaves out as well."""
        if self.models.critic is None:
            return {}
        metrics = await self.models.critic.learn(part, totals, position)
        return {f"critic/{name}": value for name, value in metrics.items()}

    async def _scored(self, batch: Batch) -> Batch:
        """Add log-probs and values, computed before the first optimizer step on the batch."""
        loss = self.settings.learner.loss
        old: list[Floats] | None = None
        reference: list[Floats] | None = None
        if loss.scores_policy:
            old = await (self.models.inference or self.models.policy).score(batch.samples)
        if self.settings.uses_reference:
            scorer = self.models.reference or self.models.policy
            reference = await scorer.score(batch.samples, self.models.reference is None)
        if self.models.critic is not None and self.settings.advantage.advantage_estimator is AdvantageEstimator.GAE:
            values = await self.models.critic.values([*batch.samples, *continuations(batch)])
            batch = with_values(batch, values)
        return await self._with_teachers(with_scores(batch, old, reference))

    async def _with_teachers(self, batch: Batch) -> Batch:
        teachers = self.settings.teachers
        if not teachers:
            return batch
        taught = [[batch.samples[index] for index in taught_by(batch, teacher)] for teacher in teachers]
        scores = await asyncio.gather(
            *(self.models.teachers[each.name].score(samples) for each, samples in zip(teachers, taught, strict=True))
        )
        return with_teachers(batch, dict(zip(teachers, scores, strict=True)))

    async def _sync(self, version: int) -> None:
        """Sync the new policy to engines and `inference`; to engines first, unless devices are shared."""
        models = self.models
        update = await models.policy.weight_update(version)
        if self.switch.is_shared:
            await models.follow_policy()
        await self.switch.to_engines(models.fleet, models.sharing, update)
        if not self.switch.is_shared:
            await models.follow_policy()

    async def _move_reference(self, step: int) -> None:
        """Copy the policy to the reference if this step is due; before a checkpoint, which holds both."""
        settings, reference = self.settings, self.models.reference
        if reference is not None and settings.moves_reference and step % settings.reference_sync_steps == 0:
            async with self._phase("sync"):
                await self.models.policy.give_weights(reference)

    @asynccontextmanager
    async def _phase(self, name: str, total: int | None = None) -> AsyncIterator[None]:
        self.watcher.phase(name, total)
        began = time.perf_counter()
        with self.recorder.timer(name, "work", True, step=self.state.step):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class DeviceSwitch:
    """The learners' side of sleep and wake, for all learners that share devices with engines.

    To learn: engines sleep, learners load. To generate: learners offload gradients and optimizer state, engines take
    the new weights, and learners offload their weights.
    """

    engines: EngineSwitch
    offloads: Mapping[str, Sequence[str]]  # component: parts it moves to the host while engines run
    overlaps: bool = False  # devices have room for the engines' weights beside gradients and optimizer state

    @property
    def is_shared(self) -> bool:
        """Return True if engines and learners share devices and take turns."""
        return self.engines.is_needed

    async def to_learner(self, fleet: Fleet, learners: Sequence[Learners]) -> None:
        """Put the engines to sleep, then load the learners that share their devices."""
        await self.engines.to_learner(fleet)
        if self.is_shared:
            await self.load(learners)

    async def to_engines(self, fleet: Fleet, learners: Sequence[Learners], update: WeightUpdate) -> None:
        """Wake the engines with the new policy."""
        if self.is_shared:
            await self.offload(learners, (GRADIENTS, MOMENTS), self.overlaps)
        await self.engines.to_engines(fleet, update, lambda: self.offload(learners, (WEIGHTS,)))

    async def load(self, learners: Sequence[Learners]) -> None:
        """Move each learner's offloaded parts back to its device."""
        loads = ((each, self.offloads.get(each.name, ())) for each in learners)
        await asyncio.gather(*(each.load(parts) for each, parts in loads if parts))

    async def offload(
        self, learners: Sequence[Learners], among: Sequence[str] = PARTS, in_background: bool = False
    ) -> None:
        """Move each learner's offloadable parts to the host, limited to `among`."""
        moves = [(each, [part for part in among if part in self.offloads.get(each.name, ())]) for each in learners]
        # With no parts, a call frees what was copied in the background.
        await asyncio.gather(*(each.offload(parts, in_background) for each, parts in moves if parts or self.overlaps))
