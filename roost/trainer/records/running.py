"""State of runs as their folders show it: running or how they ended, at which step and in which phase."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roost.procs.files import LOCK_FILE, Holder, holder_of
from roost.trainer.diagnosis import onsets
from roost.trainer.records.run_folder import Record, RunFolder, number_of


class RunState(StrEnum):
    """Current activity of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    PREEMPTED = "preempted"  # waits to be started again: the same command continues it
    STOPPED = "stopped"  # by Ctrl-C or `roost stop`
    FAILED = "failed"
    KILLED = "killed"  # left no word: SIGKILL, or the machine went down


ACTIVE = (RunState.RUNNING, RunState.PREEMPTED)
STARTING = "start"  # phase of a run that has yet to launch its processes


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run at a glance."""

    name: str
    state: RunState
    step: int
    steps: int | None = None
    reward: float | None = None
    phase: str | None = None  # with its progress: generate 120/256
    idle_s: float | None = None  # since the status was last written
    reason: str = ""  # of a failure
    mode: str = ""
    components: tuple[str, ...] = ()  # actor 2 on node 0, ...
    holder: Holder | None = None
    diagnoses: tuple[str, ...] = ()  # what went wrong, with the step at which it began


def runs_in(folder: Path) -> Iterator[RunFolder]:
    """Runs below a folder, or the folder itself if it is a run."""
    if is_run(folder):
        yield RunFolder(folder)
    elif folder.is_dir():
        yield from (RunFolder(inner) for inner in sorted(folder.iterdir()) if is_run(inner))


def is_run(folder: Path) -> bool:
    """Return True if a folder holds a run, or is held by one that has yet to write its config and plan."""
    return RunFolder(folder).has_run or holder_of(folder) is not None


def status_of(run: RunFolder, now: float | None = None) -> RunStatus:
    """Read the state of a run from its folder."""
    holder = holder_of(run.path)
    state = _state(run, holder)
    steps = run.steps()
    live = _live(run) if holder is not None else {}
    plan = _read(run.plan_file)
    last: Record = steps[-1] if steps else {}
    written = number_of(live, "time")
    total = number_of(live, "steps") or _planned_steps(plan)
    done = [number_of(live, "step"), number_of(last, "step"), run.finished_at()]
    return RunStatus(
        run.name,
        state,
        int(max(step for step in (*done, 0) if step is not None)),
        None if total is None else int(total),
        number_of(last, "reward/mean"),
        _phase(live),
        None if written is None else max(0.0, (time.time() if now is None else now) - written),
        str(_read(run.ended_file).get("reason", "")) if state is RunState.FAILED else "",
        str(plan.get("mode", "")),
        tuple(_placed(plan)),
        holder,
        tuple(f"{found.code} at step {found.step}" for found in onsets(steps)),
    )


def _state(run: RunFolder, holder: Holder | None) -> RunState:
    if holder is not None:
        return RunState.RUNNING
    if run.finished_at() is not None:
        return RunState.FINISHED
    if run.preempted_file.exists():
        return RunState.PREEMPTED
    recorded = _read(run.ended_file).get("state")
    return RunState(recorded) if recorded in (RunState.STOPPED, RunState.FAILED) else RunState.KILLED


def _live(run: RunFolder) -> Record:
    """Status of a held run; one that is older than the lock is of an earlier process, and the run is starting."""
    held, written = _changed(run.path / LOCK_FILE), _changed(run.status_file)
    return _read(run.status_file) if written >= held else {"phase": STARTING, "time": held}


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _phase(live: Record) -> str | None:
    name, done, total = live.get("phase"), live.get("phase_done"), live.get("phase_total")
    if not isinstance(name, str):
        return None
    return name if total is None else f"{name} {done}/{total}"


def _placed(plan: Record) -> Iterator[str]:
    for name, part in (plan.get("components") or {}).items():
        yield f"{name} {part.get('world_size')}"


def _planned_steps(plan: Record) -> float | None:
    setting = (plan.get("training") or {}).get("max_steps") or {}
    return number_of(setting, "value")


def _read(file: Path) -> Record:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
