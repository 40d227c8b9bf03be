"""What the page of a run is drawn from: values that JSON can hold, whatever there is of the run so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roost.placement.plan import Plan
from roost.trainer.best import best_checkpoint
from roost.trainer.metrics.json_lines import Record, number_of
from roost.trainer.report.phase_times import phase_colours, phases_of, times_of
from roost.trainer.report.rollouts import before_and_after, choose_rollouts
from roost.trainer.report.trace_lanes import packed, read_trace
from roost.trainer.run_folder import RunFolder
from roost.trainer.samples import shortened
from roost.view.marks import marks
from roost.view.text import machines_line

MOST_DEVICES = 128
MOST_CONFIG = 400_000  # characters of the config or the plan


def page_data(run: RunFolder) -> dict[str, Any]:
    """Everything the page shows. Pairs stand in lists: a browser would put the keys of an object in another order."""
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
    return None if best is None else {"step": best.step, "reward": best.reward, "by": best.by}


def duration(steps: Sequence[Record]) -> float | None:
    """Seconds that were spent in steps; a run that was resumed a day later did not take a day longer."""
    known = [time for record in steps if (time := number_of(record, "time/step")) is not None]
    if known:
        return sum(known)
    times = [time for record in steps if (time := number_of(record, "time")) is not None]
    return times[-1] - times[0] if len(times) > 1 else None


def _plan_facts(run: RunFolder) -> dict[str, Any]:
    try:
        plan = Plan.from_json(run.plan_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"mode": None, "machines": None}  # a run without a plan is a run, too
    return {"mode": plan.mode.value, "machines": machines_line(plan.inventory)}


def _keys(steps: Sequence[Record]) -> list[str]:
    """What was measured, in the order in which it came up."""
    seen: dict[str, None] = {}
    for record in steps:
        seen.update((key, None) for key in record if number_of(record, key) is not None)
    return [key for key in seen if key not in ("step", "time")]


def _evaluations(evaluations: Sequence[Record]) -> dict[str, Any]:
    shown = [record for record in evaluations if number_of(record, "reward/mean") is not None]
    return {
        "steps": [record["step"] for record in shown],
        "rewards": [record["reward/mean"] for record in shown],
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
    """What else is in the folder."""
    if not run.path.is_dir():
        return []
    here = sorted(file for file in run.path.iterdir() if file != run.report_file and not file.name.endswith(".part"))
    return [{"name": file.name + "/" * file.is_dir(), "bytes": file.stat().st_size * file.is_file()} for file in here]


def _text(file: Path) -> str | None:
    try:
        return shortened(file.read_text(encoding="utf-8", errors="replace"), MOST_CONFIG)
    except OSError:
        return None
