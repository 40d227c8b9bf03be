"""Live view of a run: a fixed panel on a terminal, else one line per step."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roost.config.findings import counted
from roost.trainer.diagnosis import onsets
from roost.trainer.metrics import PHASES
from roost.trainer.records.checkpoints import Checkpoints, best_checkpoint
from roost.trainer.records.run_folder import Record, RunFolder, number_of
from roost.view.plain import plain_line

REFRESHES_PER_SECOND = 4
SPARKS = "▁▂▃▄▅▆▇█"
RECENT = 10  # steps in the mean
CURVE = 40  # steps in the sparkline, and for the estimate of the time left
BAR = 32
STATUS_EVERY = 1.0  # seconds between writes of the status file


@dataclass(frozen=True, slots=True)
class Phase:
    """Current phase of a run and its progress."""

    name: str
    total: int | None
    since: float
    done: int = 0


@dataclass(slots=True)
class Progress:
    """Progress of a run. Its values are only ever replaced, so that another thread may read them."""

    steps: int
    started: float
    done: int = 0
    ends: tuple[float, ...] = ()  # end times of the newest steps
    phase: Phase | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()

    def add(self, values: Mapping[str, float], now: float) -> None:
        self.done = int(values.get("step", self.done + 1))
        self.ends = (*self.ends, now)[-CURVE:]
        self.values = dict(values)
        if "reward/mean" in values:
            self.rewards = (*self.rewards, values["reward/mean"])[-CURVE:]

    @property
    def seconds_left(self) -> float:
        """Estimated seconds for the remaining steps; NaN before the first step is done.

        Time before the first step is not included: startup may take as long as many steps.
        """
        ends = self.ends
        each = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else self.values.get("time/step", math.nan)
        return each * (self.steps - self.done)

    @property
    def recent_reward(self) -> float:
        known = [reward for reward in self.rewards[-RECENT:] if math.isfinite(reward)]
        return sum(known) / len(known) if known else math.nan


class LiveView:
    """Shows a run live. Calls return at once: a thread draws, at most four times a second.

    >>> console = Console(width=120, force_terminal=False)
    >>> with LiveView(2, console) as view:
    ...     view.phase("generate", total=256)
    ...     view.advance(120)
    ...     speed = {"tokens/per_second": 1234.0, "time/step": 2.0}
    ...     view.step({"step": 1, "reward/mean": 0.25, "staleness/mean": 0.5} | speed)
    ...     view.step({"step": 2, "reward/mean": 1.0, "samples/learnt": 0.0} | speed)
    step 1/2  reward 0.250  mean 0.250  staleness 0.5  1,234 tokens/s  2.0 s  left 0:02
    step 2/2  reward 1.000  mean 0.625  1,234 tokens/s  2.0 s  nothing learnt
    """

    def __init__(
        self,
        steps: int,
        console: Console,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        status_file: Path | None = None,
        rewards: Sequence[float] = (),
    ) -> None:
        """`rewards` are those of the steps up to `first_step`, which the running mean continues."""
        self._console = console
        self._clock = clock
        self._status_file = status_file
        self._last_status = -math.inf
        self._progress = Progress(steps, clock(), done=first_step, rewards=tuple(rewards)[-CURVE:])
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                get_renderable=lambda: panel(self._progress, self._clock()),
                console=console,
                refresh_per_second=REFRESHES_PER_SECOND,
            )

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.phase = None
        if self._live:
            self._live.stop()

    def phase(self, name: str, total: int | None = None) -> None:
        """Start a phase, such as generating `total` samples."""
        self._progress.phase = Phase(name, total, self._clock())
        self._write_status(is_new=True)

    def advance(self, done: int) -> None:
        """Set the progress of the phase, counted from its start."""
        phase = self._progress.phase
        if phase:
            self._progress.phase = Phase(phase.name, phase.total, phase.since, done)
            self._write_status()

    def step(self, values: Mapping[str, float]) -> None:
        """Add a finished step with its metrics."""
        self._progress.add(values, self._clock())
        self._write_status(is_new=True)
        if not self._live:
            self.note(step_line(self._progress))

    def _write_status(self, is_new: bool = False) -> None:
        """Write the progress for `roost status`, at most once a second within a phase. Errors must not end a run."""
        now, progress = self._clock(), self._progress
        if self._status_file is None or (not is_new and now - self._last_status < STATUS_EVERY):
            return
        self._last_status = now
        phase = progress.phase
        status = {
            "step": progress.done,
            "steps": progress.steps,
            "phase": None if phase is None else phase.name,
            "phase_done": None if phase is None else phase.done,
            "phase_total": None if phase is None else phase.total,
            "time": time.time(),
        }
        with contextlib.suppress(OSError):
            part = self._status_file.with_name(f".{self._status_file.name}")
            part.write_text(json.dumps(status), encoding="utf-8")
            part.replace(self._status_file)  # without fsync, which would hold up the loop

    def note(self, text: str) -> None:
        """Print a message above the panel, or as a line."""
        self._console.print(Text(plain_line(text)), soft_wrap=True)


def step_line(progress: Progress) -> str:
    """The newest step in one line."""
    parts = [f"step {progress.done:,}/{progress.steps:,}"]
    if "reward/mean" in progress.values:
        parts += [f"reward {_number(progress.rewards[-1])}", f"mean {_number(progress.recent_reward)}"]
    parts += _shown_metrics(progress.values)
    if progress.done < progress.steps and progress.seconds_left >= 1:
        parts.append(f"left {clock_time(progress.seconds_left)}")
    return "  ".join(parts)


def panel(progress: Progress, now: float) -> RenderableType:
    """The panel of a run: progress, current phase and metrics."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    times = f"{clock_time(now - progress.started)} elapsed, {clock_time(progress.seconds_left)} left"
    table.add_row(f"step {progress.done:,}/{progress.steps:,}", _bar(progress.done, progress.steps), times)
    phase = progress.phase
    if phase:
        count = f" {phase.done:,}/{phase.total:,}" if phase.total else f" {phase.done:,}" if phase.done else ""
        table.add_row(f"{phase.name}{count}", _bar(phase.done, phase.total, now), clock_time(now - phase.since))
    if progress.rewards:
        newest, mean = _number(progress.rewards[-1]), _number(progress.recent_reward)
        curve = Text(sparkline(progress.rewards), style="cyan")
        table.add_row(f"reward {newest}", curve, f"mean of the last {min(RECENT, len(progress.rewards))}: {mean}")
    lines: list[RenderableType] = [table]
    metrics = "   ".join(_shown_metrics(progress.values))
    if metrics:
        lines.append(Text(metrics, no_wrap=True, overflow="ellipsis"))
    busy = {name.removeprefix("busy/"): share for name, share in progress.values.items() if name.startswith("busy/")}
    if busy:
        lines.append(_busy_line(busy))
    return Group(*lines)


