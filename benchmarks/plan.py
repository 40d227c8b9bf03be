"""Speed of Roost's planner: as clusters grow, side by side with a peer, and from the command line.

The first time, `--setup-peer` makes an environment for the peer; see docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import peer_environment
import typer
from peer_environment import PeerPython, SetupPeer
from plan_report import print_command_line, print_comparisons, print_growth
from plan_results import (
    UNWANTED,
    CommandLine,
    Comparison,
    Growth,
    Sample,
    compare,
    doublings,
    first_difference,
    growth_rows,
    imported_modules,
    unwanted_modules,
    verdicts,
)
from rich.console import Console
from verdicts import JsonFile, print_verdicts, write_results

HERE = Path(__file__).parent
SMALL_JOB = """\
cluster:
  num_nodes: 2
  num_gpus_per_node: 8
  component_placement:
    actor,rollout: 0-7
    reward: 8-15:0-3
"""


def main(
    max_nodes: Annotated[int, typer.Option(min=16, help="The largest cluster of the growth series.")] = 131_072,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each size of the growth series.")] = 5,
    peer_nodes: Annotated[list[int] | None, typer.Option(help="A size to compare; may be given several times.")] = None,
    peer_repeats: Annotated[int, typer.Option(min=1, help="Runs of each compared size.")] = 3,
    peer_python: PeerPython = None,
    setup_peer: SetupPeer = False,
    cli_runs: Annotated[int, typer.Option(min=1, help="Runs of the command line.")] = 10,
    json_file: JsonFile = None,
) -> None:
    """Measure how fast Roost plans; print results and targets."""
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    if setup_peer:
        peer_environment.set_up(progress)
    growth = run_growth(doublings(16, max_nodes), repeats, progress)
    print_growth(growth, console)
    comparisons: tuple[Comparison, ...] = ()
    peer = peer_environment.find(peer_python)
    if peer is None:
        peer_environment.print_no_peer(console)
    else:
        comparisons = tuple(run_peer(peer, nodes, peer_repeats, progress) for nodes in peer_nodes or (128, 1024))
        print_comparisons(comparisons, console)
    command_line = run_command_line(cli_runs, progress)
    print_command_line(command_line, console)
    judged = verdicts(growth, comparisons, command_line)
    print_verdicts(judged, console)
    if json_file is not None:
        results = {
            "growth": [asdict(row) for row in growth],
            "peer": [asdict(row) for row in comparisons],
            "command_line": asdict(command_line),
        }
        write_results(json_file, results, judged)


def run_growth(sizes: Sequence[int], repeats: int, progress: Console) -> tuple[Growth, ...]:
    """Run all sizes in turn, several times, so that other load on the machine affects all of them."""
    samples: dict[int, list[Sample]] = {nodes: [] for nodes in sizes}
    for turn in range(repeats):
        progress.print(f"growth, run {turn + 1} of {repeats}")
        for nodes in sizes:
            samples[nodes].append(sample([sys.executable, str(HERE / "plan_process.py"), "growth", str(nodes)]))
    return growth_rows(samples)


def run_peer(peer: Path, nodes: int, repeats: int, progress: Console) -> Comparison:
    """Both sides in alternation; each pair of runs must give the same placements."""
    ours = [sys.executable, str(HERE / "plan_process.py"), "placements", str(nodes)]
    theirs = [str(peer), "-I", str(HERE / "peer_rlinf.py"), str(nodes)]
    pairs = []
    for turn in range(repeats):
        progress.print(f"{nodes:,} nodes side by side, run {turn + 1} of {repeats}")
        pair = sample(ours), sample(theirs)
        difference = first_difference(pair[0]["rows"], pair[1]["rows"])
        if difference is not None:
            raise SystemExit(f"the two sides disagree at {nodes:,} nodes: {difference}")
        pairs.append(pair)
    return compare(nodes, pairs)


def run_command_line(runs: int, progress: Console) -> CommandLine:
    progress.print(f"command line, {runs} runs")
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(SMALL_JOB)
        arguments = ["-c", console_script(), "plan", str(job)]
        seconds = tuple(wall_seconds([sys.executable, *arguments]) for _ in range(runs))
        bare = median(wall_seconds([sys.executable, "-c", "pass"]) for _ in range(runs))
        traced = finish([sys.executable, "-X", "importtime", *arguments])
    modules = imported_modules(traced.stderr)
    installed = tuple(name for name in UNWANTED if importlib.util.find_spec(name) is not None)
    return CommandLine(median(seconds), bare, seconds, len(modules), unwanted_modules(modules), installed)


def console_script() -> str:
    """The line of Python that the installed `roost` command runs, so that the command need not be installed."""
    declared = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["scripts"]["roost"]
    module, function = declared.split(":")
    return f"from {module} import {function}; {function}()"


def sample(command: Sequence[str]) -> Sample:
    """The JSON object on the last line that a fresh process prints."""
    printed = finish(command).stdout
    if not printed.strip():
        raise SystemExit(f"{' '.join(command)} printed no result; is that the right interpreter?")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def wall_seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    finish(command)
    return time.perf_counter() - start


def finish(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr}")
    return done


if __name__ == "__main__":
    typer.run(main)
