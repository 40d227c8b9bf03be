"""Cost of Roost's runtime compared with bare Ray and with a peer: launches, calls, and data transfer.

The first time, `--setup-peer` makes an environment for the peer; see docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import peer_environment
import typer
from peer_environment import PeerPython, SetupPeer
from rich.console import Console
from runtime_process import ON_NODES
from runtime_report import print_missing, print_overheads, print_throughputs
from runtime_results import ONES, WAYS, Missing, Overhead, Row, Throughput, overhead, throughputs, verdicts
from verdicts import JsonFile, print_verdicts, write_results

HERE = Path(__file__).parent
STATISTICS = Path("/proc/stat")
QUIET = 0.15  # of the cores' time
LAST_LINES = 5  # shown of the output of a failed process
LARGE = ("nodes-64", "nodes-256")  # need much memory and time, so only on request
PEER_CANNOT = {
    "accelerators": "it counts the accelerators that their drivers report, and cannot be told of simulated ones",
    **dict.fromkeys(ON_NODES, "it tells nodes apart by their addresses, and simulated ones share one"),
}

Result = Overhead | Throughput | Missing


def main(
    launches: Annotated[int, typer.Option(min=1, help="Rounds of launching.")] = 5,
    calls: Annotated[int, typer.Option(min=1, help="Rounds of calling.")] = 300,
    streams: Annotated[int, typer.Option(min=1, help="Rounds of streaming.")] = 7,
    peer_launches: Annotated[int, typer.Option(min=1, help="Rounds of the peer's launching.")] = 3,
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one measurement of one side.")] = 400,
    patience: Annotated[int, typer.Option(min=0, help="Seconds to wait for an idle machine before each.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Only this measurement; may be given several times.")] = None,
    peer_python: PeerPython = None,
    setup_peer: SetupPeer = False,
    json_file: JsonFile = None,
) -> None:
    """Measure the cost of Roost's runtime; print results and targets."""
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False, style="dim")
    if setup_peer:
        peer_environment.set_up(progress)
    launching = dict.fromkeys(["launch", "accelerators", *ON_NODES], launches)
    rounds = {**launching, "call": calls, "channel": streams, "send": streams}
    unknown = set(only or ()) - set(rounds)
    if unknown:
        raise SystemExit(f"there is no measurement {unknown.pop()}; there are {', '.join(rounds)}")
    peer = peer_environment.find(peer_python)
    sides = {"roost": Path(sys.executable)} | ({} if peer is None else {"rlinf": peer})
    busy: dict[str, float] = {}
    found: list[Result] = []
    for what in only or [name for name in rounds if name not in LARGE]:
        for side, python in sides.items():
            if side != "roost" and what in PEER_CANNOT:
                found.append(Missing(side, what, PEER_CANNOT[what]))
                continue
            count = min(rounds[what], peer_launches) if side != "roost" and what == "launch" else rounds[what]
            progress.print(f"{(ONES | WAYS)[what]}, {side}, {count} rounds")
            busy[f"{side} {what}"] = wait_for_quiet(patience)
            found += run(python, side, what, count, limit)
    overheads = [each for each in found if isinstance(each, Overhead)]
    flows = [each for each in found if isinstance(each, Throughput)]
    missing = [each for each in found if isinstance(each, Missing)]
    judged = verdicts(overheads, flows)
    if overheads:
        print_overheads(overheads, console)
    if flows:
        print_throughputs(flows, console)
    print_missing(missing, console)
    if peer is None:
        peer_environment.print_no_peer(console)
    print_verdicts(judged, console)
    if json_file is not None:
        results = {
            "busy_before": busy,
            "overheads": [asdict(row) for row in overheads],
            "throughputs": [asdict(row) for row in flows],
            "missing": [asdict(row) for row in missing],
        }
        write_results(json_file, results, judged)


def run(python: Path, side: str, what: str, rounds: int, limit: float) -> list[Result]:
    """Run one measurement in a process with its own Ray; if it fails, its results so far are kept."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file, log = Path(folder) / "rows", Path(folder) / "log"
        command = [str(python), str(HERE / "runtime_process.py"), side, what, str(rounds), str(file)]
        # In a separate folder, so that programs that look for the machine's Ray do not find this one.
        trouble = finish(command, log, limit, {"RAY_TMPDIR": folder})
        rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found: list[Result] = [] if trouble is None else [Missing(side, what, f"{trouble} ({len(rows)} results before)")]
    if rows:
        found += [overhead(side, what, rows)] if what in ONES else throughputs(side, what, rows)
    return found


def finish(command: list[str], log: Path, limit: float, settings: Mapping[str, str]) -> str | None:
    """Run to the end or to the limit; return the error, if any. Ray ends with the process that started it."""
    # The peer's interpreter must not find Roost's packages, and every worker finds this folder.
    paths = str(HERE) if command[0] != sys.executable else os.pathsep.join([str(HERE), str(HERE.parent)])
    with log.open("w") as out:
        environment = {**os.environ, **settings, "PYTHONPATH": paths}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"it did not end within {limit:.0f} s"
    if code == 0:
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit code {code}: {' / '.join(lines[-LAST_LINES:])}"


def wait_for_quiet(patience: float) -> float:
    """Wait until the cores are mostly idle, or patience ends; return the share in use at the end."""
    end = time.monotonic() + patience
    while (busy := busy_share(2.0)) > QUIET and time.monotonic() < end:
        time.sleep(3)
    return busy


def busy_share(seconds: float) -> float:
    """Share of the time in which the cores were not idle; 0 if unknown."""

    def idle_and_all() -> tuple[int, int]:
        ticks = [int(tick) for tick in STATISTICS.read_text().splitlines()[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    if not STATISTICS.exists():
        return 0.0
    idle, total = idle_and_all()
    time.sleep(seconds)
    idle_then, total_then = idle_and_all()
    return round(1 - (idle_then - idle) / max(total_then - total, 1), 3)


if __name__ == "__main__":
    typer.run(main)