def sparkline(numbers: tuple[float, ...]) -> str:
    """Draw numbers as a row of small bars, scaled from minimum to maximum; NaN is a gap.

    >>> sparkline((0.0, 0.5, float("nan"), 1.0)), sparkline((0.3, 0.3))
    ('▁▅ █', '▁▁')
    """
    known = [number for number in numbers if math.isfinite(number)]
    low, spread = min(known, default=0.0), (max(known) - min(known)) if known else 0.0
    levels = len(SPARKS) - 1
    return "".join(
        (SPARKS[round((number - low) / spread * levels)] if spread else SPARKS[0]) if math.isfinite(number) else " "
        for number in numbers
    )


def clock_time(seconds: float) -> str:
    """Format a duration as on a clock.

    >>> clock_time(75), clock_time(3725), clock_time(float("nan"))
    ('1:15', '1:02:05', '-:--')
    """
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(done: int, total: int | None, now: float = 0.0) -> ProgressBar:
    return ProgressBar(total, done, width=BAR, pulse=total is None, animation_time=now)


def _busy_line(busy: Mapping[str, float]) -> Text:
    line = Text("busy", no_wrap=True, overflow="ellipsis")
    for name, share in busy.items():
        level = round(min(max(share, 0.0), 1.0) * (len(SPARKS) - 1)) if math.isfinite(share) else 0
        line.append(f"   {name} ").append(SPARKS[level], style="green").append(f" {share:.0%}")
    return line


