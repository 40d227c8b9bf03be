"""`roost sft`: supervised training of a job."""

from __future__ import annotations

from pathlib import Path

from roost.cli.options import NotationChoice, Overrides
from roost.cli.train import Address, ConfigFile, Metrics, Name, Resume, ResumeFrom, Runs, run_from_terminal


def sft_command(
    config: ConfigFile,
    overrides: Overrides = None,
    name: Name = None,
    runs: Runs = Path("runs"),
    resume: Resume = False,
    resume_from: ResumeFrom = None,
    address: Address = None,
    metrics: Metrics = None,
    notation: NotationChoice = None,
) -> None:
    """Supervised training: learn given completions, with loss on what the assistant says alone.

    The job's data gives conversations, or prompts and completions (train.completion). Only the actor is launched. The
    policy is in runs/NAME/policy; `roost train` continues from it with ++train.model=runs/NAME/policy.
    """
    more = ("++train.objective=sft",)
    run_from_terminal(config, list(overrides or ()), name, runs, resume, resume_from, address, metrics, notation, more)
