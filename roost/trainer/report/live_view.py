"""Live view of a run: a fixed panel on a terminal, else one line per step."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from roost.config.findings import counted
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
                get_renderable=lambda: picture(self._progress, self._clock()),
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
            self._say(step_line(self._progress))

    def _write_status(self, is_new: bool = False) -> None:
        """Write the progress for `roost status`, at most once a second within a phase; it must not end a run."""
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
        self._say(text)

    def _say(self, text: str) -> None:
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


def picture(progress: Progress, now: float) -> RenderableType:
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