def _shown_metrics(values: Mapping[str, float]) -> list[str]:
    """Metrics other than the reward, as text."""
    shown: dict[str, Callable[[float], str]] = {
        "staleness/mean": lambda value: f"staleness {value:.1f}",
        "loss/policy": lambda value: f"loss {_number(value)}",
        "loss/supervised": lambda value: f"loss {_number(value)}",
        "loss/distillation": lambda value: f"distillation {_number(value)}",
        "tokens/per_second": lambda value: f"{value:,.0f} tokens/s",
        "time/step": lambda value: f"{value:.1f} s",
        "samples/learnt": lambda value: "" if value else "nothing learnt",
        "samples/failed": lambda value: f"failed {value:,.0f}" if value else "",
        "steps/skipped": lambda value: f"skipped {counted(round(value), 'optimizer step')}" if value else "",
        "critic/skipped": lambda value: f"skipped {value:,.0f} of the critic" if value else "",
    }
    return [text for name, spell in shown.items() if name in values and (text := spell(values[name]))]


def _number(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"


SHOWN = 5  # samples of each kind
WIDEST = 60  # characters of a sample
SHOWN_MESSAGES = 8  # of the conversation
WIDEST_MESSAGE = 200


def print_summary(run: RunFolder, console: Console) -> None:
    """Print the summary of a finished run."""
    steps = run.steps()
    rewards = [reward for step in steps if (reward := number_of(step, "reward/mean")) is not None]
    if rewards:
        console.print(f"reward   {sparkline(tuple(rewards))}  {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    losses = tuple(loss for step in steps if (loss := number_of(step, "loss/supervised")) is not None)
    if losses:
        console.print(f"loss     {sparkline(losses)}  {losses[0]:.3f} -> {losses[-1]:.3f}")
    apart = tuple(one for step in steps if (one := number_of(step, "loss/distillation")) is not None)
    if apart:
        console.print(f"teacher  {sparkline(apart)}  {apart[0]:.3f} -> {apart[-1]:.3f} (distillation loss)")
    _print_samples(run, console)
    best = best_checkpoint(run)
    if best is not None:
        folder = Checkpoints(run.checkpoints, 1).at(best.step).folder
        console.print(Text(f"best     step {best.step}, {best.figure}: {folder}"), soft_wrap=True)
    for found in onsets(steps):
        console.print(Text(f"diagnosis {found}"), soft_wrap=True)
    if steps:
        _print_failures(run, steps, console)
        _print_skipped(steps, console)
        _print_data(steps[-1], console)
        _print_times(steps, console)


def _print_samples(run: RunFolder, console: Console) -> None:
    """Print answers of the first and the last step, on the same tasks if possible, and of the last evaluation."""
    first = list(islice((one for one in run.sample_lines if one["kind"] == "train" and one["step"] == 1), SHOWN))
    at_end = {one["task"]: one for one in _of_last(run, "train") if one["step"] > 1}
    same = [at_end[task] for task in dict.fromkeys(one["task"] for one in first) if task in at_end]
    last = same or list(at_end.values())[:SHOWN]
    tried = {one["task"]: one for one in _of_last(run, "evaluation")}
    of_training = [*first, *last]
    same = [tried[task] for task in dict.fromkeys(one["task"] for one in of_training) if task in tried]
    evaluated = same or list(tried.values())[:SHOWN]
    _print_table("training", of_training, console)
    _print_table("evaluation", evaluated, console)
    _print_conversation([*evaluated, *last, *reversed(first)], console)


def _of_last(run: RunFolder, kind: str) -> list[Record]:
    """Samples of the last step that has any of this kind. Reads the file twice, as it may be larger than memory."""
    step = max((one["step"] for one in run.sample_lines if one["kind"] == kind), default=0)
    return [one for one in run.sample_lines if one["kind"] == kind and one["step"] == step]


def _print_table(kind: str, samples: Sequence[Record], console: Console) -> None:
    table = Table(kind, "task", "answer", "reward", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for one in samples:
        reward = number_of(one, "reward")
        table.add_row(f"step {one['step']}", _short(one["task"]), _short(one["completion"]), f"{reward or 0:.2f}")
    if table.row_count:
        console.print(table)


def _print_conversation(samples: Sequence[Record], console: Console) -> None:
    """Print the first sample that has messages."""
    sample = next((one for one in samples if one.get("messages")), None)
    if sample is None:
        return
    messages = [one for one in sample["messages"] if isinstance(one, dict)]
    left_out = len(messages) - SHOWN_MESSAGES
    shown = messages if left_out <= 0 else [*messages[: SHOWN_MESSAGES // 2], *messages[-SHOWN_MESSAGES // 2 :]]
    ended = f", finish {sample['finish']}" if sample.get("finish") else ""
    console.print(Text(f"sample   step {sample['step']}{ended}; all messages are in samples.jsonl and the report"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for number, one in enumerate(shown):
        if left_out > 0 and number == SHOWN_MESSAGES // 2:
            table.add_row("", Text(f"[{counted(left_out, 'message')} omitted]"))
        style = "bold" if one.get("generated") else ""
        table.add_row(Text(f"  {plain_line(str(one.get('role')))}"), _short(one.get("content"), WIDEST_MESSAGE, style))
    console.print(table)


def _print_failures(run: RunFolder, steps: Sequence[Record], console: Console) -> None:
    reasons = len(list(run.failures.glob("*.txt")))
    if reasons:
        failed = sum(number_of(step, "samples/failed") or 0.0 for step in steps)
        line = f"failed   {counted(int(failed), 'episode')} after all attempts; {counted(reasons, 'reason')}, with"
        console.print(Text(f"{line} tracebacks, in {run.failures}"), soft_wrap=True)


def _print_skipped(steps: Sequence[Record], console: Console) -> None:
    skipped = [step for step in steps if number_of(step, "steps/skipped") or number_of(step, "critic/skipped")]
    if skipped:
        first, last = skipped[0]["step"], skipped[-1]["step"]
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        console.print(f"skipped  optimizer steps in {where}: loss or gradient not finite")


def _print_data(step: Record, console: Console) -> None:
    """Print how much of the data was used, of a run whose prompts come from files."""
    rows, epoch = number_of(step, "data/rows"), number_of(step, "data/epoch")
    if rows is not None:
        dropped = int(number_of(step, "data/dropped_rows") or 0)
        left_out = f"; {counted(dropped, 'row')} dropped for their length" if dropped else ""
        console.print(f"data     {counted(int(rows), 'row')}, epoch {epoch or 0:.2f}{left_out}")


def _print_times(steps: Sequence[Record], console: Console) -> None:
    """Print seconds by phase; the rest is checkpoints, evaluations and driver overhead."""
    spent = {name: sum(number_of(step, f"time/{name}") or 0.0 for step in steps) for name in PHASES}
    whole = sum(number_of(step, "time/step") or 0.0 for step in steps)
    parts = [f"{name} {seconds:.0f} s ({seconds / whole:.0%})" for name, seconds in spent.items() if whole and seconds]
    console.print(f"time     {', '.join(parts)}, of {whole:.0f} s in {counted(len(steps), 'step')}")


def _short(value: object, widest: int = WIDEST, style: str = "") -> Text:
    """Shorten text from a model; it must not be interpreted by the terminal."""
    text = plain_line(str(value))
    return Text(text if len(text) <= widest else f"{text[: widest - 1]}…", style=style)
