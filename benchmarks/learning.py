"""Whether Roost learns: the sums of examples/arithmetic in every mode, with every loss, with engines that disagree with
the learner and with stale samples, from several seeds; see docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import train_roost
import typer
import yaml
from rich.console import Console
from rich.table import Table
from verdicts import JsonFile, Verdict, print_verdicts, write_results

from roost.rollout.arithmetic import write_arithmetic_model

EXAMPLES = Path(__file__).parent.parent / "examples" / "arithmetic"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A config of examples/arithmetic with changes."""

    example: str
    train: Mapping[str, Any] = field(default_factory=dict)
    noise: float = 0.0  # of the engine's weights, relative
    model: Mapping[str, Any] = field(default_factory=dict)  # sizes that differ from those of the example
    best_reward: float = 1.0
    should_learn: bool = True
    more_steps: int = 1  # times the steps of other scenarios


MODES = {
    "collocated": Scenario("collocated.yaml"),
    "disaggregated, asynchronous": Scenario("rlinf.yaml", {"max_staleness": 1}),
    "hybrid": Scenario("hybrid.yaml"),
}
LOSSES = {
    "grpo": {"advantage_estimator": "grpo"},
    "dr. grpo": {"advantage_estimator": "group_mean", "loss_aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"clip_range_high": 0.28, "loss_aggregation": "token-mean", "dual_clip": 3.0},
    "gspo": {"importance_sampling_level": "sequence"},
    "loop": {"importance_sampling_level": "trajectory"},
    "cispo": {"loss_type": "cispo", "clip_range": 1.0, "clip_range_high": 4.0},
    "sapo": {"loss_type": "sapo"},
    "topr": {"loss_type": "topr"},
    "kimi k1.5": {"loss_type": "kimi15"},
    "reinforce++ with baseline": {"advantage_estimator": "reinforce++_baseline"},
    "rollout log-probs": {"old_logprobs": "rollout"},
    "decoupled": {"old_logprobs": "decoupled"},
    "top-p 0.9, replayed": {"top_p": 0.9, "sampling_mask_replay": True},
}
# On-policy: without a ratio a second epoch has no correction. Twice the steps are as many optimizer steps as elsewhere.
REINFORCE = Scenario("collocated.yaml", {"importance_sampling_level": "none", "ppo_epochs": 1}, more_steps=2)
NOISE, LAG = 0.05, 4
# The learning rate falls to 0: with a constant one the policy of a converged run begins to swing, as each step answers
# to the policy of four steps ago, and no run stays at its best.
STALE: dict[str, Any] = {
    "max_staleness": LAG,
    "learning_rate": 0.0015,
    "lr_scheduler_type": "linear",
    "old_logprobs": "rollout",
    "importance_sampling_level": "none",
}
# Large initial weights make the noise matter, and rewards of -1 to 0 without a baseline make it harmful: the engine
# samples tokens that the learner finds unlikely, and each of them pushes their log-probs down further.
PENALISED: dict[str, Any] = {
    "task": {"_target_": "train_scenarios.PenalisedArithmetic", "largest": 2},
    "prompts_per_step": 9,
    "num_generations": 128,
    "ppo_epochs": 1,
    "advantage_estimator": "reward",
    "importance_sampling_level": "none",
    "learning_rate": 0.001,
    "max_grad_norm": 0,
    "entropy_coef": 0.2,
    "entropy_coef_end": 0.0,
}
SENSITIVE: dict[str, Any] = {"model": {"initializer_range": 0.25}, "best_reward": 0.0, "more_steps": 2}
MISMATCHES = {
    "noisy engine": Scenario("collocated.yaml", noise=NOISE, should_learn=False),
    "noisy engine, corrected": Scenario("collocated.yaml", {"rollout_is": "token"}, NOISE),
    "penalised, no noise": Scenario("collocated.yaml", PENALISED, **SENSITIVE),
    "penalised, noisy engine": Scenario("collocated.yaml", PENALISED, NOISE, should_learn=False, **SENSITIVE),
    "penalised, noisy engine, corrected": Scenario(
        "collocated.yaml", {**PENALISED, "rollout_is": "token"}, NOISE, **SENSITIVE
    ),
    "stale": Scenario("rlinf.yaml", STALE, should_learn=False),
    "stale, corrected": Scenario("rlinf.yaml", {**STALE, "rollout_is": "token"}),
}
OF_LOSSES = {name: Scenario("collocated.yaml", train) for name, train in LOSSES.items()}
SCENARIOS = MODES | OF_LOSSES | {"reinforce": REINFORCE} | MISMATCHES
IN_EXAMPLES = {  # RLinf's keys of settings
    "advantage_estimator": ("algorithm", "adv_type"),
    "ppo_epochs": ("algorithm", "update_epoch"),
    "entropy_coef": ("algorithm", "entropy_bonus"),
    "num_generations": ("algorithm", "group_size"),
    "prompts_per_step": ("data", "rollout_batch_size"),
    "learning_rate": ("actor", "optim", "lr"),
}
# Starts the built-in engine with noise on the weights that it samples with, other noise for each policy version. The
# weights that it was sent stay as they are between steps and when it scores, so that checksums and probes do not see
# the noise: Roost would start such an engine again.
NOISY_ENGINE = """#!{python}
import runpy, sys
import torch
from roost.torch_engine.engine import TorchEngine

step, noise = TorchEngine._step, dict()

def swapped(engine):
    for weight, other in zip(engine.model.module.parameters(), noise[engine.version], strict=True):
        weight.data, other.data = other.data, weight.data

def noisy_step(engine):
    if any(each.request.wants_prompt_logprobs for each in engine._live.values()):
        return step(engine)
    if engine.version not in noise:
        random = torch.Generator().manual_seed(engine.version)
        noise.clear()
        noise[engine.version] = [
            weight.data * (1 + {scale} * torch.randn(weight.shape, generator=random))
            for weight in engine.model.module.parameters()
        ]
    swapped(engine)
    try:
        return step(engine)
    finally:
        swapped(engine)

TorchEngine._step = noisy_step
sys.argv = sys.argv[2:]  # -m, the module, and its arguments
runpy.run_module("roost.torch_engine", run_name="__main__", alter_sys=True)
"""
LAST = 3  # steps whose mean is the reward at the end: one step has 400 samples
AT_FIRST, AT_LAST = 0.2, 0.9


@dataclass(frozen=True, slots=True)
class Learnt:
    """A run: its rewards in the first step and in the last ones."""

    scenario: str
    seed: int
    first: float
    best: float
    last: float
    mismatch: float  # mean KL of engine and learner
    staleness: float  # the largest
    seconds: float  # of all steps


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each scenario.")] = 3,
    steps: Annotated[int, typer.Option(min=LAST, help="Steps of each run.")] = 40,
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one run.")] = 600,
    only: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SCENARIOS)}; default: the modes.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Train on the CPU; print rewards and targets."""
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    chosen = only or list(MODES)
    unknown = set(chosen) - set(SCENARIOS)
    if unknown:
        raise SystemExit(f"there is no scenario {unknown.pop()}; there are {', '.join(SCENARIOS)}")
    runs = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        for name in chosen:
            for seed in range(seeds):
                progress.print(f"{name}, seed {seed}")
                runs.append(learnt(name, seed, steps, Path(made), limit))
                progress.print(str(runs[-1]))
    report(runs, console)
    judged = [
        verdict(name, [run for run in runs if run.scenario == name]) for name in chosen if SCENARIOS[name].should_learn
    ]
    print_verdicts(judged, console)
    if json_file is not None:
        write_results(json_file, {"runs": [asdict(run) for run in runs]}, judged)


def learnt(name: str, seed: int, steps: int, folder: Path, limit: float) -> Learnt:
    """Train a new model. The seed determines its initial weights, the samples and the order of tasks."""
    scenario = SCENARIOS[name]
    config = yaml.safe_load((EXAMPLES / scenario.example).read_text())
    model = write_arithmetic_model(folder / f"model {name} {seed}", seed, **scenario.model)
    config["actor"]["model"]["model_path"] = str(model)
    config["actor"]["seed"] = seed
    config["runner"]["max_steps"] = steps * scenario.more_steps
    for setting in IN_EXAMPLES.keys() & scenario.train.keys():
        *sections, key = IN_EXAMPLES[setting]
        del reduce(getitem, sections, config)[key]
    config["train"] |= scenario.train
    if scenario.noise:
        config["train"]["engine_options"]["python"] = str(noisy_engine(folder / "noisy_engine", scenario.noise))
    metrics = train_roost.run(config, folder / f"{name} {seed}", limit)
    rewards = [row["reward/mean"] + 1 - scenario.best_reward for row in metrics]
    apart = [row[key] for row in metrics for key in ("mismatch/kl_k3", "drift/kl_k3") if key in row]
    staleness, seconds = max(row["staleness/max"] for row in metrics), sum(row["time/step"] for row in metrics)
    ends = rewards[0], max(rewards), mean(rewards[-LAST:])
    return Learnt(name, seed, *ends, mean(apart or [0.0]), staleness, seconds)


def noisy_engine(file: Path, scale: float) -> Path:
    """An interpreter for the engine that adds noise to its weights."""
    file.write_text(NOISY_ENGINE.format(python=sys.executable, scale=scale))
    file.chmod(0o755)
    return file


def report(runs: Sequence[Learnt], console: Console) -> None:
    columns = ("scenario", "seed", "reward at first", "at best", "at last", "mismatch", "largest staleness", "seconds")
    table = Table(*columns, title="Sums learnt from nothing", title_justify="left")
    for run in runs:
        rewards = f"{run.first:.3f}", f"{run.best:.3f}", f"{run.last:.3f}"
        table.add_row(
            run.scenario,
            str(run.seed),
            *rewards,
            f"{run.mismatch:.2g}",
            f"{run.staleness:g}",
            f"{run.seconds:.0f}",
        )
    console.print(table)


def verdict(name: str, runs: Sequence[Learnt]) -> Verdict:
    """Verdict on the worst rewards of all seeds: each seed must learn."""
    first, last = max(run.first for run in runs), min(run.last for run in runs)
    target = f"{name}: reward from at most {AT_FIRST} to at least {AT_LAST}, each of {len(runs)} seeds"
    return Verdict(target, f"{first:.3f} at most, {last:.3f} at least", first <= AT_FIRST and last >= AT_LAST)


if __name__ == "__main__":
    typer.run(main)
