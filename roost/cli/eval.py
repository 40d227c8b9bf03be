"""`roost eval`: avg@k, pass@k and majority@k of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from roost.cli.options import WITH_TRAINING, exit_not_installed, import_from_here, open_console
from roost.cli.runs import refuse_url
from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.job import Job, ModelLocation, model_location, resolve_model
from roost.config.notations.notation import read_job
from roost.engines.command import EngineKind
from roost.view.text import print_findings

REWARDS = {
    "math": {"_target_": "roost.rollout.rewards.math_answer.MathAnswer"},
    "exact": {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer"},
}
JOB_SUFFIXES = (".yaml", ".yml")
PLACEMENT = {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": "all"}}


def eval_command(
    model: Annotated[
        str, typer.Argument(help="A model's folder or hub name, or the folder of a run.", metavar="MODEL")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]PATH",
            help="A job file, or a data file; may be given several times. Default for a run: its own job.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("-k", "--samples", min=1, help="Samples of each task.")] = 1,
    reward: Annotated[
        str | None, typer.Option("--reward", help="Reward of data files: math (the default) or exact.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt column of data files.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="Answer column of data files.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Send text prompts of data files as user messages of the model's chat template, or as they are. "
            "Default: with the template, if the model has one.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0.0,
            help="Sampling temperature. Default: the job's eval_temperature; with several samples of a greedy job, its "
            "temperature.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Tokens of a completion.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Tasks of each job or file.")] = None,
    engine: Annotated[
        EngineKind, typer.Option("--engine", help="Inference engine; torch is built in.")
    ] = EngineKind.TORCH,
    engines: Annotated[int, typer.Option("--engines", min=1, help="Engines, one on each accelerator.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where results are written.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Generate answers with an engine and rate them: avg@k, pass@k, majority@k, by set and by tag.

    Writes results.json, completions.jsonl and report.html.
    """
    notes = open_console(stderr=True)
    import_from_here()
    refuse_url(model)
    run = Path(model)
    is_run = (run / "config.yaml").is_file() and (run / "policy").is_dir()
    weights = str(run / "policy") if is_run else model
    given = data or ([f"{run.resolve().name}={run / 'config.yaml'}"] if is_run else [])
    wrong: str | None = _wrong_model(model, weights, bool(given))
    if wrong:
        raise typer.BadParameter(f"{model} {wrong}", param_hint="MODEL")
    file_options = {"--reward": reward, "--prompt": prompt, "--answer": answer, "--chat-template": chat_template}
    sets = list(map(_named, given))
    _refuse_same_names([name for name, _ in sets])
    _refuse_unused([path for _, path in sets], file_options)
    changes = [] if max_new_tokens is None else [f"++train.max_new_tokens={max_new_tokens}"]
    keys = {"prompt": prompt, "answer": answer, "chat_template": chat_template}
    columns = {key: column for key, column in keys.items() if column is not None}
    jobs = {name: _job(path, weights, reward or "math", columns, changes) for name, path in sets}
    try:  # slow to import, so only after the checks above
        from roost.net.hub import check_on_hub
        from roost.trainer.eval_run import EvalOptions, evaluate_jobs
    except ImportError as error:
        raise exit_not_installed(error, WITH_TRAINING) from None
    folder = out or (run / "eval" if is_run else Path("eval") / folder_name(model))
    options = EvalOptions(weights, folder, samples, temperature, limit, engine, engines)
    say = partial(_say, notes)
    if model_location(weights) is ModelLocation.HUB and (wrong := check_on_hub(weights, say)):
        raise typer.BadParameter(f"{model} {wrong}", param_hint="MODEL")
    try:
        results = evaluate_jobs(jobs, options, say)
    except ConfigError as error:
        print_findings(error.findings, notes)
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(results.tables, indent=2))
        return
    _print(results.tables)
    print(f"report   {folder / 'report.html'}")


def _say(notes: Console, text: str) -> None:
    notes.print(f"roost: {text}", soft_wrap=True)


def _wrong_model(model: str, weights: str, has_data: bool) -> str:
    """What is wrong with a model, as far as this machine can tell; empty if nothing is."""
    place = model_location(weights)
    if place is ModelLocation.MISSING:
        return "does not exist"
    if not has_data and place is ModelLocation.HUB:
        return "is not a local folder; pass a run, or for a hub model the tasks with --data"
    if not has_data and (Path(model) / "config.yaml").is_file():
        return "is a run without a policy; continue it with roost train --resume until it has written one"
    if not has_data:
        return "is not the folder of a run with a policy; name a job or a data file with --data"
    if place is ModelLocation.FOLDER and not (Path(resolve_model(weights)) / "config.json").is_file():
        return "has no config.json; name a run, or a folder with a checkpoint"
    return ""


