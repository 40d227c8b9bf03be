"""Whether Roost learns: the sums of examples/arithmetic in every mode, from several seeds; see docs/benchmarks.md."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
# Each mode: an example, and what else it needs.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "collocated": ("collocated.yaml", {}),
    "disaggregated, asynchronous": ("rlinf.yaml", {"max_staleness": 1}),
    "hybrid": ("hybrid.yaml", {}),
}
LAST = 3  # steps whose mean is the reward at the end: one step has 400 samples
AT_FIRST, AT_LAST = 0.2, 0.9


@dataclass(frozen=True, slots=True)
class Learnt:
    """A run: what it earned in its first step and in its last ones."""

    mode: str
    seed: int
    first: float
    last: float
    staleness: float  # the largest
    seconds: float  # of all steps


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each mode.")] = 3,
    steps: Annotated[int, typer.Option(min=LAST, help="Of each run.")] = 40,
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one run.")] = 600,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODES)}; all if left out.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Train on the CPU, and print rewards beside the targets."""
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    chosen = only or list(MODES)
    unknown = set(chosen) - set(MODES)
    if unknown:
        raise SystemExit(f"there is no mode {unknown.pop()}; there are {', '.join(MODES)}")
    runs = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        for mode in chosen:
            for seed in range(seeds):
                progress.print(f"{mode}, seed {seed}")
                runs.append(learnt(mode, seed, steps, Path(made), limit))
    report(runs, console)
    judged = [verdict(mode, [run for run in runs if run.mode == mode]) for mode in chosen]
    print_verdicts(judged, console)
    if json_file is not None:
        write_results(json_file, {"runs": [asdict(run) for run in runs]}, judged)


def learnt(mode: str, seed: int, steps: int, folder: Path, limit: float) -> Learnt:
    """Train a model of its own: another seed is another beginning, other draws and another order."""
    name, more = MODES[mode]
    config = yaml.safe_load((EXAMPLES / name).read_text())
    config["actor"]["model"]["model_path"] = str(write_arithmetic_model(folder / f"model {seed}", seed))
    config["actor"]["seed"] = seed
    config["runner"]["max_steps"] = steps
    config["train"] |= more
    metrics = train_roost.run(config, folder / f"{mode} {seed}", limit)
    rewards = [row["reward/mean"] for row in metrics]
    staleness, seconds = max(row["staleness/max"] for row in metrics), sum(row["time/step"] for row in metrics)
    return Learnt(mode, seed, rewards[0], mean(rewards[-LAST:]), staleness, seconds)


def report(runs: Sequence[Learnt], console: Console) -> None:
    columns = ("mode", "seed", "reward at first", "at last", "largest staleness", "seconds")
    table = Table(*columns, title="Sums learnt from nothing", title_justify="left")
    for run in runs:
        numbers = f"{run.first:.3f}", f"{run.last:.3f}", f"{run.staleness:g}", f"{run.seconds:.0f}"
        table.add_row(run.mode, str(run.seed), *numbers)
    console.print(table)


def verdict(mode: str, runs: Sequence[Learnt]) -> Verdict:
    """Every seed counts: one that does not learn is a mode that does not always work."""
    first, last = max(run.first for run in runs), min(run.last for run in runs)
    target = f"{mode}: reward from at most {AT_FIRST} to at least {AT_LAST}, each of {len(runs)} seeds"
    return Verdict(target, f"{first:.3f} at most, {last:.3f} at least", first <= AT_FIRST and last >= AT_LAST)


if __name__ == "__main__":
    typer.run(main)
