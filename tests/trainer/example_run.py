"""A run as a trainer would leave it, made in a moment: sixty steps that learn, with odd things in between."""

import math
import random

import roost
from roost.trace.chrome import write_trace
from roost.trace.spans import Span, WorkerSpans
from roost.trainer.records.run_folder import RunFolder

STEPS = 60
UNKNOWN_REWARDS = (13, 14, 30)  # steps whose reward is no number
NASTY = "<script>alert('run')</script><img src=x onerror=alert(1)> {{data}} & \u2028 \ud800 </script>"
EPOCH = 1_760_000_000
STEP_S = 4.0
CONFIG = {
    "cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor": "0-1", "rollout": "2-3"}}
}


def make_run(folder, name="sums", steps=STEPS):
    """The folder of a run; its last line is broken off, as after a crash."""
    run = RunFolder.create(folder / name, config="trainer:\n  steps: 60\n", plan=roost.plan(CONFIG).to_json())
    chance = random.Random(7)
    for step in range(1, steps + 1):
        run.add_step(measured(step, chance))
        run.add_samples(
            rollout(step, "train", f"{chance.randint(0, 9)}+{chance.randint(0, 9)}=", chance) for _ in "123"
        )
        if step % 10 == 0 or step == 1:
            run.add_evaluation({"step": step, "version": step, "reward/mean": skill(step) + 0.02, "samples": 64})
            run.add_samples(rollout(step, "evaluation", task, chance) for task in ("3+4=", "17+25=", "8*7="))
    run.add_samples([{"step": steps, "kind": "train", "task": NASTY, "completion": NASTY, "reward": -0.5}])
    run.add_samples([{"step": steps, "kind": "train", "task": "count", "completion": "1 2 3 " * 50_000, "reward": 0.0}])
    with run.metrics.path.open("ab") as file:
        file.write(b'{"step":61,"reward/mean":0.')
    write_trace(run.trace_file, workers(steps), {0: "alpha"})
    return run


def skill(step):
    return 0.95 / (1 + math.exp(-(step - 22) / 8))


def measured(step, chance):
    noisy = 0.06 * chance.gauss(0, 1)
    generate, learn = 2.4 + 0.2 * chance.random(), 1.0 + 0.1 * chance.random()
    return {
        "step": step,
        "version": step,
        "time": EPOCH + step * STEP_S,
        "reward/mean": math.nan if step in UNKNOWN_REWARDS else min(1.0, max(0.0, skill(step) + noisy)),
        "reward/std": 0.4 - 0.3 * skill(step),
        "reward/max": 1.0,
        "staleness/mean": 0.4 + 0.2 * chance.random(),
        "staleness/max": 1.0,
        "tokens/generated": 9000 + chance.randint(0, 500),
        "tokens/per_second": 2300 + 200 * chance.random(),
        "samples/learnt": 256,
        "samples/cancelled": chance.randint(0, 3),
        "samples/failed": 0,
        "loss/policy": 0.02 * chance.gauss(0, 1),
        "grad/norm": math.inf if step == 5 else 0.3 + 0.2 * chance.random(),
        "entropy": 1.6 - 1.2 * skill(step),
        "mismatch/logprob_mean": 0.002 + 0.0005 * chance.random(),
        "time/step": STEP_S,
        "time/generate": generate,
        "time/score": 0.08,
        "time/learn": learn,
        "time/sync": 0.15,
        "time/switch": 0.1,
        "busy/actor": learn / STEP_S,
        "busy/rollout": generate / STEP_S,
    }


def rollout(step, kind, task, chance):
    is_right = chance.random() < skill(step)
    completion = str(eval(task.rstrip("="))) if is_right else str(chance.randint(0, 99))
    return {
        "step": step, "version": step, "kind": kind, "task": task, "completion": completion, "reward": float(is_right),
        "staleness": 0 if kind == "evaluation" else 1, "tokens": len(completion) + 1,
    }  # fmt: skip


def workers(steps, pieces=6):
    """Two processes that generate and one that learns, in turn; each call has so many pieces of work in it."""
    made = []
    for component, rank, device, start, length in (
        ("actor", 0, 0, 2.7, 1.0), ("actor", 1, 1, 2.7, 1.0), ("rollout", 0, 2, 0.1, 2.4), ("rollout", 1, 3, 0.1, 2.3),
    ):  # fmt: skip
        name, inner = ("learn", "minibatch") if component == "actor" else ("generate", "decode")
        spans = []
        for step in range(steps):
            begin = EPOCH + step * STEP_S
            for piece in range(pieces):
                at = begin + start + length * piece / pieces
                spans.append(_span(inner, "work", at, at + length / pieces * 0.8))
            spans.append(_span(name, "call", begin + start, begin + start + length, step=step + 1))
            spans.append(_span("weights", "wait", begin + 3.75, begin + 3.9))
        made.append(WorkerSpans(component, rank, 0, ((0, device),), tuple(spans)))
    return made


def _span(name, category, start, end, **args):
    return Span(name, category, round(start * 1e9), round(end * 1e9), 0, args or None)
