"""The best checkpoint of a run: by its evaluations, or by the reward of its training steps where there are none."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from roost.trainer.checkpoints import Checkpoints
from roost.trainer.metrics.json_lines import Record, number_of
from roost.trainer.run_folder import RunFolder

EVALUATION, TRAINING = "evaluation", "training"


@dataclass(frozen=True, slots=True)
class Best:
    """A step that has a checkpoint, and the mean reward that makes it the best."""

    step: int
    reward: float
    by: str  # EVALUATION or TRAINING


def best_of(steps: Sequence[Record], evaluations: Sequence[Record], among: Collection[int]) -> Best | None:
    """The best of the steps `among`; of equal ones the latest.

    >>> rewards = [{"step": step, "reward/mean": reward} for step, reward in ((2, 0.5), (4, 0.9), (6, 0.7))]
    >>> best_of(rewards, [], {2, 4, 6}), best_of(rewards, [{"step": 6, "reward/mean": 0.8}], {2, 4, 6})
    (Best(step=4, reward=0.9, by='training'), Best(step=6, reward=0.8, by='evaluation'))
    """
    for by, records in ((EVALUATION, evaluations), (TRAINING, steps)):
        known = [(reward, one["step"]) for one in records if (reward := number_of(one, "reward/mean")) is not None]
        found = max((pair for pair in known if pair[1] in among), default=None)
        if found is not None:
            return Best(found[1], found[0], by)
    return None


def best_checkpoint(run: RunFolder) -> Best | None:
    """The best of the checkpoints that the run has on disk."""
    there = {one.step for one in Checkpoints(run.checkpoints, 1).found()}
    return best_of(run.steps(), run.evaluations(), there) if there else None