def folder_name(model: str) -> str:
    """Name of the folder for the results of a model: policies of two runs must not share one.

    >>> folder_name("runs/math/policy"), folder_name("Qwen/Qwen2.5-0.5B"), folder_name("../policy/")
    ('runs-math-policy', 'Qwen-Qwen2.5-0.5B', 'policy')
    """
    path = Path(model)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return "-".join(part for part in path.parts if part not in (path.anchor, "..", "~")) or "model"


def _refuse_unused(paths: Sequence[str], file_options: Mapping[str, Any]) -> None:
    """Refuse options of data files if only jobs are given, which have their own data and rewards."""
    written = [name for name, value in file_options.items() if value is not None]
    if written and all(Path(path).suffix in JOB_SUFFIXES for path in paths):
        jobs = "is a job with its" if len(paths) == 1 else "are jobs with their"
        what = f"is for data files, and {', '.join(paths)} {jobs} own data and rewards"
        fix = "change a copy of the job, or name a data file with --data"
        raise typer.BadParameter(f"{what}; {fix}", param_hint=written[0])


def _refuse_same_names(names: Sequence[str]) -> None:
    """Refuse two sets of one name, such as two files test.jsonl: one would replace the other."""
    same = next((name for name in names if names.count(name) > 1), None)
    if same is not None:
        raise typer.BadParameter(f"{names.count(same)} sets are named {same}; write NAME=PATH", param_hint="--data")


def _named(given: str) -> tuple[str, str]:
    """Name and path of a job or data file.

    >>> _named("aime=data/aime.jsonl"), _named("data/gsm8k.parquet")
    (('aime', 'data/aime.jsonl'), ('gsm8k', 'data/gsm8k.parquet'))
    """
    name, sign, path = given.partition("=")
    return (name, path) if sign else (Path(given).stem, given)


def _job(path: str, model: str, reward: str, columns: Mapping[str, Any], changes: Sequence[str]) -> Job:
    """The job of a config, or one made for a data file."""
    findings, notes = Findings(), open_console(stderr=True)
    config: Any = Path(path)
    if config.suffix not in JOB_SUFFIXES:
        if reward not in REWARDS:
            raise typer.BadParameter(f"{reward} is not a reward; use {' or '.join(REWARDS)}", param_hint="--reward")
        _check_columns(path, columns)
        source = {"path": path, "eval": path, **columns}
        config = {"cluster": PLACEMENT, "train": {"data": source, "rewards": {reward: REWARDS[reward]}}}
        config["train"]["model"] = model
    loaded = load(config, [f"++train.model={json.dumps(model)}", *changes], findings)
    job = None if loaded is None else read_job(loaded, findings)
    if job is None or job.training is None or findings.has_errors:
        print_findings(findings.found, notes)
        raise typer.Exit(1)
    return job


def _check_columns(path: str, columns: Mapping[str, Any]) -> None:
    """Refuse a data file that is not there or lacks a column; data sets of the hub are checked when they are loaded."""
    from roost.rollout.data.prompts import USUAL
    from roost.rollout.data.tables import CHECKED_ROWS, DataError, first_rows

    try:
        found = first_rows(path, CHECKED_ROWS)
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
    if found is None:
        return
    for key, usual in {"prompt": USUAL, "answer": ("answer",)}.items():
        wanted = [columns[key]] if key in columns else usual
        if not any(column in found.columns for column in wanted):
            what = f"{found.label} has no column {' or '.join(wanted)}"
            there = f"the columns are {', '.join(found.columns)}" if found.columns else "it has no rows"
            raise typer.BadParameter(f"{what}; {there}: name one with --{key}", param_hint=f"--{key}")


def _print(tables: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    names = list(dict.fromkeys(name for rows in tables.values() for figures in rows.values() for name in figures))
    lines = [["set", "tag", *names]]
    for label, rows in tables.items():
        for tag, figures in rows.items():
            numbers = [f"{figures[name]:.3f}".removesuffix(".000") if name in figures else "" for name in names]
            lines.append([label, tag or "all", *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
