"""`roost try`: run a few episodes of a job, and show turns, masks and rewards."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from roost.cli.options import (
    WITH_TRAINING,
    NotationChoice,
    Overrides,
    exit_not_installed,
    import_from_here,
    open_console,
)
from roost.cli.train import ConfigFile, read_training_job
from roost.config.findings import ConfigError, counted
from roost.view.text import print_findings

if TYPE_CHECKING:
    from roost.trainer.trial import Attempt, Trial

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_CHARACTERS = 600  # shown of one part of a sequence


def try_command(
    config: ConfigFile,
    overrides: Overrides = None,
    episodes: Annotated[int, typer.Option("-n", "--episodes", min=1, help="Number of episodes.")] = 4,
    task: Annotated[
        int | None, typer.Option("--task", min=0, metavar="INDEX", help="Run this task in every episode.")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Tasks to use: train or evaluation.")] = "train",
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Sample from this OpenAI-compatible base URL, with OPENAI_API_KEY, instead of an engine started here.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model at the URL.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="Instead of the job's.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, metavar="N", help="Instead of the job's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    notation: NotationChoice = None,
) -> None:
    """Try a job: run a few episodes with its task, agent, environment and rewards, without a learner and without Ray.

    Shows turns, which tokens would be trained, rewards with their parts, and the time of each call. The exit code is 1
    if an episode fails.
    """
    import_from_here()
    notes = open_console(stderr=True)
    job, settings = read_training_job(config, overrides or [], notation)
    if url is not None and model is None:
        raise typer.BadParameter("name the model that the server at the URL has", param_hint="--model")
    try:
        from roost.engines.protocol import EngineError
        from roost.rollout.episode import Split
        from roost.trainer.trial import TrialOptions, run_trial
    except ImportError as error:
        raise exit_not_installed(error, WITH_TRAINING) from None
    if split not in list(Split):
        raise typer.BadParameter(f"is {split}; write {' or '.join(Split)}", param_hint="--split")
    key = os.environ.get(KEY_VARIABLE)
    options = TrialOptions(episodes, Split(split), task, url, model, key, temperature, max_new_tokens)
    try:
        trial = asyncio.run(
            run_trial(job, settings, options, lambda text: notes.print(f"roost: {text}", soft_wrap=True))
        )
    except ConfigError as error:
        print_findings(error.findings, notes)
        raise typer.Exit(1) from None
    except (EngineError, ValueError, OSError) as error:
        notes.print(f"error: {error}", soft_wrap=True, markup=False)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(trial.as_json(), indent=2))
    else:
        show_trial(trial, open_console())
    if trial.has_failed:
        raise typer.Exit(1)


def show_trial(trial: Trial, console: Console) -> None:
    """Print the episodes, and a summary."""
    for number, one in enumerate(trial.attempts):
        _show(number, one, trial, console)
    finished = [one.episode for one in trial.attempts if one.episode is not None]
    failed = len(trial.attempts) - len(finished)
    if finished:
        mean = sum(one.score.reward for one in finished) / len(finished)
        console.print(f"{counted(len(finished), 'episode')} finished, {failed} failed; mean reward {mean:.3f}")
    else:
        every = "the episode failed" if failed == 1 else f"all {failed} episodes failed"
        console.print(f"{every}; there is no reward")
    for unknown in trial.unknown:
        console.print(f"unknown, because the server does not report it: {unknown}", soft_wrap=True)


def _show(number: int, one: Attempt, trial: Trial, console: Console) -> None:
    title = f"episode {number}: {one.task}"
    if one.episode is None:
        console.print(Text(f"{title}\n  failed: {one.error}", "red"), soft_wrap=True)
        for line in one.traceback:
            console.print(Text(f"    {line}"), soft_wrap=True)
        return
    score = one.episode.score
    parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
    console.print(
        Text(f"{title}\n  reward {score.reward:g}{parts}; {one.episode.seconds:.2f} s", "bold"), soft_wrap=True
    )
    for index, sequence in enumerate(one.episode.sequences):
        if len(one.episode.sequences) > 1:
            console.print(f"  sequence {index}")
        total, generated = len(sequence.token_ids), len(sequence.completion_versions)
        for part in sequence.parts:
            text = trial.decode(sequence.token_ids[part.start : part.end].tolist(), True)
            shown = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
            is_generated = bool((sequence.turns[part.start : part.end] >= 0).any())
            about = f"  {'trained' if is_generated else 'masked '} {counted(part.end - part.start, 'token')}"
            if part.turn >= 0:
                timed = f", {one.call_seconds[part.turn]:.2f} s" if part.turn < len(one.call_seconds) else ""
                about += f", turn {part.turn}, {part.finish}{timed}"
            console.print(Text(f"{about}: {shown!r}", "green" if is_generated else "dim"), soft_wrap=True)
        console.print(f"  {generated} of {counted(total, 'token')} would be trained")
