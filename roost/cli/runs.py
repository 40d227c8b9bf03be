"""Commands about the folder of a run: `roost status`, `logs`, `stop`, `scale`, `watch`, `report` and `download`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.table import Table

from roost.cli.options import open_console
from roost.config.findings import counted, did_you_mean
from roost.learner.checksums import Damaged
from roost.procs.child import LogTail
from roost.procs.files import holder_of
from roost.trainer.records.remote import RemoteRun, StorageError, url_of
from roost.trainer.records.run_folder import ACTIVE, RunFolder, RunStatus, is_run, runs_in, status_of
from roost.trainer.records.scale_requests import Change, ScaleAnswer, ScaleRequests, ScaleState
from roost.view.plain import plain_line

POLL_INTERVAL_S = 0.3
RUNS = Path("runs")  # may not exist before the first run
Run: TypeAlias = Annotated[Path, typer.Argument(help="The folder of a run, such as runs/first.", metavar="RUN")]


def open_run(run: Path) -> RunFolder:
    """The folder of a run; exit with 2 if there is none."""
    refuse_url(run)
    if holder_of(run) is not None:
        return RunFolder(run)  # a run that is starting may have no config yet
    try:
        return RunFolder.open(run)
    except FileNotFoundError as error:
        open_console(stderr=True).print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(2) from None


def refuse_url(run: str | Path) -> None:
    """Exit with 2 for a URL, and say how to get a folder."""
    url = url_of(str(run))
    if url is not None:
        folder = f"runs/{url.rpartition('/')[2]}"
        fix = f"roost download {url} {folder}, then name {folder}"
        open_console(stderr=True).print(f"error: {url} is not a folder on this machine: {fix}", soft_wrap=True)
        raise typer.Exit(2)


def status_command(
    runs: Annotated[Path, typer.Argument(help="Folder of runs, or one run (default: runs).", metavar="[RUNS]")] = RUNS,
    shows_all: Annotated[bool, typer.Option("--all", help="Also show runs that have ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show jobs that start, run or wait for their requeue: plan, step, reward, phase, and the process that runs them.

    Runs that have ended are shown with --all, or if named themselves: finished, stopped, failed (with the reason) or
    killed. On a shared file system, runs of other hosts are listed too.
    """
    refuse_url(runs)
    if runs != RUNS and not runs.exists():
        open_console(stderr=True).print(f"error: {runs} does not exist; name a run or a folder of runs", soft_wrap=True)
        raise typer.Exit(2)
    found = [status_of(run) for run in runs_in(runs)]
    shows_all = shows_all or is_run(runs)
    shown = [status for status in found if shows_all or status.state in ACTIVE]
    if as_json:
        print(json.dumps([asdict(status) for status in shown], indent=2))
        return
    console = open_console()
    if not shown:
        ended = f"; {counted(len(found), 'run')} ended before (--all shows)" if found else ""
        console.print(f"no run is active in {runs}{ended}", soft_wrap=True)
        return
    console.print(table_of(shown))
    for status in shown:
        for diagnosis in status.diagnoses:
            console.print(f"{status.name}: {diagnosis}; its report says what to try", soft_wrap=True)


def table_of(shown: Sequence[RunStatus]) -> Table:
    """Table of runs, one per row."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "step", "reward", "now", "plan", "process"):
        table.add_column(name, justify="right" if name in ("step", "reward") else "left", overflow="fold")
    for status in shown:
        holder = status.holder
        table.add_row(
            status.name,
            status.state,
            f"{status.step}/{status.steps}" if status.steps else str(status.step),
            "-" if status.reward is None else f"{status.reward:.3f}",
            status.reason or "-" if status.phase is None else f"{status.phase}, {status.idle_s or 0:.0f} s ago",
            ", ".join(status.components) or status.mode,
            "-" if holder is None else f"{holder.pid} on {holder.host}",
        )
    return table


def logs_command(
    run: Run,
    process: Annotated[
        str | None,
        typer.Argument(
            help="A component, or one of its processes: actor or actor:0 (default: all).", metavar="PROCESS"
        ),
    ] = None,
    follows: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run exits.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each process to begin with.")] = 50,
) -> None:
    """Print the end of the logs of a run's processes, each line with its process."""
    notes, folder = open_console(stderr=True), open_run(run)
    tail = LogTail(folder.logs, lambda name: matches(name, process))
    for line in tail.last(lines):
        print(plain_line(line))
    if process is not None and not tail.names and not follows:
        known = sorted({path.parent.name for path in folder.logs.rglob("*.log")})
        hint = did_you_mean(process.partition(":")[0], known) or f"there are {', '.join(known) or 'no logs'}"
        notes.print(f"error: {folder.logs} has no log of {process}; {hint}", soft_wrap=True)
        raise typer.Exit(1)
    with contextlib.suppress(KeyboardInterrupt):
        is_running = follows
        while is_running:
            is_running = holder_of(folder.path) is not None  # before the last read, so that nothing is missed
            for line in tail.new():
                print(plain_line(line), flush=True)
            time.sleep(POLL_INTERVAL_S if is_running else 0)


