"""What `train.engine_options` may say of engines, beside what the plan and the other settings say."""

from __future__ import annotations

from dataclasses import fields

from roost.engines.spec import ServerSpec
from roost.spec.errors import Findings, did_you_mean
from roost.spec.job import Job
from roost.spec.training import TrainSettings

# What a plan or another setting decides; written twice, one of them would be ignored.
DECIDED = ("kind", "model", "name", "device", "tensor", "pipeline", "dtype", "seed", "sleeps", "adapter_rank")
OPTIONS = tuple(field.name for field in fields(ServerSpec) if field.name not in DECIDED)


def check_engine_options(settings: TrainSettings, job: Job, findings: Findings) -> None:
    """Each option that is not known is an error with a hint."""
    for name in settings.engine_options:
        if name not in OPTIONS:
            findings.error(
                job.source.where(("train", "engine_options", name)),
                "is not an option of engines",
                did_you_mean(name, OPTIONS),
                f"options: {', '.join(OPTIONS)}",
            )
