"""Run a job from the terminal: show the plan, the live view, and the result."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Console

from roost.cli.options import open_console
from roost.config.findings import ConfigError
from roost.config.job import Job
from roost.engines.protocol import EngineError
from roost.placement.plan import Plan
from roost.procs.files import DiskFull, private_files
from roost.procs.signals import REQUEUE_CODE
from roost.runtime.control_watch import ControlLost
from roost.trainer.feed import NothingFinishes
from roost.trainer.guards import Diverged, EndedAtStart, EndedEarly
from roost.trainer.records.checkpoints import Checkpoints, Unreadable, describe_policy
from roost.trainer.records.fan_out import MetricSettings
from roost.trainer.records.mirror import Mirror
from roost.trainer.records.remote import RemoteRun, StorageError
from roost.trainer.records.resuming import RunInUse
from roost.trainer.records.run_folder import RunFolder, number_of
from roost.trainer.report.live_view import LiveView, print_summary
from roost.trainer.report.page import write_plots, write_report
from roost.trainer.train import Outcome, RunOptions, train
from roost.transport.context import WorkerFailed
from roost.view.text import print_findings, print_plan

EXPECTED = (FileExistsError, FileNotFoundError, NotADirectoryError, ConnectionError, TimeoutError, ValueError)


def run_job(
    job: Job,
    folder: Path,
    resumes: bool,
    address: str | None,
    metrics: tuple[str, ...],
    console: Console,
    from_step: int | None = None,
    auto_resumes: bool = False,
    remote: RemoteRun | None = None,
) -> None:
    """Train, and print where the results are; exit with 1 if the run failed, with REQUEUE_CODE if it was preempted.

    The run is uploaded to `remote`, if given. If only the upload fails, a preempted run still exits with REQUEUE_CODE:
    it can continue from an earlier checkpoint.
    """
    keep = 1 if job.training is None else job.training.checkpoint.keep_checkpoints
    mirror = None if remote is None else Mirror(remote, folder, keep)
    options = RunOptions(folder, resumes, address, MetricSettings(metrics), from_step, auto_resumes)
    try:
        outcome = _train_or_exit(job, options, console, mirror)
    except Exception:
        if mirror is not None:
            _upload_rest(mirror, console, has_failed=True)
        raise
    with private_files():
        _print_outcome(outcome, console)
    is_uploaded = mirror is None or _upload_rest(mirror, console)
    if outcome.was_preempted:
        raise typer.Exit(REQUEUE_CODE)
    if not is_uploaded:
        raise typer.Exit(1)


def _upload_rest(mirror: Mirror, console: Console, has_failed: bool = False) -> bool:
    """Upload the rest of the run, and print its URL; return False if that failed."""
    try:
        mirror.finish(has_failed)
    except StorageError as error:
        _print_error(error)
        return False
    if not has_failed:
        console.print(f"uploaded {mirror.url}", soft_wrap=True)
    return True


def _train_or_exit(job: Job, options: RunOptions, console: Console, mirror: Mirror | None) -> Outcome:
    """Train; if that fails, print the error and exit."""
    folder = options.folder

    def say(text: str) -> None:
        console.print(f"roost: {text}", soft_wrap=True)

    def open_view(steps: int, first: int) -> LiveView:
        run = RunFolder(folder)
        rewards = [mean for one in run.steps() if (mean := number_of(one, "reward/mean")) is not None]
        view = LiveView(steps, console, first, status_file=run.status_file, rewards=rewards)
        if mirror is not None:
            mirror.begin(first, view.note)  # only now does the folder belong to this run
        return view

    try:
        if mirror is not None:
            with private_files():
                mirror.fetch(options.resumes, options.auto_resumes, options.from_step, os.environ, say)
        return train(job, options, say, open_view, lambda plan: _show(plan, job, console))
    except ConfigError as error:
        print_findings(error.findings, open_console(stderr=True))
        raise typer.Exit(1) from None
    except Diverged as error:
        _print_error(error)
        _print_divergence(RunFolder(folder), console)
        raise typer.Exit(1) from None
    except (
        *EXPECTED,
        WorkerFailed,
        EngineError,
        ControlLost,
        NothingFinishes,
        EndedEarly,
        RunInUse,
        DiskFull,
        StorageError,
        Unreadable,
    ) as error:
        _print_error(error)
        raise typer.Exit(1) from None
    except EndedAtStart as error:
        console.print(f"roost: {error}", soft_wrap=True)
        raise typer.Exit(error.exit_code) from None


def _show(plan: Plan, job: Job, console: Console) -> None:
    """Print the plan, and its warnings except for those of the config, which are printed already."""
    print_plan(plan, console, ())
    print_findings((each for each in plan.warnings if each not in job.warnings), open_console(stderr=True))


def _print_error(error: Exception) -> None:
    open_console(stderr=True).print(f"error: {error}", soft_wrap=True)


def _print_divergence(run: RunFolder, console: Console) -> None:
    kept = ", ".join(str(one.step) for one in Checkpoints(run.checkpoints, 1).found())
    fix = f"continue from a checkpoint with --resume STEP; saved steps: {kept}" if kept else "there is no checkpoint"
    console.print(f"no policy was exported; {fix}", soft_wrap=True)
    console.print(f"report   {write_report(run)}", soft_wrap=True)


def _print_outcome(outcome: Outcome, console: Console) -> None:
    run = outcome.run
    write_plots(run)
    report = write_report(run)
    print_summary(run, console)
    if outcome.was_preempted:
        console.print(f"preempted at step {outcome.state.step}; the same command continues (exit code {REQUEUE_CODE})")
    elif outcome.was_stopped:
        console.print(f"stopped at step {outcome.state.step}; to continue, add --resume to the command")
    console.print(f"report   {report}", soft_wrap=True)
    if run.policy.exists():
        about = describe_policy(run.policy)
        console.print(f"policy   {run.policy}{f' ({about})' if about else ''}", soft_wrap=True)
