"""The best checkpoint of a run: by its evaluations, or by the rewards of training where there are none."""

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

    Samples of a step come from the weights before its update, so training judges a checkpoint by the step after it.

    >>> rewards = [{"step": step, "reward/mean": reward} for step, reward in ((2, 0.5), (3, 0.9), (4, 0.7), (5, 0.8))]
    >>> best_of(rewards, [], {2, 4}), best_of(rewards, [{"step": 4, "reward/mean": 0.8}], {2, 4})
    (Best(step=2, reward=0.9, by='training'), Best(step=4, reward=0.8, by='evaluation'))
    """
    for by, records, later in ((EVALUATION, evaluations, 0), (TRAINING, steps, 1)):
        known = [
            (reward, one["step"] - later) for one in records if (reward := number_of(one, "reward/mean")) is not None
        ]
        found = max((pair for pair in known if pair[1] in among), default=None)
        if found is not None:
            return Best(found[1], found[0], by)
    return None


def best_checkpoint(run: RunFolder) -> Best | None:
    """The best of the checkpoints that the run has on disk."""
    there = {one.step for one in Checkpoints(run.checkpoints, 1).found()}
    return best_of(run.steps(), run.evaluations(), there) if there else None
