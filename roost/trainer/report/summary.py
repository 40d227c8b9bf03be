"""Summary of a run: rewards, samples before and after, and time by phase."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roost.config.findings import counted
from roost.trainer.diagnosis import onsets
from roost.trainer.metrics import PHASES
from roost.trainer.records.checkpoints import Checkpoints, best_checkpoint
from roost.trainer.records.run_folder import Record, RunFolder, number_of
from roost.trainer.report.live_view import sparkline
from roost.view.plain import plain_line

SHOWN = 5  # samples of each kind
WIDEST = 60  # characters of a sample
SHOWN_MESSAGES = 8  # of the conversation
WIDEST_MESSAGE = 200


def print_summary(run: RunFolder, console: Console) -> None:
    """Print the summary of a finished run."""
    steps = run.steps()
    rewards = [reward for step in steps if (reward := number_of(step, "reward/mean")) is not None]
    if rewards:
        console.print(f"reward   {sparkline(tuple(rewards))}  {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    losses = tuple(loss for step in steps if (loss := number_of(step, "loss/supervised")) is not None)
    if losses:
        console.print(f"loss     {sparkline(losses)}  {losses[0]:.3f} -> {losses[-1]:.3f}")
    apart = tuple(one for step in steps if (one := number_of(step, "loss/distillation")) is not None)
    if apart:
        console.print(f"teacher  {sparkline(apart)}  {apart[0]:.3f} -> {apart[-1]:.3f} (distillation loss)")
    _print_samples(run, console)
    best = best_checkpoint(run)
    if best is not None:
        folder = Checkpoints(run.checkpoints, 1).at(best.step).folder
        console.print(Text(f"best     step {best.step}, {best.figure}: {folder}"), soft_wrap=True)
    for found in onsets(steps):
        console.print(Text(f"diagnosis {found}"), soft_wrap=True)
    if steps:
        _print_failures(run, steps, console)
        _print_skipped(steps, console)
        _print_data(steps[-1], console)
        _print_times(steps, console)


def _print_samples(run: RunFolder, console: Console) -> None:
    """Print answers of the first and the last step, on the same tasks if possible, and of the last evaluation."""
    first = list(islice((one for one in run.sample_lines if one["kind"] == "train" and one["step"] == 1), SHOWN))
    at_end = {one["task"]: one for one in _of_last(run, "train") if one["step"] > 1}
    same = [at_end[task] for task in dict.fromkeys(one["task"] for one in first) if task in at_end]
    last = same or list(at_end.values())[:SHOWN]
    tried = {one["task"]: one for one in _of_last(run, "evaluation")}
    of_training = [*first, *last]
    same = [tried[task] for task in dict.fromkeys(one["task"] for one in of_training) if task in tried]
    evaluated = same or list(tried.values())[:SHOWN]
    _print_table("training", of_training, console)
    _print_table("evaluation", evaluated, console)
    _print_conversation([*evaluated, *last, *reversed(first)], console)


def _of_last(run: RunFolder, kind: str) -> list[Record]:
    """Samples of the last step that has any of this kind. The file is read twice: it may be larger than memory."""
    step = max((one["step"] for one in run.sample_lines if one["kind"] == kind), default=0)
    return [one for one in run.sample_lines if one["kind"] == kind and one["step"] == step]


def _print_table(kind: str, samples: Sequence[Record], console: Console) -> None:
    table = Table(kind, "task", "answer", "reward", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for one in samples:
        reward = number_of(one, "reward")
        table.add_row(f"step {one['step']}", _short(one["task"]), _short(one["completion"]), f"{reward or 0:.2f}")
    if table.row_count:
        console.print(table)


def _print_conversation(samples: Sequence[Record], console: Console) -> None:
    """Print the first sample that has messages."""
    sample = next((one for one in samples if one.get("messages")), None)
    if sample is None:
        return
    messages = [one for one in sample["messages"] if isinstance(one, dict)]
    left_out = len(messages) - SHOWN_MESSAGES
    shown = messages if left_out <= 0 else [*messages[: SHOWN_MESSAGES // 2], *messages[-SHOWN_MESSAGES // 2 :]]
    ended = f", finish {sample['finish']}" if sample.get("finish") else ""
    console.print(Text(f"sample   step {sample['step']}{ended}; all messages are in samples.jsonl and the report"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for number, one in enumerate(shown):
        if left_out > 0 and number == SHOWN_MESSAGES // 2:
            table.add_row("", Text(f"[{counted(left_out, 'message')} omitted]"))
        style = "bold" if one.get("generated") else ""
        table.add_row(Text(f"  {plain_line(str(one.get('role')))}"), _short(one.get("content"), WIDEST_MESSAGE, style))
    console.print(table)


def _print_failures(run: RunFolder, steps: Sequence[Record], console: Console) -> None:
    reasons = len(list(run.failures.glob("*.txt")))
    if reasons:
        failed = sum(number_of(step, "samples/failed") or 0.0 for step in steps)
        line = f"failed   {counted(int(failed), 'episode')} after all attempts; {counted(reasons, 'reason')}, with"
        console.print(Text(f"{line} tracebacks, in {run.failures}"), soft_wrap=True)


def _print_skipped(steps: Sequence[Record], console: Console) -> None:
    skipped = [step for step in steps if number_of(step, "steps/skipped") or number_of(step, "critic/skipped")]
    if skipped:
        first, last = skipped[0]["step"], skipped[-1]["step"]
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        console.print(f"skipped  optimizer steps in {where}: loss or gradient not finite")


def _print_data(step: Record, console: Console) -> None:
    """Print how much of the data was used, of a run whose prompts come from files."""
    rows, epoch = number_of(step, "data/rows"), number_of(step, "data/epoch")
    if rows is not None:
        dropped = int(number_of(step, "data/dropped_rows") or 0)
        left_out = f"; {counted(dropped, 'row')} dropped for their length" if dropped else ""
        console.print(f"data     {counted(int(rows), 'row')}, epoch {epoch or 0:.2f}{left_out}")


def _print_times(steps: Sequence[Record], console: Console) -> None:
    """Print seconds by phase; the rest is checkpoints, evaluations and driver overhead."""
    spent = {name: sum(number_of(step, f"time/{name}") or 0.0 for step in steps) for name in PHASES}
    whole = sum(number_of(step, "time/step") or 0.0 for step in steps)
    parts = [f"{name} {seconds:.0f} s ({seconds / whole:.0%})" for name, seconds in spent.items() if whole and seconds]
    console.print(f"time     {', '.join(parts)}, of {whole:.0f} s in {counted(len(steps), 'step')}")


def _short(value: object, widest: int = WIDEST, style: str = "") -> Text:
    """Shorten text from a model; it must not be interpreted by the terminal."""
    text = plain_line(str(value))
    return Text(text if len(text) <= widest else f"{text[: widest - 1]}…", style=style)
