"""The folder of a run: config, plan, checkpoints, the policy, and files of JSON lines with metrics and samples."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from roost.config.findings import counted
from roost.procs.files import LOCK_FILE, Holder, holder_of
from roost.trainer.diagnosis import onsets

Record: TypeAlias = dict[str, Any]
NAME = re.compile(r"step-(\d+)")  # of a checkpoint's folder
ASIDE = ".aside"  # suffix of checkpoints that a resumed run went back before
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class JsonLines:
    """Records of a run, one per line, each with its step.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = JsonLines(Path(folder) / "metrics.jsonl")
    ...     lines.append([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": float("nan")}])
    ...     list(lines)
    [{'step': 1, 'reward/mean': 0.5}, {'step': 2, 'reward/mean': None}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records, visible to readers at once."""
        text = b"".join(_line(record) for record in records)
        if not text:
            return
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # end a line that a crash cut off
                    text = b"\n" + text
            file.write(text)

    def __iter__(self) -> Iterator[Record]:
        """Yield records in order; broken lines and lines without a step are skipped, a missing file is empty."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            for line in file:
                record = _record(line)
                if record is not None:
                    yield record

    def cut_back(self, step: int) -> None:
        """Remove records of later steps and broken lines, atomically."""
        if not self.path.exists():
            return
        kept = (_line(record) for record in self if record["step"] <= step)
        write_whole(self.path, kept)


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically: readers never see a part of it, even after a crash."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with unfinished.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def number_of(record: Record, key: str) -> float | None:
    """Return a finite number of a record, or None; files may have been edited by hand.

    >>> number_of({"step": 1, "reward/mean": "high"}, "reward/mean"), number_of({"step": 1}, "step")
    (None, 1)
    """
    value = record.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _line(record: Mapping[str, Any]) -> bytes:
    return _JSON.encode(_plain(record)).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Convert to JSON types: other libraries' numbers to floats, non-finite numbers to None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "__float__"):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value)


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record


class RunFolder:
    """The files of a run; open one with `create`, `resume` or `open`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = RunFolder.create(Path(folder) / "first", config="steps: 2", plan="{}")
    ...     run.add_step({"step": 1, "reward/mean": 0.25})
    ...     run.name, run.steps()
    ('first', [{'step': 1, 'reward/mean': 0.25}])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.evaluation_lines = JsonLines(self.path / "evaluations.jsonl")
        self.sample_lines = JsonLines(self.path / "samples.jsonl")
        self.learnt_lines = JsonLines(self.path / "learnt.jsonl")
        self.token_lines = JsonLines(self.path / "tokens.jsonl")

    @classmethod
    def create(cls, path: str | Path, config: str, plan: str) -> RunFolder:
        """Create a folder with the config and the plan (as JSON). Raise FileExistsError if it holds a run."""
        run = cls(path)
        run.check_free()
        run.make_folder()
        shutil.rmtree(run.failures, ignore_errors=True)  # left by a run that ended before its first step
        write_whole(run.config_file, [config.encode()])
        write_whole(run.plan_file, [plan.encode()])
        return run

    def write_plan(self, plan: str) -> None:
        """Replace the plan (as JSON) atomically: engines have joined or left."""
        write_whole(self.plan_file, [plan.encode()])

    def check_free(self) -> None:
        """Raise FileExistsError if the folder holds a run that has completed a step or has checkpoints."""
        if self.has_run and (self.steps() or self.checkpoints.exists()):
            raise FileExistsError(
                f"{self.path} holds a run already, with {self._progress()}; give this one another name, "
                f"or continue that one: --resume"
            )

    @classmethod
    def resume(cls, path: str | Path, step: int) -> RunFolder:
        """Open the folder of a run to continue after `step`; records of later steps are removed."""
        run = cls.open(path)
        run.finished_file.unlink(missing_ok=True)
        for lines in (run.metrics, run.evaluation_lines, run.sample_lines, run.learnt_lines, run.token_lines):
            lines.cut_back(step)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an existing run."""
        run = cls(path)
        if run.has_run:
            return run
        there = "is a file" if run.path.is_file() else "holds no run" if run.path.exists() else "does not exist"
        raise FileNotFoundError(
            f"{run.path} {there}; name the folder of a run, which has a {run.config_file.name} "
            f"or a {run.metrics.path.name} in it{run._nearby()}"
        )

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def has_run(self) -> bool:
        """Return True if a run was started here."""
        return any(file.exists() for file in (self.config_file, self.metrics.path))

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def trace_file(self) -> Path:
        return self.path / "trace.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def reward_plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def timing_plot(self) -> Path:
        return self.path / "timing.png"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def finished_file(self) -> Path:
        return self.path / "finished.json"

    @property
    def status_file(self) -> Path:
        """Progress of a running run: step, phase, and how far it is."""
        return self.path / "status.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def scrape_file(self) -> Path:
        """Address of the metrics of a running run, for Prometheus' file_sd_configs."""
        return self.path / "prometheus.json"

    @property
    def preempted_file(self) -> Path:
        """Exists while the run waits to be started again by a scheduler."""
        return self.path / "preempted.json"

    @property
    def ended_file(self) -> Path:
        """How the run ended, if it was stopped or failed; a killed one leaves none."""
        return self.path / "ended.json"

    @property
    def marks(self) -> tuple[Path, ...]:
        """Files that say how the run ended."""
        return self.finished_file, self.preempted_file, self.ended_file

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    def add_step(self, values: Mapping[str, Any]) -> None:
        """Append the metrics of a training step; `values` has its number as `step`."""
        self.metrics.append([values])

    def add_evaluation(self, values: Mapping[str, Any]) -> None:
        """Append the result of an evaluation."""
        self.evaluation_lines.append([values])

    def add_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append samples, each with its `step`, `kind`, `task`, `completion` and `reward`."""
        self.sample_lines.append(samples)

    def add_tokens(self, tokens: Iterable[Mapping[str, Any]]) -> None:
        """Append tokens about which engine and learner differ most, each with its `step`."""
        self.token_lines.append(tokens)

    def add_learnt(self, step: int, groups: Sequence[int]) -> None:
        """Append the groups that a step learnt from, to verify that none was used twice or lost."""
        self.learnt_lines.append([{"step": step, "groups": list(groups)}])

    def has_evaluation(self, step: int) -> bool:
        """Return True if the policy was evaluated after this step."""
        return any(record["step"] == step for record in self.evaluation_lines)

    def finish(self, step: int) -> None:
        """Mark the run as finished: steps up to `step`, the last evaluation and the policy are written."""
        write_whole(self.finished_file, [json.dumps({"step": step}).encode()])

    def mark_preempted(self, step: int | None) -> None:
        """Mark the run as preempted at a step, to be started again; None removes the mark."""
        if step is None:
            self.preempted_file.unlink(missing_ok=True)
        else:
            write_whole(self.preempted_file, [json.dumps({"step": step}).encode()])

    def mark_ended(self, state: str | None, reason: str = "") -> None:
        """Record how the run ended before its last step; None removes the record."""
        if state is None:
            self.ended_file.unlink(missing_ok=True)
        else:
            write_whole(self.ended_file, [json.dumps({"state": state, "reason": reason}).encode()])

    def finished_at(self) -> int | None:
        """The step at which the run finished; None if it did not."""
        try:
            step = json.loads(self.finished_file.read_bytes())["step"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) else None

    def steps(self) -> list[Record]:
        """Metrics by ascending step; for a repeated step, those of the last time."""
        return _by_step(self.metrics)

    def evaluations(self) -> list[Record]:
        """The evaluations, by ascending step."""
        return _by_step(self.evaluation_lines)

    def make_folder(self) -> None:
        """Create the folder if it does not exist."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise NotADirectoryError(f"{self.path} is a file, or lies in one; give the run another name") from None

    def _progress(self) -> str:
        steps = self.steps()
        return f"{counted(len(steps), 'step')} up to step {steps[-1]['step']:,}" if steps else "no step done"

    def _nearby(self) -> str:
        """Runs that the user may have meant: inside the folder, else next to it."""
        for folder in (self.path, self.path.parent):
            if folder.is_dir():
                runs = sorted(str(inner) for inner in folder.iterdir() if inner.is_dir() and RunFolder(inner).has_run)
                if runs:
                    return f": {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}"
        return ""


def _by_step(lines: JsonLines) -> list[Record]:
    found = {record["step"]: record for record in lines}
    return [found[step] for step in sorted(found)]


class RunState(StrEnum):
    """Current activity of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    PREEMPTED = "preempted"  # waits to be started again: the same command continues it
    STOPPED = "stopped"  # by Ctrl-C or `roost stop`
    FAILED = "failed"
    KILLED = "killed"  # no end was recorded: SIGKILL, or the machine went down


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
    """Return True if a folder holds a run, or is locked by one that has yet to write its config and plan."""
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
    """Status of a held run. A file older than the lock is of an earlier process: the run is starting."""
    held, written = _modified_at(run.path / LOCK_FILE), _modified_at(run.status_file)
    return _read(run.status_file) if written >= held else {"phase": STARTING, "time": held}


def _modified_at(file: Path) -> float:
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
