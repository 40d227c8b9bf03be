"""`roost eval`: avg@k, pass@k and majority@k of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from roost.cli.console import open_console
from roost.cli.options import WITH_TRAINING, import_from_here, not_installed
from roost.config.compose import load
from roost.config.findings import ConfigError, Findings
from roost.config.job import Job
from roost.config.notations.notation import read_job
from roost.view.text import print_findings

REWARDS = {
    "math": {"_target_": "roost.rollout.rewards.math_answer.MathAnswer"},
    "exact": {"_target_": "roost.rollout.rewards.math_answer.ExactAnswer"},
}
CONFIGS = (".yaml", ".yml")
PLACED = {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": "all"}}


def eval_command(
    model: Annotated[
        str, typer.Argument(help="A model's folder or hub name, or the folder of a run.", metavar="MODEL")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]PATH",
            help="A job file, or a data file; may be given several times. Left out for a run: its own job.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("-k", "--samples", min=1, help="Samples of each task.")] = 1,
    reward: Annotated[str, typer.Option("--reward", help="Reward of data files: math or exact.")] = "math",
    prompt: Annotated[str | None, typer.Option("--prompt", help="Prompt column of data files.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="Answer column of data files.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Tokens of a completion.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Tasks of each job or file.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="torch, vllm or sglang.")] = "torch",
    engines: Annotated[int, typer.Option("--engines", min=1, help="Engines, one on each accelerator.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Where results are written.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Generate answers with an engine and rate them: avg@k, pass@k, majority@k, by set and by tag.

    Writes results.json, completions.jsonl and report.html.
    """
    notes = open_console(stderr=True)
    import_from_here()
    try:
        from roost.trainer.eval_run import EvalOptions, evaluate_jobs
    except ImportError as error:
        notes.print(f"error: {not_installed(error, WITH_TRAINING)}", soft_wrap=True)
        raise typer.Exit(1) from None
    run = Path(model)
    is_run = (run / "config.yaml").is_file() and (run / "policy").is_dir()
    weights = str(run / "policy") if is_run else model
    given = data or ([f"{run.resolve().name}={run / 'config.yaml'}"] if is_run else [])
    if not given:
        raise typer.BadParameter("name a job or a data file", param_hint="--data")
    changes = [] if max_new_tokens is None else [f"++train.max_new_tokens={max_new_tokens}"]
    keys = {"prompt": prompt, "answer": answer}
    columns = {key: column for key, column in keys.items() if column is not None}
    jobs = {name: _job(path, weights, reward, columns, changes) for name, path in map(_named, given)}
    folder = out or (run / "eval" if is_run else Path("eval") / Path(model).name)
    options = EvalOptions(weights, folder, samples, temperature, limit, engine, engines)
    try:
        results = evaluate_jobs(jobs, options, lambda text: notes.print(f"roost: {text}", soft_wrap=True))
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


def _named(given: str) -> tuple[str, str]:
    """Name and path of a job or data file.

    >>> _named("aime=data/aime.jsonl"), _named("data/gsm8k.parquet")
    (('aime', 'data/aime.jsonl'), ('gsm8k', 'data/gsm8k.parquet'))
    """
    name, sign, path = given.partition("=")
    return (name, path) if sign else (Path(given).stem, given)


def _job(path: str, model: str, reward: str, columns: dict[str, str], changes: Sequence[str]) -> Job:
    """The job of a config, or one made for a data file."""
    findings, notes = Findings(), open_console(stderr=True)
    config: Any = Path(path)
    if config.suffix not in CONFIGS:
        if reward not in REWARDS:
            raise typer.BadParameter(f"is {reward}; use {' or '.join(REWARDS)}", param_hint="--reward")
        source = {"path": path, "eval": path, **columns}
        config = {"cluster": PLACED, "train": {"data": source, "rewards": {reward: REWARDS[reward]}}}
        config["train"]["model"] = model
    loaded = load(config, [f"++train.model={json.dumps(model)}", *changes], findings)
    job = None if loaded is None else read_job(loaded, findings)
    print_findings([one for one in findings.found if findings.has_errors], notes)
    if job is None or job.training is None or findings.has_errors:
        raise typer.Exit(1)
    return job


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
