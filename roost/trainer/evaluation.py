"""How good the policy is on tasks it does not learn from, at a version that is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from roost.config.train import RolloutSettings, TrainSettings
from roost.procs.user_code import call
from roost.rollout.episode import Group, Scenario, Split
from roost.rollout.group_play import GroupRollout, raise_fatal
from roost.rollout.order import TaskOrder
from roost.rollout.playing import EpisodeRunner, task_of
from roost.trainer.figures import of_lengths, of_parts


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What came of it. Every token was made by one version."""

    version: int
    groups: tuple[Group, ...]

    @property
    def figures(self) -> dict[str, float]:
        rewards = [reward for group in self.groups for reward in group.rewards]
        return {
            "reward/mean": float(np.mean(rewards)) if rewards else float("nan"),
            "reward/full": float(np.mean([reward >= 1.0 for reward in rewards])) if rewards else float("nan"),
            "samples": float(len(rewards)),
            "samples/failed": float(sum(group.failed for group in self.groups)),
            **of_lengths([episode for group in self.groups for episode in group.episodes]),
            **of_parts(self.groups),
        }


class VersionChanged(RuntimeError):
    """The engines were updated under an evaluation."""


async def evaluate(
    scenario: Scenario, player: EpisodeRunner, settings: TrainSettings, version: int, on_end: Callable[[int], None]
) -> Evaluation:
    """EpisodeRequest the evaluation's tasks on engines that have this version; nobody updates them meanwhile."""
    asked = settings.evaluation
    rollout = RolloutSettings(
        num_generations=asked.eval_samples,
        episode_attempts=settings.rollout.episode_attempts,
        max_concurrent_episodes=settings.rollout.max_concurrent_episodes,
        episode_timeout_s=settings.rollout.episode_timeout_s,
    )
    size = call(scenario.size, Split.EVALUATION)
    if not size:
        return Evaluation(version, ())
    order = TaskOrder(size, settings.seed)
    places = asyncio.Semaphore(rollout.max_concurrent_episodes)
    changed = asyncio.Event()
    plays = [
        GroupRollout(
            number,
            task_of(scenario, Split.EVALUATION, order.index(number)),
            version,
            player,
            rollout,
            places,
            changed.set,
        )
        for number in range(min(asked.eval_tasks, size))
    ]
    try:
        while not all(play.is_over for play in plays):
            changed.clear()
            raise_fatal(plays)
            await changed.wait()
    finally:
        groups = await asyncio.gather(*(play.result() for play in plays))
        for play in plays:
            on_end(play.number)
    found = Evaluation(version, tuple(groups))
    _check_version(found.groups, version)
    return found


def _check_version(groups: Sequence[Group], version: int) -> None:
    others = {int(made) for group in groups for one in group.episodes for made in one.made_by} - {version}
    if others:
        raise VersionChanged(f"version {version} was to be evaluated, but tokens are of version {sorted(others)}")
