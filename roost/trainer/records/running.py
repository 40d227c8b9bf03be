"""State of runs as their folders show it: running, finished, preempted or ended, at which step and in which phase."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from roost.procs.files import Holder, holder_of
from roost.trainer.records.run_folder import Record, RunFolder, number_of


class RunState(StrEnum):
    """Current activity of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    PREEMPTED = "preempted"  # waits to be started again: the same command continues it
    ENDED = "ended"  # stopped, failed or killed


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
    mode: str = ""
    components: tuple[str, ...] = ()  # actor 2 on node 0, ...
    holder: Holder | None = None


def runs_in(folder: Path) -> Iterator[RunFolder]:
    """Runs below a folder, or the folder itself if it is a run."""
    if RunFolder(folder).has_run:
        yield RunFolder(folder)
    elif folder.is_dir():
        yield from (RunFolder(inner) for inner in sorted(folder.iterdir()) if RunFolder(inner).has_run)


def status_of(run: RunFolder, now: float | None = None) -> RunStatus:
    """Read the state of a run from its folder."""
    holder = holder_of(run.path)
    steps = run.steps()
    live = _read(run.status_file) if holder is not None else {}
    plan = _read(run.plan_file)
    last: Record = steps[-1] if steps else {}
    written = number_of(live, "time")
    total = number_of(live, "steps") or _planned_steps(plan)
    done = [number_of(live, "step"), number_of(last, "step"), run.finished_at()]
    return RunStatus(
        run.name,
        _state(run, holder),
        int(max(step for step in (*done, 0) if step is not None)),
        None if total is None else int(total),
        number_of(last, "reward/mean"),
        _phase(live),
        None if written is None else max(0.0, (time.time() if now is None else now) - written),
        str(plan.get("mode", "")),
        tuple(_placed(plan)),
        holder,
    )


def _state(run: RunFolder, holder: Holder | None) -> RunState:
    if holder is not None:
        return RunState.RUNNING
    if run.finished_at() is not None:
        return RunState.FINISHED
    return RunState.PREEMPTED if run.preempted_file.exists() else RunState.ENDED


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
