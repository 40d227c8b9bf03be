"""`roost train` and `roost sft`: read, check and start a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.options import (
    WITH_TRAINING,
    NotationChoice,
    Overrides,
    exit_not_installed,
    import_from_here,
    open_console,
)
from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.job import Job, Notation
from roost.config.notations.notation import read_job
from roost.config.train import TrainSettings
from roost.procs.signals import REQUEUE_CODE, SigtermInterrupts
from roost.trainer.preflight import check_before_launch, check_hub_models, check_machine
from roost.trainer.records.remote import RemoteRun, StorageError, url_of
from roost.view.text import print_findings

ConfigFile = Annotated[
    Path, typer.Argument(help="The config file (YAML), or the script of a verl or TRL job.", metavar="CONFIG")
]
Name = Annotated[
    str | None, typer.Option("--name", help="The run's name; default: what the config says, or its file name.")
]
Runs = Annotated[
    str,
    typer.Option("--runs", metavar="FOLDER", help="Where runs are kept: a folder, or a URL such as s3://bucket/runs."),
]
Scratch = Annotated[
    Path | None,
    typer.Option(
        "--scratch",
        metavar="FOLDER",
        help="The folder of a run while it trains, if --runs is a URL (default: runs). All nodes must see it.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run of that name from its newest complete checkpoint; --resume STEP: from that step.",
    ),
]
AutoResume = Annotated[
    bool,
    typer.Option(
        "--auto-resume",
        help="Continue the run if it exists, also one without a checkpoint yet; otherwise start it. For schedulers.",
    ),
]
ResumeFrom = Annotated[
    int | None,
    typer.Option(
        "--resume-from",
        min=0,
        metavar="STEP",
        help="The same as --resume STEP; 0: from the beginning. Checkpoints of later steps are set aside.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="The Ray cluster (default: the one running on this machine, or a new one here)."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metrics", metavar="NAME", help="Also report metrics to tensorboard, wandb, trackio or prometheus."),
]


def training_command(about: str, own_overrides: Sequence[str] = ()) -> Callable[..., None]:
    """A command that trains a job; `about` is its help, `own_overrides` are applied after the user's."""

    def command(
        config: ConfigFile,
        overrides: Overrides = None,
        name: Name = None,
        runs: Runs = "runs",
        scratch: Scratch = None,
        resume: Resume = False,
        resume_from: ResumeFrom = None,
        auto_resume: AutoResume = False,
        address: Address = None,
        metrics: Metrics = None,
        notation: NotationChoice = None,
    ) -> None:
        console = open_console()

        def say(text: str) -> None:
            console.print(f"roost: {text}", soft_wrap=True)

        import_from_here()
        url = url_of(runs)
        if scratch is not None and url is None:
            raise typer.BadParameter(
                f"is for runs at a URL, and --runs is {runs}; leave it out", param_hint="--scratch"
            )
        local = Path(runs) if url is None else scratch or Path("runs")
        with SigtermInterrupts() as sigterm:
            try:
                config, resume_from, changes = _step_of_resume(resume, resume_from, config, list(overrides or ()))
                say(f"checking {config}")
                job, settings = _read_and_check(config, [*changes, *own_overrides], notation, address, local, say)
                run_name = name or settings.name or config.stem
                remote = None if url is None else _open_remote(f"{url}/{run_name}")
                say("loading torch and Ray")
                run_job = _import_run_job()
                resumes = resume or resume_from is not None
                metric_names = tuple(metrics or ())
                run_job(
                    job, local / run_name, resumes, address, metric_names, console, resume_from, auto_resume, remote
                )
            except KeyboardInterrupt:
                # CPython marks an interrupt that passed through exec of a string (a dataclass, a namedtuple) as
                # unhandled, and `python -m` then ends by the signal instead of this exit code. The next exec clears it.
                exec("")
                how = f"{sigterm.came.name} ended the run" if sigterm.came is not None else "interrupted"
                say(f"{how}; all processes of the run have ended")
                number = sigterm.came or signal.SIGINT
                # The exit code that shells report for a process killed by the signal.
                raise typer.Exit(REQUEUE_CODE if number == signal.SIGUSR1 else 128 + number) from None

    command.__doc__ = about
    return command


