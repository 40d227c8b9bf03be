"""Roost's side: write a config, run `roost train` on it in a separate process, and read its metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from train_workload import VOCABULARY, Workload, prompt

HERE = Path(__file__).parent
COMMAND = (sys.executable, "-c", "from roost.cli.main import run; run()", "train")
LAST_LINES = 8  # shown of the output of a failed run
# Threads that spin while they wait for each other take several times as long where anything else uses a core.
PATIENT = {"OMP_WAIT_POLICY": "passive"}

Row = dict[str, Any]


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """A model for the workload, and its tokenizer; words beyond those of the tokenizer have no text.

    With weights as small as these all tokens are about as likely, so that completions are as long as they should be.
    """
    from roost.rollout.arithmetic import write_arithmetic_model

    return write_arithmetic_model(
        folder,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=512,
        initializer_range=0.005,
    )


def side_by_side(workload: Workload, model: Path, old_logprobs: str, data: Path | None = None) -> dict[str, Any]:
    """The workload as a job: the learner and an engine, one after the other on the same cores.

    With `data`, the prompts are written there and read as a data file, instead of coming from a class.
    """
    train = {
        "prompts_per_step": workload.prompts,
        "num_generations": workload.group_size,
        "max_new_tokens": workload.max_tokens,
        "learning_rate": workload.learning_rate,
        "advantage_estimator": "grpo",
        "old_logprobs": old_logprobs,
        "max_steps": workload.steps,
        "seed": workload.seed,
        "eval_tasks": 1,
        "checkpoint_every": 0,
    }
    if data is None:
        train["task"] = {"_target_": "train_scenarios.Liking", **asdict(workload)}
    else:
        rows = ({"prompt": prompt(workload, index)} for index in range(workload.steps * workload.prompts))
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        train["data"] = {"path": str(data)}
        train["rewards"] = {"digits": {"_target_": "train_scenarios.LikedDigits"}}
    return job(model, train)


def waiting(max_staleness: int, steps: int, seed: int, model: Path) -> dict[str, Any]:
    """Sums with waits of 0.15 s in the middle and up to 2 s, of which most steps of 400 episodes have one.

    They are learnt as in examples/arithmetic. Twice that learning rate and no entropy bonus let the policy settle on
    wrong answers, with staleness or without: its final reward was then a matter of luck.
    """
    task = {"_target_": "train_scenarios.SlowArithmetic", "largest": 4, "seed": seed}
    train = {
        "prompts_per_step": 25,
        "num_generations": 16,
        "max_new_tokens": 3,
        "learning_rate": 0.001,
        "entropy_coef": 0.02,
        "ppo_epochs": 2,
        "max_steps": steps,
        "seed": seed,
        "max_staleness": max_staleness,
        "max_concurrent_episodes": 1024,
        "checkpoint_every": 0,
        "engine_options": {"max_context": 64},
        "task": {**task, "wait": 0.15, "spread": 1.0, "longest": 2.0},
    }
    return job(model, train)


def job(model: Path, train: Mapping[str, Any]) -> dict[str, Any]:
    cluster = {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": 0, "rollout": 1}}
    return {
        "cluster": cluster,
        "actor": {"model": {"model_path": str(model)}, "optim": {"weight_decay": 0.0}},
        "train": dict(train),
    }


def run(config: Mapping[str, Any], folder: Path, limit: float, is_shown: bool = False) -> list[Row]:
    """Train; return the metrics of every step. The output goes to a log, or is shown."""
    folder.mkdir(parents=True)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    environment = {
        **os.environ,
        **PATIENT,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_worker_niceness": "0",  # by default Ray's workers have a lower priority than the peer's process
    }
    command = [*COMMAND, str(file), "--runs", str(folder), "--name", "run", "--address", "local"]
    with (folder / "log").open("w") as log:
        out = sys.stderr if is_shown else log
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=limit)
    if done.returncode:
        lines = (folder / "log").read_text(errors="replace").splitlines()
        raise RuntimeError(f"roost train ended with {done.returncode}: {' / '.join(lines[-LAST_LINES:])}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
