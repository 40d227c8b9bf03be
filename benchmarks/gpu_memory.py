"""Device memory of short runs on one GPU, by phase, beside what the plan predicts.

`python benchmarks/gpu_memory.py torch|vllm MODEL RESULTS` writes the results as JSON; `benchmarks/gpu.py` calls it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gpu_engines import OFFLOADS, write_prompts
from train_roost import run

import roost
from roost.placement.memory.phases import Phase
from roost.placement.memory.residency import Decision

GIB = 1 << 30
EVERY_S = 0.02
RUN_LIMIT_S = 300.0
FRACTION = 0.4  # of the device, for the engine, so that the learner fits beside it
STEPS, PROMPTS, GROUP, PROMPT, NEW_TOKENS = 2, 16, 8, 128, 128
MICRO_BATCH = 4096  # tokens; what plans assume where the config says nothing of sequences
# Phases of a plan, by their names in a trace.
PHASES = {"generate": Phase.GENERATE, "score": Phase.INFER, "learn": Phase.LEARN, "sync": Phase.SYNC}
# Calls of a learner that hand over weights. Before one in a sync, it frees what it learnt with; after it, engines take
# back the memory they generate with.
SENDING = ("send_weights", "write_weights")
# What makes a plan keep both on the device, or let them take turns.
DECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keep": ({}, {}),
    "sleep": (OFFLOADS, {}),
    "restart": (OFFLOADS, {"enable_sleep_mode": False}),
}


class Reading(NamedTuple):
    """GiB in use on the device at a time, in nanoseconds since the epoch."""

    time_ns: int
    gib: float


class Interval(NamedTuple):
    """A phase of a step, in nanoseconds since the epoch."""

    phase: str
    step: int
    start_ns: int
    end_ns: int


class Sampler(threading.Thread):
    """Reads the memory in use until it is stopped."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__(daemon=True)
        self.readings: list[Reading] = []
        self._read = read
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(EVERY_S):
            self.readings.append(Reading(time.time_ns(), self._read()))

    def stop(self) -> list[Reading]:
        self._is_over.set()
        self.join()
        return self.readings


def measure(engine: str, model: Path) -> dict[str, Any]:
    """Predicted and observed GiB by decision and phase."""
    import torch

    total = torch.cuda.mem_get_info(0)[1]
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info(0)[0]  # with what this process takes itself

    def in_use() -> float:
        return (before - torch.cuda.mem_get_info(0)[0]) / GIB

    found: dict[str, Any] = {}
    for decision in DECISIONS:
        try:
            found[decision] = compared(job(model, engine, decision), decision, total / GIB, in_use)
        except Exception as error:  # the other measurements are still useful
            found[decision] = {"failed": f"{type(error).__name__}: {error}"}
        print(engine, decision, json.dumps(found[decision]), file=sys.stderr, flush=True)
    return {f"memory_{engine}": found}


def compared(
    config: Mapping[str, Any], decision: str, device_gib: float | None, in_use: Callable[[], float]
) -> dict[str, dict[str, float | None]]:
    """Run the job, and compare its last step with the plan."""
    planned = predicted(config, decision, device_gib)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_prompts(folder / "prompts.jsonl", PROMPTS * STEPS, PROMPT)
        config = {**config, "train": {**config["train"], "data": {"path": str(data)}}}
        sampler = Sampler(in_use)
        sampler.start()
        try:
            run(config, folder / "job", RUN_LIMIT_S, is_shown=True)
        except RuntimeError:
            if steps_done(folder / "job" / "run" / "metrics.jsonl") < STEPS:
                raise  # else the disk has no room for the checkpoint
        finally:
            readings = sampler.stop()
        phases = intervals(json.loads((folder / "job" / "run" / "trace.json").read_text()))
    last = max(each.step for each in phases)
    observed = by_phase(readings, [each for each in phases if each.step == last])
    return {phase: {"predicted": planned.get(phase), **figures} for phase, figures in observed.items()}


