"""Speed of Roost's training: compared with TRL on the same model, prompts and cores, and with and without staleness.

The first time, `--setup-peer` makes an environment for TRL; see docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import train_environment
import train_roost
import typer
from peer_environment import PeerPython, print_no_peer
from rich.console import Console
from rich.table import Table
from train_results import Speed, StaleRun, of_metrics, of_peer, of_staleness, phase_shares, speed, stale_run
from train_workload import Workload, small
from verdicts import JsonFile, Verdict, print_verdicts, write_results

HERE = Path(__file__).parent
PARTS = ("peer", "small", "staleness")
SMALL = 128, 3  # width and layers of the model of the part `small`, which has 0.6 million parameters
LAST_LINES = 8  # shown of the output of a failed run


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each runs both sides once.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Steps beside TRL, the first of which warms up.")] = 3,
    staleness_steps: Annotated[int, typer.Option(min=4, help="Steps with staleness and without.")] = 45,
    staleness: Annotated[int, typer.Option(min=1, help="Staleness to compare with none.")] = 1,
    hidden: Annotated[int, typer.Option(min=64, help="The model's width beside TRL, a multiple of 64.")] = 384,
    layers: Annotated[int, typer.Option(min=1, help="The model's layers beside TRL.")] = 4,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples that TRL takes in one pass.")] = 128,
    generation: Annotated[str, typer.Option(help="TRL's generation: dynamic, static or continuous.")] = "static",
    old_logprobs: Annotated[str, typer.Option(help="Roost's setting of that name.")] = "rollout",
    data: Annotated[bool, typer.Option("--data", help="Roost's prompts come from a data file.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one run of one side.")] = 600,
    only: Annotated[list[str] | None, typer.Option(help="peer, small or staleness; all if left out.")] = None,
    peer_python: PeerPython = None,
    setup_peer: Annotated[bool, typer.Option("--setup-peer", help="Create TRL's environment first.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure on the CPU; print results and targets."""
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    if setup_peer:
        train_environment.set_up(progress)
    unknown = set(only or ()) - set(PARTS)
    if unknown:
        raise SystemExit(f"there is no part {unknown.pop()}; there are {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    judged: list[Verdict] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for part, workload, sizes in (
            ("peer", Workload(steps), (hidden, layers)),
            ("small", small(steps * 4), SMALL),
        ):
            if part not in (only or PARTS):
                continue
            peer = train_environment.find(peer_python)
            (folder / part).mkdir()
            model = train_roost.write_model(folder / part / "model", *sizes)
            settings = {"micro_batch": micro_batch, "generation": generation, "threads": os.cpu_count() or 1}
            config = train_roost.side_by_side(
                workload, model, old_logprobs, folder / part / "prompts.jsonl" if data else None
            )
            ours, theirs, shares = measure_peer(
                workload, model, config, settings, peer, rounds, folder / part, limit, progress
            )
            report_peer(part, ours, theirs, shares, console)
            results[f"{part} beside TRL"] = {
                "roost": [asdict(run) for run in ours],
                "trl": [asdict(run) for run in theirs],
                "shares": shares,
            }
            if theirs:
                judged.append(of_peer(part, ours, theirs))
            else:
                print_no_peer(console)
        if "staleness" in (only or PARTS):
            without, stale = measure_staleness(staleness, staleness_steps, rounds, folder, limit, progress)
            report_staleness(without, stale, staleness, console)
            results["staleness"] = {
                "0": [asdict(run) for run in without],
                str(staleness): [asdict(run) for run in stale],
            }
            judged += of_staleness(without, stale)
    print_verdicts(judged, console)
    if json_file is not None:
        write_results(json_file, results, judged)


def measure_peer(
    workload: Workload,
    model: Path,
    config: dict[str, Any],
    settings: dict[str, Any],
    peer: Path | None,
    rounds: int,
    folder: Path,
    limit: float,
    progress: Console,
) -> tuple[list[Speed], list[Speed], dict[str, float]]:
    """Both sides in turn, each in a process of its own; the shares of phases are the mean over the rounds."""
    ours, theirs, shares = [], [], []
    for turn in range(rounds):
        progress.print(f"round {turn + 1} of {rounds}, Roost")
        metrics = train_roost.run(config, folder / f"roost {turn}", limit)
        ours.append(speed(of_metrics(metrics), workload.samples))
        shares.append(phase_shares(metrics))
        if peer is not None:
            progress.print(f"round {turn + 1} of {rounds}, TRL")
            rows = run_peer(peer, model, {"workload": asdict(workload), **settings}, folder / f"trl {turn}", limit)
            theirs.append(speed(rows, workload.samples))
    return ours, theirs, {name: mean(each[name] for each in shares) for name in shares[0]}


def run_peer(python: Path, model: Path, settings: dict[str, Any], folder: Path, limit: float) -> list[dict[str, Any]]:
    folder.mkdir()
    command = [str(python), str(HERE / "train_peer_trl.py"), str(model), json.dumps(settings), str(folder / "rows")]
    # The peer's interpreter must not find Roost.
    environment = {**os.environ, **train_roost.PATIENT, "PYTHONPATH": str(HERE)}
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=limit)
    if done.returncode:
        lines = (folder / "log").read_text(errors="replace").splitlines()
        raise RuntimeError(f"TRL ended with {done.returncode}: {' / '.join(lines[-LAST_LINES:])}")
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


def measure_staleness(
    staleness: int, steps: int, rounds: int, folder: Path, limit: float, progress: Console
) -> tuple[list[StaleRun], list[StaleRun]]:
    """Without staleness and with it, in turn; each round has its own seed."""
    from roost.rollout.arithmetic import write_arithmetic_model

    found: dict[int, list[StaleRun]] = {0: [], staleness: []}
    model = write_arithmetic_model(folder / "sums")
    for turn in range(rounds):
        for max_staleness, runs in found.items():
            progress.print(f"round {turn + 1} of {rounds}, staleness {max_staleness}")
            config = train_roost.waiting(max_staleness, steps, turn, model)
            runs.append(stale_run(train_roost.run(config, folder / f"staleness {max_staleness} {turn}", limit)))
    return found[0], found[staleness]


def report_peer(
    part: str, ours: Sequence[Speed], theirs: Sequence[Speed], shares: dict[str, float], console: Console
) -> None:
    columns = ("", "samples/s", "tokens/s", "tokens a sample", "reward at the end", "rounds")
    table = Table(*columns, title=f"Whole steps, {part}", title_justify="left")
    for name, runs in (("roost", ours), ("trl", theirs)):
        if runs:
            values = [median(getattr(run, field) for run in runs) for field in Speed.__slots__]
            speeds = f"{values[0]:.2f}", f"{values[1]:,.0f}", f"{values[2]:.0f}", f"{values[3]:.3f}"
            table.add_row(name, *speeds, str(len(runs)))
    console.print(table)
    phases = Table(*shares, title="Roost's steps by phase", title_justify="left")
    phases.add_row(*(f"{share:.0%}" for share in shares.values()))
    console.print(phases)


def report_staleness(without: Sequence[StaleRun], stale: Sequence[StaleRun], staleness: int, console: Console) -> None:
    columns = ("most staleness", "seconds a step", "reward at the end", "mean staleness", "rounds")
    table = Table(*columns, title="Episodes that wait", title_justify="left")
    for name, runs in ((0, without), (staleness, stale)):
        seconds, reward, behind = (median(getattr(run, field) for run in runs) for field in StaleRun.__slots__)
        table.add_row(str(name), f"{seconds:.2f}", f"{reward:.3f}", f"{behind:.2f}", str(len(runs)))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
