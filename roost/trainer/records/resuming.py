"""Resume a run: lock its folder, choose the checkpoint, and check whether anything is left to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from roost.config.findings import Findings, Where
from roost.config.job import Job, resolve_model
from roost.config.train import LearnerSettings, TrainSettings
from roost.config.train_read import setting_location
from roost.learner.checksums import Damaged
from roost.procs.files import DiskFull, FolderHeld, FolderLock, NoLocks, chain_of, disk_full
from roost.trainer.records.checkpoints import (
    CRITIC,
    LEARNER,
    START_OVER,
    Checkpoints,
    TrainerState,
    saved_beside,
)
from roost.trainer.records.run_folder import RunFolder, RunState

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
        raise Damaged(f"{'; '.join(map(str, found.problems))}; there is no other checkpoint: {START_OVER}")
    for problem in found.problems:
        say(f"{problem}; using an earlier checkpoint")
    return found.checkpoint.read_state() if found.checkpoint is not None else TrainerState()


def resumed_state(
    run: RunFolder, job: Job, settings: TrainSettings, step: int | None, say: Say, may_start_over: bool = False
) -> TrainerState:
    """Return the state to resume from: of the checkpoint of `step`, or of the newest.

    A run that ended before its first checkpoint starts over if `may_start_over`, and raises otherwise. Changes of the
    config may be intended, so they are only listed.
    """
    if step is None:
        state = newest_state(run, settings, say)
        if run.steps() and not state.step and may_start_over:
            say(f"{run.path} has no checkpoint yet: starting from the beginning")
        elif run.steps() and not state.step:
            raise FileNotFoundError(f"{run.path} has no complete checkpoint to continue from: {START_OVER}")
    elif step:
        state = checkpoints_of(run, settings).verified_at(step).read_state()
    else:
        state = TrainerState()
    before = yaml.safe_load(run.config_file.read_text()) if run.config_file.exists() else {}
    changed = changed_keys(before, plain(job.source.values))
    if changed:
        say(f"the config is not the one that the run began with; changed: {', '.join(changed)}")
    return state


def check_fits(run: RunFolder, job: Job, settings: TrainSettings, state: TrainerState) -> None:
    """Raise ConfigError if a checkpoint has another optimizer, model or adapter than the learners.

    Its mesh may be another: checkpoints are restored on any.
    """
    from roost.learner.checkpoint import INDEX, saved_optimizer, saved_shapes, written_weights
    from roost.learner.forward import Head
    from roost.learner.model import bare_model

    if not state.step:
        return
    checkpoint, findings = checkpoints_of(run, settings).at(state.step), Findings()
    if not (checkpoint.learner / INDEX).is_file():
        return  # damaged, which the learner reports when it loads it
    there = f"the checkpoint of step {state.step}"
    found, own = saved_optimizer(checkpoint.learner), settings.learner.optimizer.optimizer.value
    if found != own:
        key = setting_location("optimizer", job)
        what = f"is {own}, but {there} has the state of {found}"
        why, fix = "an optimizer cannot go on from another's state", f"write {key.key_path}: {found}, or {START_OVER}"
        findings.error("RST-L003", key, what, why, fix)
    for name in (LEARNER, *checkpoint.others):
        place, learner = _learner_of(name, job, settings.learner)
        model = bare_model(learner, Head.VALUE if name == CRITIC else Head.POLICY)
        shapes = {each: tuple(weight.shape) for each, weight in written_weights(model).items()}
        saved = saved_shapes(checkpoint.folder / name)
        if not _check_adapter(_adapter_of(saved), _adapter_of(shapes), there, job, findings):
            _check_shapes(saved, shapes, place, learner.model, there, run, findings)
    findings.raise_errors()


def _learner_of(name: str, job: Job, policy: LearnerSettings) -> tuple[Where, LearnerSettings]:
    """The learner whose state a part of a checkpoint has: where the config names its model, and its settings."""
    component = next((part for part in job.components if part.name == name), None)
    own = None if component is None else component.model.path
    model = resolve_model(policy.model if own is None else own)
    place = setting_location("model" if own is None else name, job)
    return place, replace(policy, model=model) if name == LEARNER else replace(policy, model=model, adapter=None)


Adapter = tuple[int, frozenset[str]]  # its rank, and the layers that have it
Shapes = Mapping[str, tuple[int, ...]]


def _adapter_of(shapes: Shapes) -> Adapter | None:
    """The adapter that has these weights; None if they are of a whole model."""
    ranks = {name.partition(".lora_A.")[0]: shape[0] for name, shape in shapes.items() if ".lora_A." in name}
    return (next(iter(ranks.values())), frozenset(ranks)) if ranks else None


def _check_adapter(saved: Adapter | None, own: Adapter | None, there: str, job: Job, findings: Findings) -> bool:
    """Return True if the adapters differ, which is a finding."""
    if saved == own:
        return False
    (before, old), (rank, new) = saved or (0, frozenset()), own or (0, frozenset())
    key = setting_location("lora_rank" if before != rank else "lora_target_modules", job)
    if before != rank:
        has = f"an adapter of rank {before}" if before else "no adapter"
        what = f"is {rank or 'not written'}, but {there} has {has}"
        fix = f"write {key.key_path}: {before}" if before else f"remove {key.key_path}"
    else:
        what = f"gives {_layer_names(new)} an adapter, but {there} has one of {_layer_names(old)}"
        fix = f"write {key.key_path}: [{_layer_names(old)}]"
    findings.error("RST-L004", key, what, "weights of another adapter cannot be restored", f"{fix}, or {START_OVER}")
    return True


def _layer_names(paths: frozenset[str]) -> str:
    return ", ".join(sorted({path.rpartition(".")[2] for path in paths}))


def _check_shapes(
    saved: Shapes, own: Shapes, place: Where, model: str, there: str, run: RunFolder, findings: Findings
) -> None:
    """Check that a model has the weights of a checkpoint."""
    unlike = [name for name in sorted({*saved, *own}) if saved.get(name) != own.get(name)]
    if not unlike:
        return
    first, more = unlike[0], f", and {len(unlike) - 1} more" if len(unlike) > 1 else ""
    sizes = [" x ".join(map(str, shapes[first])) if first in shapes else "missing" for shapes in (saved, own)]
    why = f"{first} is {sizes[0]} there and {sizes[1]} here{more}"
    before: Any = yaml.safe_load(run.config_file.read_text()) if run.config_file.exists() else None
    for key in place.path:
        before = before.get(key) if isinstance(before, Mapping) else None
    former = f"{place.key_path}: {before}" if isinstance(before, str) and before != model else "the model it is of"
    findings.error(
        "RST-L004", place, f"is {model}, but {there} is of another model", why, f"write {former}, or {START_OVER}"
    )


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
def clearing_preempted_mark(run: RunFolder, *kept: type[Exception]) -> Iterator[None]:
    """Context that unmarks a preempted run if it fails, as it would fail again; errors of the types `kept` do not."""
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