def steps_done(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def predicted(config: Mapping[str, Any], decision: str, device_gib: float | None) -> dict[str, float | None]:
    """GiB that the plan expects on the device, by phase as traces name them."""
    memory = {} if device_gib is None else {"memory_gb": device_gib}
    [held] = roost.plan(dict(config), {"nodes": [{"accelerators": 1, **memory}]}, trains=True).residency.classes
    if held.decision != decision:
        raise RuntimeError(f"the plan decided {held.decision}, not {decision}: {held.reason}")
    found = {name: held.used_gib(phase) for name, phase in PHASES.items()}
    if held.decision is not Decision.KEEP and held.overlaps_sync:
        found["sync"] = held.overlapped_sync_gib
    return found


def intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """Phases of the trainer in a Chrome trace; a sync is as long as the learner hands over weights."""
    start, events = trace["otherData"]["start_ns"], trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}

    def interval(event: Mapping[str, Any], step: int = 0) -> Interval:
        ends_us = event["ts"] + event["dur"]
        return Interval(event["name"], step, start + int(event["ts"] * 1000), start + int(ends_us * 1000))

    spans = [event for event in events if event["ph"] == "X"]
    sent = [interval(event) for event in spans if event["name"] in SENDING]
    phases = [
        interval(event, event["args"]["step"])
        for event in spans
        if event["name"] in PHASES and lanes[event["tid"]].startswith("trainer")
    ]
    return [part for phase in phases for part in (_sending(phase, sent) if phase.phase == "sync" else [phase])]


def _sending(sync: Interval, sent: Sequence[Interval]) -> list[Interval]:
    """The calls within a sync phase, or the whole phase if it has none."""
    within = [each for each in sent if sync.start_ns <= each.start_ns and each.end_ns <= sync.end_ns]
    return [sync._replace(start_ns=each.start_ns, end_ns=each.end_ns) for each in within] or [sync]


def by_phase(readings: Sequence[Reading], phases: Sequence[Interval]) -> dict[str, dict[str, float]]:
    """Peak and median of the readings within each phase; a phase too short for a reading takes the next one.

    >>> readings = [Reading(time, gib) for time, gib in ((0, 1.0), (10, 5.0), (20, 3.0), (30, 2.0))]
    >>> by_phase(readings, [Interval("learn", 0, 5, 25), Interval("sync", 0, 26, 27)])
    {'learn': {'peak': 5.0, 'median': 4.0}, 'sync': {'peak': 2.0, 'median': 2.0}}
    """
    times = [reading.time_ns for reading in readings]
    found: dict[str, list[float]] = {}
    for each in phases:
        first = min(bisect_left(times, each.start_ns), len(times) - 1)
        end = max(bisect_right(times, each.end_ns), first + 1)
        found.setdefault(each.phase, []).extend(reading.gib for reading in readings[first:end])
    return {phase: {"peak": max(values), "median": median(values)} for phase, values in found.items()}


def job(model: Path, engine: str, decision: str) -> dict[str, Any]:
    offloads, rollout = DECISIONS[decision]
    options: dict[str, Any] = {"max_context": 512}
    if engine == "vllm":
        options["args"] = ["--enforce-eager"]
    return {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": 0}},
        "actor": {"model": {"model_path": str(model)}, "optim": {"lr": 1e-6}, **offloads},
        "rollout": {"gpu_memory_utilization": FRACTION, **rollout},
        "train": {
            "engine": engine,
            "compute_dtype": "bfloat16",
            "compile": False,  # takes longer than these runs
            "activation_checkpointing": True,  # plans assume it
            "micro_batch_tokens": MICRO_BATCH,
            "prompts_per_step": PROMPTS,
            "num_generations": GROUP,
            "max_new_tokens": NEW_TOKENS,
            "max_steps": STEPS,
            "checkpoint_every": 0,
            "rewards": {"digits": {"_target_": "train_scenarios.LikedDigits"}},
            "data": {"path": "prompts.jsonl"},
            "engine_options": options,
        },
    }


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
