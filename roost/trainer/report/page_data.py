"""Data of the report page: phase times, rollouts, the trace, and files of a run."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from roost.placement.plan import Plan
from roost.trainer.diagnosis import onsets
from roost.trainer.records.checkpoints import HELD_OUT, best_checkpoint
from roost.trainer.records.run_folder import Record, RunFolder, number_of
from roost.trainer.records.samples import shortened
from roost.view.grid_model import COLOURS, USUAL, marks
from roost.view.text import machines_line

# A phase has the colour of the component that works in it.
_LIKE = {"generate": "rollout", "score": "reward", "learn": "actor", "sync": "inference", "switch": "reference"}
_WHOLE = "time/step"


def phases_of(steps: Sequence[Record]) -> list[str]:
    """Measured phases: the usual ones in their order, then others in order of appearance.

    >>> phases_of([{"step": 1, "time/step": 3.0, "time/save": 1.0, "time/learn": 1.0, "time/generate": 1.0}])
    ['generate', 'learn', 'save']
    """
    measured: dict[str, None] = {}
    for record in steps:
        measured.update(
            (key.removeprefix("time/"), None) for key in record if key.startswith("time/") and key != _WHOLE
        )
    return [*(name for name in _LIKE if name in measured), *(name for name in measured if name not in _LIKE)]


def times_of(steps: Sequence[Record], phase: str) -> list[float]:
    """Seconds of a phase in each step; 0 if not measured."""
    return [number_of(record, f"time/{phase}") or 0.0 for record in steps]


def phase_colours(steps: Sequence[Record]) -> dict[str, str]:
    """A colour for each phase."""
    used = {USUAL[like] for like in _LIKE.values()}
    free = [colour for number, colour in enumerate(COLOURS) if number not in used]
    others = [name for name in phases_of(steps) if name not in _LIKE]
    colours = {name: COLOURS[USUAL[like]] for name, like in _LIKE.items()}
    return colours | {name: free[number % len(free)] for number, name in enumerate(others)}


MOST_OF_A_STEP = 8  # of a kind
MOST_ROLLOUTS = 2_000
MOST_CHARACTERS = 4_000  # of a text
MOST_OF_CONVERSATION = 12_000  # characters of all messages of a rollout
MOST_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts to show, by ascending step, and the total number."""

    shown: tuple[Record, ...]
    total: int