train_command = training_command(
    """Train: plan the job, launch it on Ray, and run it to its end.

    The run is kept in runs/NAME: metrics, samples, checkpoints, the trained policy, a trace and a report.
    """
)
sft_command = training_command(
    """Supervised fine-tuning on given completions, with loss on assistant messages only.

    The job's data gives conversations, or prompts and completions (train.completion). Only the actor is launched. The
    policy is in runs/NAME/policy; `roost train` continues from it with ++train.model=runs/NAME/policy.
    """,
    ["++train.objective=sft"],
)


def read_training_job(config: Path, overrides: Sequence[str], notation: Notation | None) -> tuple[Job, TrainSettings]:
    """Read a job to train, and print its findings; exit with 1 if it has errors."""
    findings = Findings()
    source = load(config, overrides, findings)
    job = None if source is None else read_job(source, findings, notation, trains=True)
    print_findings(findings.found, open_console(stderr=True))
    if job is None or job.training is None or findings.has_errors:
        raise typer.Exit(1)
    return job, job.training


def _read_and_check(
    config: Path,
    overrides: Sequence[str],
    notation: Notation | None,
    address: str | None,
    runs: Path,
    say: Callable[[str], None],
) -> tuple[Job, TrainSettings]:
    """Read a job, and check what can be checked before torch is imported and Ray is started."""
    job, settings = read_training_job(config, overrides, notation)
    try:
        check_machine(runs, say)
        check_before_launch(job, settings, address, os.environ)
        check_hub_models(job, settings, say)
    except ConfigError as error:
        print_findings(error.findings, open_console(stderr=True))
        raise typer.Exit(1) from None
    except ImportError as error:
        raise exit_not_installed(error, WITH_TRAINING) from None
    return job, settings


def _open_remote(url: str) -> RemoteRun:
    try:
        return RemoteRun.open(url)
    except StorageError as error:
        open_console(stderr=True).print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(1) from None


def _import_run_job() -> Callable[..., None]:
    try:
        from roost.cli.train_run import run_job
    except ImportError as error:
        raise exit_not_installed(error, WITH_TRAINING) from None
    return run_job


def _step_of_resume(
    resume: bool, step: int | None, config: Path, overrides: list[str]
) -> tuple[Path, int | None, list[str]]:
    """Config, step of `--resume STEP`, and overrides; the parser takes the step for the config or an override.

    A bare number is the step, unless a config file has that name.

    >>> _step_of_resume(True, None, Path("job.yaml"), ["4", "train.max_steps=9"])
    (PosixPath('job.yaml'), 4, ['train.max_steps=9'])
    >>> _step_of_resume(True, None, Path("4"), ["job.yaml", "train.max_steps=9"])
    (PosixPath('job.yaml'), 4, ['train.max_steps=9'])
    """
    if resume and str(config).isdecimal() and not config.is_file() and overrides:
        config, overrides = Path(overrides[0]), [str(config), *overrides[1:]]
    numbers = [one for one in overrides if one.isdecimal()] if resume else []
    words = [one for one in overrides if "=" not in one and one[:1] != "~" and one not in numbers]
    if resume and words:
        wrong = str(config) if Path(words[0]).is_file() and not config.is_file() else words[0]
        raise typer.BadParameter(f"takes the number of a step, not {wrong!r}", param_hint="--resume")
    if len(numbers) + (step is not None) > 1:
        raise typer.BadParameter("name one step to resume from", param_hint="--resume")
    return config, int(numbers[0]) if numbers else step, [one for one in overrides if one not in numbers]
