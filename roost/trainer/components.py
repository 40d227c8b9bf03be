"""Which components of a plan train, generate and score; what is launched for each."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace

from roost.engines.planned import EnginePlan, plan_engines
from roost.engines.protocol import InFlight
from roost.engines.spec import EngineKind, ServerSpec
from roost.learner.heads import Head
from roost.placement.plan import Plan
from roost.placement.residency import Decision
from roost.runtime.group import GroupSpec
from roost.spec.training import TrainSettings
from roost.trainer.learner_worker import LearnerWorker
from roost.trainer.turns import Turns

ACTOR, ROLLOUT, CRITIC, REFERENCE = "actor", "rollout", "critic", "reference"


@dataclass(frozen=True)
class Layout:
    """A plan as the trainer uses it."""

    engines: EnginePlan
    turns: Turns
    on_gpu: bool
    has_critic: bool
    has_reference: bool
    threads: int | None = None  # of each learner, where models run on CPUs


def layout_of(plan: Plan, settings: TrainSettings, on_gpu: bool) -> Layout:
    """What the plan means for a training run; on machines without GPUs engines run on the CPU."""
    names = {part.name for part in plan.components}
    options = dict(settings.engine_options)
    defaults = ServerSpec(
        EngineKind(settings.engine),
        settings.learner.model,
        device="auto" if on_gpu else "cpu",
        dtype=settings.learner.compute_type,
        seed=settings.seed,
        **options,
    )
    engines = plan_engines(plan, ROLLOUT, defaults)
    threads = None
    if not on_gpu:
        threads, of_engines = threads_of(plan, settings.max_policy_lag, os.cpu_count() or 1)
        plain = [
            replace(
                spec,
                device="cpu",
                memory_fraction=None,
                weight_transfer=None,
                env={"OMP_NUM_THREADS": str(of_engines), **spec.env},
            )
            for spec in engines.servers
        ]
        engines = replace(engines, servers=tuple(plain))
    offloads = settings.learner.offloads if engines.decision is not Decision.KEEP else ()
    displaced = engines.displaced if len(engines.displaced) < len(engines.servers) else None
    turns = Turns(engines.decision, in_flight_of(settings), offloads, displaced)
    return Layout(engines, turns, on_gpu, CRITIC in names, REFERENCE in names, threads)


def threads_of(plan: Plan, lag: int, cores: int) -> tuple[int, int]:
    """Threads of each learner and engine on machines without GPUs: who works at the same time shares the cores."""
    on_node = [Counter(plan[name].table.nodes.tolist()) for name in (ACTOR, ROLLOUT)]
    learners, engines = (max(counts.values(), default=1) for counts in on_node)
    if lag:
        return max(1, cores // (learners + engines)), max(1, cores // (learners + engines))
    return max(1, cores // learners), max(1, cores // engines)


def in_flight_of(settings: TrainSettings) -> InFlight:
    """What updates do to requests: with a lag they are held where they can be; without one there are none."""
    if settings.in_flight is not None:
        return InFlight(settings.in_flight)
    is_held = settings.max_policy_lag > 0 and settings.engine == EngineKind.TORCH and settings.learner.adapter is None
    if is_held:
        return InFlight.HOLD
    return InFlight.DROP if settings.max_policy_lag else InFlight.DRAIN


def learner_groups(settings: TrainSettings, layout: Layout) -> dict[str, GroupSpec]:
    """The workers of everybody who has a model in a process of Roost's own."""
    learner, threads = settings.learner, layout.threads
    groups = {ACTOR: LearnerWorker.create_group(learner, Head.POLICY, threads)}
    if layout.has_critic:
        groups[CRITIC] = LearnerWorker.create_group(learner, Head.VALUE, threads)
    if layout.has_reference:
        groups[REFERENCE] = LearnerWorker.create_group(learner, Head.POLICY, threads)
    return groups