def matches(name: str, process: str | None) -> bool:
    """Return True if a log belongs to a process or component: actor/rank_0.log, or a server's, rollout/rollout-0-1.log.

    >>> matches("actor/rank_0.log", "actor:0"), matches("actor/rank_10.log", "actor"), matches("actor/rank_1.log", "a")
    (True, True, False)
    >>> [matches("rollout-2/rollout-2-1.log", each) for each in ("rollout:2", "rollout", "rollout:1", "rollout-2")]
    [True, True, False, True]
    """
    if process is None:
        return True
    component, _, rank = process.partition(":")
    folder, log = Path(name).parent.name, Path(name).stem
    added = re.fullmatch(rf"{re.escape(component)}-(\d+)", folder)  # an engine that `roost scale` started
    if folder != component and added is None:
        return False
    if not rank:
        return True
    if added is not None:
        return rank in (added[1], log)
    return (
        log in (f"rank_{rank}", rank) or re.fullmatch(rf"{re.escape(component)}-{re.escape(rank)}-\d+", log) is not None
    )


def stop_command(
    run: Run,
    preempts: Annotated[
        bool, typer.Option("--preempt", help="Save at once and exit with code 75, as when preempted.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="S", min=0.0, help="Seconds to wait for the run to end; 0: do not wait.")
    ] = 0.0,
) -> None:
    """Ask a run to end after its step: it saves a checkpoint and exits, and `--resume` continues it.

    Call it on the machine where the run is. Exit code 1 means that it does not run here, or still runs after --wait
    seconds.
    """
    notes, folder = open_console(stderr=True), open_run(run).path
    holder = holder_of(folder)
    # Not SIGTERM: a run that it ends exits with 75, and a scheduler would start it again.
    number = signal.SIGUSR1 if preempts else signal.SIGINT
    if holder is None:
        notes.print(f"{folder} is not running", soft_wrap=True)
        raise typer.Exit(1)
    if not holder.is_here:
        there = f"kill -{number.name.removeprefix('SIG')} {holder.pid}"
        notes.print(f"error: it runs on {holder.host}; there: {there}", soft_wrap=True)
        raise typer.Exit(1)
    os.kill(holder.pid, number)
    when = "now" if preempts else "after this step"
    notes.print(f"process {holder.pid} saves a checkpoint and ends {when}", soft_wrap=True)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if holder_of(folder) is None:
            return
        time.sleep(POLL_INTERVAL_S)
    if wait and holder_of(folder) is not None:
        notes.print(f"error: it still runs after {wait:g} s", soft_wrap=True)
        raise typer.Exit(1)


def scale_command(
    run: Run,
    changes: Annotated[
        list[str],
        typer.Argument(help="Engines to add or remove: rollout=+2, rollout=-1 or rollout=4.", metavar="CHANGE"),
    ],
    wait: Annotated[
        float, typer.Option("--wait", metavar="S", min=0.0, help="Seconds to wait for the run to apply it.")
    ] = 900.0,
) -> None:
    """Add engines to a running job on free accelerators, or remove some, without stopping it.

    A new engine gets the current policy version before it gets requests; requests of an engine that leaves continue on
    the others. Call it on any machine that sees the run's folder. Exit code 1 means that the run refused the change or
    has not applied it after --wait seconds.
    """
    notes, folder = open_console(stderr=True), open_run(run)
    try:
        wanted = [Change.parse(text) for text in changes]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="CHANGE") from None
    is_running = holder_of(folder.path) is not None
    reason = why_not_scalable(folder, wanted) if is_running else f"{folder.path} is not running"
    if reason:
        notes.print(f"error: {reason}", soft_wrap=True)
        raise typer.Exit(1)
    answer = request_scaling(folder, wanted, wait, lambda text: print(plain_line(text), flush=True))
    if answer.state is ScaleState.APPLIED:
        return
    why = answer.lines[-1]
    is_complete = answer.state is ScaleState.WORKING or why.startswith("error RST-")
    notes.print(why if is_complete else f"error: {why}", soft_wrap=True)
    raise typer.Exit(1)


