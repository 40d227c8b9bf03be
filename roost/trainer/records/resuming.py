"""Resume a run: lock its folder, choose the checkpoint, and check whether anything is left to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roost.config.job import Job
from roost.config.train import TrainSettings
from roost.learner.checksums import Damaged
from roost.procs.files import DiskFull, FolderHeld, FolderLock, NoLocks, chain_of, disk_full
from roost.trainer.records.checkpoints import ANEW, Checkpoints, TrainerState, saved_beside
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.records.running import RunState

Say = Callable[[str], None]


class RunInUse(RuntimeError):
    """Another process writes to the run's folder."""


@contextlib.contextmanager
def locked(folder: Path, say: Say) -> Iterator[None]:
    """Lock a folder against other runs until this one ends."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FolderLock.take(folder))
        except FolderHeld as other:
            raise RunInUse(
                f"{folder} is in use by {other.holder}; give this run another name, or wait until that one has ended"
            ) from None
        except NoLocks as error:
            say(f"{folder} cannot be locked ({error.strerror}): make sure that no other run uses it")
        yield


def check_free(run: RunFolder) -> None:
    """Raise if the folder holds a run, or another process is using it."""
    try:
        run.check_free()
    except FileExistsError:
        with contextlib.suppress(OSError), locked(run.path, lambda _: None):  # others' folders may not be lockable
            pass
        raise


def checkpoints_of(run: RunFolder, settings: TrainSettings) -> Checkpoints:
    """Checkpoints of a run with these settings."""
    return Checkpoints(run.checkpoints, settings.checkpoint.keep_checkpoints, saved_beside(settings))


def newest_state(run: RunFolder, settings: TrainSettings, say: Say) -> TrainerState:
    """Return the state of the newest intact checkpoint, or the initial state if there is no checkpoint.

    Raise Damaged if there are checkpoints and all of them are damaged.
    """
    found = checkpoints_of(run, settings).newest_verified()
    if found.problems and found.checkpoint is None:
        raise Damaged(f"{'; '.join(map(str, found.problems))}; no other checkpoint is there: {ANEW}")
    for problem in found.problems:
        say(f"{problem}; using an earlier checkpoint")
    return found.checkpoint.read_state() if found.checkpoint is not None else TrainerState()


def resumed_state(
    run: RunFolder, job: Job, settings: TrainSettings, step: int | None, say: Say, may_start_over: bool = False
) -> TrainerState:
    """Return the state to resume from: of the checkpoint of `step`, or of the newest.

    A run that ended before its first checkpoint begins anew if it may, and raises otherwise.

    A changed config may be intended, so its changes are only listed.
    """
    if step is None:
        state = newest_state(run, settings, say)
        if run.steps() and not state.step and may_start_over:
            say(f"{run.path} has no checkpoint yet: starting from the beginning")
        elif run.steps() and not state.step:
            raise FileNotFoundError(f"{run.path} has no whole checkpoint to continue from: {ANEW}")
    elif step:
        state = checkpoints_of(run, settings).verified_at(step).read_state()
    else:
        state = TrainerState()
    before = yaml.safe_load(run.config_file.read_text()) if run.config_file.exists() else {}
    changed = changed_keys(before, plain(job.source.values))
    if changed:
        say(f"the config is not the one that the run began with; changed: {', '.join(changed)}")
    return state


def resumes_by_itself(run: RunFolder, is_wanted: bool, environ: Mapping[str, str], say: Say) -> bool:
    """Return True if a run exists and is resumed without --resume: `is_wanted`, or a scheduler started it again.

    A preempted run leaves a file; one that was killed without notice is known by Slurm's count of restarts.
    """
    is_wanted = is_wanted or was_restarted(environ) or run.preempted_file.exists()
    if not run.config_file.exists() or not is_wanted:
        return False
    say(f"continuing {run.path}")
    return True


def was_restarted(environ: Mapping[str, str]) -> bool:
    """Return True if Slurm started this job again.

    >>> was_restarted({"SLURM_RESTART_COUNT": "2"}), was_restarted({"SLURM_RESTART_COUNT": "0"})
    (True, False)
    """
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return restarts.isdecimal() and int(restarts) > 0


@contextlib.contextmanager
def unmarked_by_failures(run: RunFolder, *kept: type[Exception]) -> Iterator[None]:
    """No longer mark a run as preempted if it fails: it would fail again. Errors of the `kept` types leave the mark."""
    try:
        yield
    except kept:
        raise
    except Exception:
        with contextlib.suppress(OSError):  # the error that ended the run says more
            run.mark_preempted(None)
        raise


@contextlib.contextmanager
def recorded_end(run: RunFolder, *stops: type[BaseException]) -> Iterator[None]:
    """Record for `roost status` that the run failed, or was stopped by an error of the types `stops`."""
    with contextlib.suppress(OSError):
        run.mark_ended(None)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # the error that ended the run says more
            if run.has_run:
                is_stop = isinstance(error, (KeyboardInterrupt, SystemExit, *stops))
                run.mark_ended(RunState.STOPPED if is_stop else RunState.FAILED, str(error).strip().partition("\n")[0])
        raise


def reopened(run: RunFolder, settings: TrainSettings, state: TrainerState, say: Say) -> RunFolder:
    """Reopen the folder at a step: remove records of later steps and set their checkpoints aside."""
    aside = checkpoints_of(run, settings).set_aside(state.step)
    if aside:
        say(f"{run.checkpoints}: some checkpoints belong to later steps or are damaged; renamed to {', '.join(aside)}")
    return RunFolder.resume(run.path, state.step)


def is_finished(run: RunFolder, settings: TrainSettings, state: TrainerState) -> bool:
    """Return True if all steps, the last evaluation and the export are done; False while max_epochs is unresolved."""
    if settings.max_epochs is not None:
        return False
    return state.step >= settings.step_count and run.finished_at() == state.step


def changed_keys(before: Any, after: Any, path: str = "") -> list[str]:
    """Keys in which two configs differ.

    >>> changed_keys({"train": {"seed": 1, "max_steps": 2}}, {"train": {"seed": 1, "max_steps": 3}, "actor": {}})
    ['actor', 'train.max_steps']
    """
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return [] if before == after else [path]
    names = sorted({*before, *after})
    inner = (changed_keys(before.get(name), after.get(name), f"{path}.{name}" if path else name) for name in names)
    return [key for keys in inner for key in keys]


def plain(value: Any) -> Any:
    """Return a config with types that YAML can write."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def out_of_room(error: Exception, run: RunFolder, settings: TrainSettings) -> DiskFull:
    """Return a DiskFull error that says which checkpoint is the newest."""
    named = next((one for one in chain_of(error) if isinstance(one, DiskFull)), None)
    if named is None:
        named = disk_full(run.path, "the files of the run")
    newest = checkpoints_of(run, settings).newest()
    kept = f"the newest checkpoint is of step {newest.step}" if newest is not None else "there is no checkpoint yet"
    return DiskFull(f"{named}; {kept}: free some space or lower keep_checkpoints, and continue with --resume")