def choose_rollouts(records: Iterable[Record], most: int = MOST_ROLLOUTS) -> Rollouts:
    """Choose the first few rollouts of every step and kind; if too many, of evenly spaced steps."""
    chosen: dict[tuple[int, str], list[Record]] = {}
    total = 0
    for record in records:
        total += 1
        some = chosen.setdefault((record["step"], str(record.get("kind", "train"))), [])
        if len(some) < MOST_OF_A_STEP:
            some.append(_cut(record))
    keys = spread(sorted(chosen), max(1, most // MOST_OF_A_STEP))
    return Rollouts(tuple(record for key in keys for record in chosen[key]), total)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the items, evenly spaced, with the first and the last.

    >>> spread(range(10), 4), spread("ab", 4), spread(range(10), 1)
    ([0, 3, 6, 9], ['a', 'b'], [9])
    """
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def before_and_after(rollouts: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Pairs of rollouts of the first and the last step, of the same tasks if they have any in common.

    Evaluations are preferred, because they use the same tasks each time.

    >>> records = [{"step": step, "task": task} for step in (1, 5) for task in ("3+4=", "1+1=", f"{step}+9=")]
    >>> [(one["step"], other["step"], one["task"]) for one, other in before_and_after(records)]
    [(1, 5, '3+4='), (1, 5, '1+1=')]
    """
    for kind in ("evaluation", "train"):
        of_kind = [record for record in rollouts if record.get("kind", "train") == kind]
        steps = sorted({record["step"] for record in of_kind})
        if len(steps) < 2:
            continue
        first = [record for record in of_kind if record["step"] == steps[0]]
        last = [record for record in of_kind if record["step"] == steps[-1]]
        by_task = {str(record.get("task")): record for record in reversed(last)}
        unique = {str(record.get("task")): record for record in reversed(first)}
        equal = [(record, by_task[task]) for task, record in reversed(unique.items()) if task in by_task]
        return (equal or list(zip(first, last, strict=False)))[:MOST_PAIRS]
    return []


def _cut(record: Mapping[str, Any]) -> Record:
    """Return the rollout with long texts cut in the middle: the start and the end both matter."""
    return {key: _cut_value(value) for key, value in record.items()}


def _cut_value(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value, MOST_CHARACTERS)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return value
    most = max(200, MOST_OF_CONVERSATION // max(1, len(value)))
    total = sum(len(str(one.get("content", ""))) for one in value)
    limit = MOST_CHARACTERS if total <= MOST_OF_CONVERSATION else most
    return [{**one, "content": shortened(str(one.get("content", "")), limit)} for one in value]


MOST_SPANS = 20_000  # on a page: it stays quick, and a screen has no room for more
MOST_LANES = 160
MOST_LEVELS = 5  # of spans inside spans
LANE_PARTS = 20_000  # that a lane is cut into at most, while the file is read
Event: TypeAlias = dict[str, Any]


class Bar(NamedTuple):
    """A span, or several short ones merged, in microseconds since the start of the trace."""

    level: int  # 0: in no other span
    start: float
    length: float
    name: str  # of the longest
    longest: float
    is_wait: bool
    spans: int = 1


@dataclass(slots=True)
class Lane:
    """Bars of one device, or of one lane of a process."""

    name: str
    node: str
    is_device: bool = False
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TraceLanes:
    """Lanes of a trace. Spans shorter than `resolution` microseconds are merged."""

    lanes: tuple[Lane, ...]
    hidden_lanes: int
    spans: int
    resolution: float
    about: dict[str, Any]  # metadata of the trace: start, length, utilization of each device


def read_trace(path: Path, most_spans: int = MOST_SPANS) -> TraceLanes | None:
    """Read a trace written by `write_trace`; None if there is no file. Raise ValueError if it is not a trace."""
    if not path.exists():
        return None
    reader = _Reader()
    try:
        for event in _events(path, reader.about):
            reader.take(event)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace: {error!r}") from None
    lanes = [lane for lane in reader.lanes.values() if lane.bars]
    shown = lanes[:MOST_LANES]
    resolution = coarsest_needed(shown, most_spans)
    for lane in shown:
        lane.bars = merged(lane.bars, resolution)
    return TraceLanes(tuple(shown), len(lanes) - len(shown), reader.spans, resolution, reader.about)


def merged(bars: Sequence[Bar], resolution: float) -> list[Bar]:
    """Merge bars shorter than the resolution that start in the same interval of that length.

    >>> bars = [Bar(0, 0, 2, "a", 2, False), Bar(0, 3, 4, "b", 4, False), Bar(0, 12, 30, "c", 30, False)]
    >>> [(bar.start, bar.length, bar.name, bar.spans) for bar in merged(bars, 10)]
    [(0, 7, 'b', 2), (12, 30, 'c', 1)]
    """
    if not resolution:
        return list(bars)
    result: list[Bar] = []
    places: dict[tuple[int, int], int] = {}
    for bar in bars:
        if bar.length >= resolution:
            result.append(bar)
            continue
        stretch = (bar.level, int(bar.start / resolution))
        if stretch in places:
            result[places[stretch]] = _joined(result[places[stretch]], bar)
        else:
            places[stretch] = len(result)
            result.append(bar)
    return result


def coarsest_needed(lanes: Sequence[Lane], most: int) -> float:
    """Smallest resolution that leaves at most `most` bars; 0 if nothing must be merged."""
    wall = max((bar.start + bar.length for lane in lanes for bar in lane.bars), default=0.0)
    if sum(len(lane.bars) for lane in lanes) <= most:
        return 0.0
    # From one pixel of a screen that shows a sixteenth of the trace, up to unreadably coarse.
    resolutions = [wall / parts for parts in (16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64)]
    for resolution in resolutions:
        if sum(len(merged(lane.bars, resolution)) for lane in lanes) <= most:
            return resolution
    return resolutions[-1]


def _joined(one: Bar, other: Bar) -> Bar:
    name, longest = (other.name, other.longest) if other.longest > one.longest else (one.name, one.longest)
    end = max(one.start + one.length, other.start + other.length)
    is_wait = one.is_wait and other.is_wait
    return Bar(one.level, one.start, end - one.start, name, longest, is_wait, one.spans + other.spans)


class _Reader:
    """Collects lanes from events, which are ordered by lane, then by start."""

    def __init__(self) -> None:
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.about: dict[str, Any] = {}
        self.spans = 0
        self._nodes: dict[int, str] = {}
        self._open: list[float] = []  # end times of spans that the next one may be nested in
        self._current: tuple[int, int] | None = None

    def take(self, event: Event) -> None:
        if event["ph"] == "M":
            if event["name"] == "process_name":
                self._nodes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                key = event["pid"], event["tid"]
                self.lanes[key] = Lane(event["args"]["name"], self._nodes.get(event["pid"], ""))
        elif event["ph"] == "X":
            self._take_span(event)

    def _take_span(self, event: Event) -> None:
        key = event["pid"], event["tid"]
        if key != self._current:
            self._current, self._open = key, []
        lane = self.lanes.setdefault(key, Lane(f"lane {key[1]}", self._nodes.get(key[0], f"process {key[0]}")))
        lane.is_device = event["cat"] == "device"
        self.spans += not lane.is_device
        start, length = float(event["ts"]), float(event["dur"])
        while self._open and self._open[-1] <= start:
            self._open.pop()
        level = len(self._open)
        self._open.append(start + length)
        if level >= MOST_LEVELS:
            return
        lane.bars.append(Bar(level, start, length, event["name"], length, event["cat"] == "wait"))
        if len(lane.bars) > 2 * LANE_PARTS:  # a trace may be larger than memory
            lane.bars = merged(lane.bars, (start + length) / LANE_PARTS)


def _events(path: Path, about: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of a trace, streaming if each has its own line; metadata after them goes to `about`."""
    with path.open(encoding="utf-8") as file:
        if file.readline().strip() != '{"traceEvents":[':
            file.seek(0)
            whole = json.load(file)
            about.update(whole.get("otherData", {}))
            yield from whole["traceEvents"]
            return
        for line in file:
            if line.startswith("]"):
                about.update(json.loads("{" + line.lstrip("],")).get("otherData", {}))
                return
            yield json.loads(line.rstrip().rstrip(","))


def packed(lanes: Iterable[Lane]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return all span names, and lanes with bars as flat integers, six per bar."""
    numbers = count()
    names: dict[str, int] = {}
    rows = []
    for lane in lanes:
        flat: list[int] = []
        for bar in lane.bars:
            if bar.name not in names:
                names[bar.name] = next(numbers)
            start, end = round(bar.start), round(bar.start + bar.length)
            flat += (bar.level, start, end - start, names[bar.name], bar.spans, int(bar.is_wait))
        rows.append({"name": lane.name, "node": lane.node, "is_device": lane.is_device, "bars": flat})
    return list(names), rows


MOST_DEVICES = 128
MOST_CONFIG = 400_000  # characters of the config or the plan


def page_data(run: RunFolder) -> dict[str, Any]:
    """All data of the page. Pairs are lists, because browsers may reorder the keys of an object."""
    steps, evaluations = run.steps(), run.evaluations()
    rollouts = choose_rollouts(run.sample_lines)
    return {
        "name": run.name,
        **_plan_facts(run),
        "steps": [record["step"] for record in steps],
        "times": [number_of(record, "time") for record in steps],
        "series": [[key, [number_of(record, key) for record in steps]] for key in _keys(steps)],
        "evaluations": _evaluations(evaluations),
        "best": _best(run),
        "diagnoses": [
            {"step": one.step, "code": one.code, "figures": one.figures, "cause": one.cause, "advice": one.advice}
            for one in onsets(steps)
        ],
        "tokens": _largest_ratios(run),
        "duration": duration(steps),
        "phases": [
            {"name": name, "colour": phase_colours(steps)[name], "seconds": times_of(steps, name)}
            for name in phases_of(steps)
        ],
        "rollouts": rollouts.shown,
        "rollouts_total": rollouts.total,
        "pairs": before_and_after(rollouts.shown),
        "config": _text(run.config_file),
        "plan": _text(run.plan_file),
        "files": _files(run),
        **_trace_facts(run, steps),
    }


def _best(run: RunFolder) -> dict[str, Any] | None:
    best = best_checkpoint(run)
    return None if best is None else {"step": best.step, "figure": best.figure}


MOST_TOKENS = 200  # of those about which engine and learner differ most


def _largest_ratios(run: RunFolder) -> list[Record]:
    """Tokens with the largest ratios of the newest steps, the newest first."""
    newest = deque(run.token_lines, maxlen=MOST_TOKENS)
    return [one for one in reversed(newest) if number_of(one, "ratio") is not None]


def duration(steps: Sequence[Record]) -> float | None:
    """Seconds spent in steps; pauses before a resume do not count."""
    known = [time for record in steps if (time := number_of(record, "time/step")) is not None]
    if known:
        return sum(known)
    times = [time for record in steps if (time := number_of(record, "time")) is not None]
    return times[-1] - times[0] if len(times) > 1 else None


def _plan_facts(run: RunFolder) -> dict[str, Any]:
    try:
        plan = Plan.from_json(run.plan_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"mode": None, "machines": None}  # such as a folder with metrics alone
    return {"mode": plan.mode.value, "machines": machines_line(plan.inventory)}


def _keys(steps: Sequence[Record]) -> list[str]:
    """Names of the metrics, in order of first appearance."""
    seen: dict[str, None] = {}
    for record in steps:
        seen.update((key, None) for key in record if number_of(record, key) is not None)
    return [key for key in seen if key not in ("step", "time")]


def _evaluations(evaluations: Sequence[Record]) -> dict[str, Any]:
    """Evaluations of the policy: mean rewards, or held-out losses of supervised training."""
    key = HELD_OUT if any(number_of(record, HELD_OUT) is not None for record in evaluations) else "reward/mean"
    shown = [record for record in evaluations if number_of(record, key) is not None]
    return {
        "steps": [record["step"] for record in shown],
        "rewards": [record[key] for record in shown],
        "samples": [number_of(record, "samples") for record in shown],
    }


def _trace_facts(run: RunFolder, steps: Sequence[Record]) -> dict[str, Any]:
    """The lanes of the trace, how busy devices and components were, and the colours of the components."""
    problem = None
    try:
        trace = read_trace(run.trace_file)
    except (OSError, ValueError) as error:
        trace, problem = None, f"The trace cannot be read: {error}"
    busy = [key.removeprefix("busy/") for key in _keys(steps) if key.startswith("busy/")]
    devices = trace.about.get("utilization", []) if trace else []
    names = list(dict.fromkeys([*busy, *(name for device in devices for name in device["by_component"])]))
    facts: dict[str, Any] = {
        "components": [{"name": mark.component, "colour": mark.colour, "ink": mark.ink} for mark in marks(names)],
        "devices": devices[:MOST_DEVICES],
        "hidden_devices": len(devices[MOST_DEVICES:]),
        "trace": None,
        "trace_problem": problem,
    }
    if trace:
        span_names, lanes = packed(trace.lanes)
        facts["trace"] = {
            "names": span_names,
            "lanes": lanes,
            "hidden_lanes": trace.hidden_lanes,
            "spans": trace.spans,
            "dropped": trace.about.get("dropped_spans", 0),
            "resolution": trace.resolution,
            "start": trace.about.get("start_ns", 0) / 1e9,
        }
    return facts


def _files(run: RunFolder) -> list[dict[str, Any]]:
    """Files in the run folder."""
    if not run.path.is_dir():
        return []
    here = sorted(file for file in run.path.iterdir() if file != run.report_file and not file.name.endswith(".part"))
    return [{"name": file.name + "/" * file.is_dir(), "bytes": file.stat().st_size * file.is_file()} for file in here]


def _text(file: Path) -> str | None:
    try:
        return shortened(file.read_text(encoding="utf-8", errors="replace"), MOST_CONFIG)
    except OSError:
        return None