def why_not_scalable(folder: RunFolder, changes: Sequence[Change]) -> str:
    """Why the engines of a run cannot change, as far as its plan file shows; empty if they can."""
    plan = json.loads(folder.plan_file.read_bytes()) if folder.plan_file.exists() else {}
    parts = plan.get("components") or {}
    objective = ((plan.get("training") or {}).get("objective") or {}).get("value")
    engines = [name for name, part in parts.items() if part.get("role") == "engine"]
    if objective == "sft" or not engines:
        return f"{folder.path} has no engines: " + ("it is a run of roost sft" if objective == "sft" else "no rollout")
    unknown = next((change.component for change in changes if change.component not in engines), None)
    if unknown is None:
        return ""
    hint = did_you_mean(unknown, engines) or f"its engines are {', '.join(engines)}"
    return f"{unknown} is not an engine of {folder.path}; {hint}"


def request_scaling(
    folder: RunFolder, changes: Sequence[Change], wait: float, show: Callable[[str], None]
) -> ScaleAnswer:
    """Ask a run for a change and return its last answer; show its lines as they come."""
    requests, shown = ScaleRequests(folder.path), 0
    name = requests.ask(changes, wait)
    deadline = time.monotonic() + wait
    try:
        while True:
            is_running = holder_of(folder.path) is not None  # before the last read, so that nothing is missed
            answer = requests.answer_to(name)
            lines = answer.lines[:-1] if answer.state is ScaleState.REFUSED else answer.lines
            for line in lines[shown:]:
                show(line)
            shown = max(shown, len(lines))
            if answer.is_final:
                return answer
            if not is_running:
                return ScaleAnswer(ScaleState.REFUSED, ("the run ended meanwhile",))
            if time.monotonic() > deadline:
                if requests.withdraw(name):
                    why = f"withdrawn: the run did not take the request within {wait:g} s"
                    return ScaleAnswer(ScaleState.REFUSED, (why,))
                why = f"the run is still working on it after {wait:g} s; roost status shows its plan"
                return ScaleAnswer(ScaleState.WORKING, (why,))
            time.sleep(POLL_INTERVAL_S)
    finally:
        if requests.withdraw(name) or requests.answer_to(name).is_final:
            requests.forget(name)


def watch_command(
    run: Run,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on loopback; 0: any free one.")] = 0,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve the report of a run on loopback until Ctrl-C; the page reloads every few seconds while the run is active.

    From another machine: ssh -L PORT:127.0.0.1:PORT HOST.
    """
    notes, folder = open_console(stderr=True), open_run(run)
    from roost.trainer.report.page import LivePage  # slow to import, so after open_run

    try:
        page = LivePage(folder, port)
    except OSError as error:
        notes.print(f"error: port {port} cannot be used: {error.strerror}; leave --port out", soft_wrap=True)
        raise typer.Exit(1) from None
    with page, contextlib.suppress(KeyboardInterrupt):
        print(page.url, flush=True)
        if opens:
            import webbrowser

            webbrowser.open(page.url)
        page.serve()


def report_command(
    run: Run,
) -> None:
    """Write RUN/report.html and two plots of the steps so far, and print the path of the report."""
    notes, folder = open_console(stderr=True), open_run(run)
    from roost.trainer.report.page import write_plots, write_report  # slow to import, so after open_run

    print(write_report(folder))
    try:
        write_plots(folder)
    except ImportError as error:
        notes.print(f"no plots: {error.name} is missing; pip install {error.name}")


def download_command(
    url: Annotated[str, typer.Argument(help="A run on object storage, such as s3://bucket/runs/first.", metavar="URL")],
    folder: Annotated[
        Path | None, typer.Argument(help="Where to put it (default: runs/NAME).", metavar="[FOLDER]")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", metavar="STEP", help="Also download the checkpoint of this step.")
    ] = None,
) -> None:
    """Download a run from object storage: config, metrics, samples, logs, report, and the policy if it is complete.

    `roost train --resume` downloads what it needs itself.
    """
    notes, found = open_console(stderr=True), url_of(url)
    if found is None:
        raise typer.BadParameter(f"{url} is not a URL such as s3://bucket/runs/first", param_hint="URL")
    place = folder or Path("runs") / found.rpartition("/")[2]
    if place.exists():
        raise typer.BadParameter(f"{place} exists; name a new folder", param_hint="FOLDER")
    try:
        remote = RemoteRun.open(found)
        if not remote.exists():
            raise StorageError(f"{found} holds no run: it has neither a config.yaml nor a metrics.jsonl")
        remote.download_run(place, checkpoint)
    except (StorageError, Damaged, OSError) as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    print(place)
