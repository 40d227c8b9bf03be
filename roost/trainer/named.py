"""What a job names by `_target_`: looked at before anything is made or launched."""

from __future__ import annotations

from roost.config.errors import Findings
from roost.config.job import Job
from roost.config.training import TrainSettings
from roost.config.training_read import setting_place
from roost.rollout.check_target import check_target
from roost.rollout.parts import SCENARIO
from roost.rollout.rewards.config import make_rewards


def check_named(settings: TrainSettings, job: Job, findings: Findings) -> None:
    """Import the classes and functions that a job names, and hold its keys against what they take."""
    check_target(settings.task, setting_place("task", job), SCENARIO, findings)
    # As if each were made elsewhere: then only its keys are looked at.
    make_rewards(settings.rewards, setting_place("rewards", job), findings, elsewhere=settings.rewards)
