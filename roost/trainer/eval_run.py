"""Evaluate a model on the tasks of jobs, with engines on this machine and without a learner."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost.cluster.hardware.registry import installed_registry
from roost.config.data import EVALUATION, SCENARIO
from roost.config.findings import counted
from roost.config.job import Job, resolve_model
from roost.config.train import Objective, TrainSettings
from roost.engines.command import EngineKind, ServerSpec
from roost.engines.fleet import Fleet
from roost.engines.server_process import LocalOwner
from roost.rollout.episode import Group, Scenario, Split
from roost.trainer.evaluation import Evaluation, answer_in, at_k, evaluate
from roost.trainer.metrics import FULL
from roost.trainer.records.run_folder import write_whole
from roost.trainer.records.samples import sample_record
from roost.trainer.report.page import page_file
from roost.trainer.rollout_workers import open_stages
from roost.trainer.setup import PATIENT, RUNS_MODELS, check_runs_models, load_rewards, load_scenario
from roost.trainer.targets import decoder, load_tokenizer
from roost.trainer.watching import FailureFiles
from roost.view.html import one_file_page

ANY_TAG = ""
SHOWN = 200  # completions on the page, of each set


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Options of an evaluation, besides its jobs."""

    model: str
    folder: Path
    samples: int = 1
    temperature: float | None = None  # None: the job's; with several samples and a greedy job, its sampling temperature
    limit: int | None = None  # tasks of each job
    engine: EngineKind = EngineKind.TORCH
    engines: int = 1


@dataclass(frozen=True, eq=False)
class Results:
    """Figures by set and tag (the empty tag: all), and a record of each completion."""

    tables: Mapping[str, Mapping[str, Mapping[str, float]]]
    records: tuple[dict[str, Any], ...]


def evaluate_jobs(jobs: Mapping[str, Job], options: EvalOptions, say: Callable[[str], None]) -> Results:
    """Evaluate on the sets of all jobs, and write results.json, completions.jsonl and report.html."""
    options.folder.mkdir(parents=True, exist_ok=True)
    results = asyncio.run(_evaluated(jobs, options, say))
    lines = (json.dumps(record).encode() + b"\n" for record in results.records)
    write_whole(options.folder / "completions.jsonl", lines)
    write_whole(options.folder / "results.json", [json.dumps(results.tables, indent=2).encode()])
    write_whole(options.folder / "report.html", [page_of(options.model, results).encode()])
    return results


async def _evaluated(jobs: Mapping[str, Job], options: EvalOptions, say: Callable[[str], None]) -> Results:
    first = _settings(next(iter(jobs.values())), options)
    loaded = {name: _loaded(job, _settings(job, options), say) for name, job in jobs.items()}
    masks = engine_masks(options.engines, os.environ)
    specs = [engine_spec(first, options, rank, masks[rank] if masks else None) for rank in range(options.engines)]
    owners = [LocalOwner(spec, options.folder / "logs") for spec in specs]
    tables: dict[str, dict[str, dict[str, float]]] = {}
    records: list[dict[str, Any]] = []
    say(f"starting {options.engine} with {options.model}")
    async with Fleet(owners, folder=options.folder, report=say) as fleet:
        for name, job in jobs.items():
            found, decode = await _on_job(job, loaded[name], fleet, options, say)
            for label, groups in _named(name, found, len(jobs) > 1).items():
                if not any(group.episodes for group in groups):
                    raise ValueError(f"no answer of {label} was scored; see {options.folder / 'failures'}")
                tables[label] = by_tag(groups)
                records += [
                    {"set": label, "correct": one["reward"] >= FULL, **one}
                    for group in groups
                    for one in (sample_record(group, episode, found.version, decode) for episode in group.episodes)
                ]
    return Results(tables, tuple({**one, "extracted": answer_in(str(one["completion"]))} for one in records))


def _loaded(job: Job, settings: TrainSettings, say: Callable[[str], None]) -> tuple[TrainSettings, Scenario, Any]:
    """The settings to use, the scenario of a job, and its tokenizer.

    Text of a data file is sent in the model's chat template, if it has one.
    """
    is_file = job.source.file is None and settings.task.get("_target_") == SCENARIO
    if is_file and "chat_template" not in settings.task and load_tokenizer(settings.learner.model).chat_template:
        settings = replace(settings, task={**settings.task, "chat_template": True})
    scenario, tokenizer = load_scenario(job, settings)
    if not scenario.size(Split.EVALUATION):
        raise ValueError(f"{job.source.file or 'the data'} has no evaluation tasks; give a data file, or held-out rows")
    if is_file:
        is_rendered = scenario.task(Split.EVALUATION, 0).data["is_rendered"]
        how = "in the model's chat template (--no-chat-template sends text as it is)"
        say(f"prompts are sent {how if is_rendered else 'as they are, without a chat template'}")
    return settings, scenario, tokenizer


async def _on_job(
    job: Job,
    loaded: tuple[TrainSettings, Scenario, Any],
    fleet: Fleet,
    options: EvalOptions,
    say: Callable[[str], None],
) -> tuple[Evaluation, Any]:
    settings, scenario, tokenizer = loaded
    size = scenario.size(Split.EVALUATION)
    tasks = min(size, options.limit or size)
    settings = replace(settings, evaluation=replace(settings.evaluation, eval_tasks=tasks))
    tried = settings.evaluation
    each = f"{counted(tried.eval_samples, 'sample')} each"
    say(f"{tasks:,} of {size:,} tasks, {each}, temperature {tried.eval_temperature:g}")
    failures, decode = FailureFiles(options.folder / "failures", say), decoder(tokenizer)
    rewards = load_rewards(job, settings)
    async with open_stages({}, scenario, fleet, settings, True, failures, rewards, decode) as stages:
        stage = stages.evaluation
        return await fleet.serve(evaluate(scenario, stage.runner, settings, 0, stage.on_end)), decode


def _settings(job: Job, options: EvalOptions) -> TrainSettings:
    """The job's settings with the model and the samples of this evaluation."""
    settings = job.training
    if settings is None:
        raise ValueError("the job has no section train")
    if settings.objective is Objective.SFT and not settings.rewards:
        raise ValueError(
            f"{job.source.file or 'the job'} is for roost sft and has no rewards to score answers with; "
            "name a job with rewards or a data file with --data"
        )
    temperature = settings.evaluation.eval_temperature if options.temperature is None else options.temperature
    if options.temperature is None and options.samples > 1 and temperature == 0:
        temperature = settings.sampling.temperature
    return replace(
        settings,
        learner=replace(settings.learner, model=resolve_model(options.model)),
        evaluation=replace(settings.evaluation, eval_samples=options.samples, eval_temperature=temperature),
    )


def engine_masks(engines: int, environ: Mapping[str, str]) -> list[dict[str, str]] | None:
    """Variables that show each engine one of the accelerators visible here; None if engines run on the CPU."""
    import torch

    found = installed_registry(environ).detect(environ)
    if found is None:
        return None
    vendor, devices = found
    check_runs_models([vendor.type])
    if vendor.type not in RUNS_MODELS or not torch.cuda.is_available():
        return None
    if engines > devices.count:
        there = counted(devices.count, "accelerator")
        raise ValueError(f"--engines is {engines}, and {there} can be seen here; write --engines {devices.count}")
    return [vendor.visibility([device]) for device in devices.physical_ids[:engines]]


def engine_spec(settings: TrainSettings, options: EvalOptions, rank: int, mask: Mapping[str, str] | None) -> ServerSpec:
    """Server of one engine: on the accelerator that `mask` shows, or on the CPU."""
    threads = max(1, (os.cpu_count() or 1) // options.engines)
    env = {"OMP_NUM_THREADS": str(threads), **PATIENT} if mask is None else mask
    given = dict(settings.engine_options)
    return ServerSpec(
        options.engine,
        settings.learner.model,
        f"engine-{rank}",
        device="cpu" if mask is None else "auto",
        dtype=settings.learner.compute_dtype,
        seed=settings.seed,
        **{**given, "env": {**env, **dict(given.get("env") or {})}},
    )


def _named(job: str, found: Evaluation, has_others: bool) -> dict[str, tuple[Group, ...]]:
    """The sets of an evaluation by name; a single set without a name has the job's."""
    if set(found.by_set) <= {EVALUATION}:
        return {job: found.groups}
    return {f"{job}/{name}" if has_others else name: groups for name, groups in found.by_set.items()}


def by_tag(groups: Iterable[Group]) -> dict[str, dict[str, float]]:
    """Figures of all groups, and of each tag if there are several."""
    groups = tuple(groups)
    tags = sorted({group.task.tag for group in groups})
    parts = {tag: [group for group in groups if group.task.tag == tag] for tag in tags if len(tags) > 1}
    return {ANY_TAG: at_k(groups)} | {tag or "no tag": at_k(part) for tag, part in parts.items()}


def page_of(model: str, results: Results) -> str:
    """The results as one self-contained HTML file."""
    shown: dict[str, list[dict[str, Any]]] = {}
    for record in results.records:
        of_set = shown.setdefault(record["set"], [])
        if len(of_set) < SHOWN:
            of_set.append(record)
    data = {
        "model": model,
        "tables": [[name, list(map(list, table.items()))] for name, table in results.tables.items()],
        "completions": [one for some in shown.values() for one in some],
        "total": len(results.records),
    }
    return one_file_page(page_file, "eval.html", ("page",), ("elements", "numbers", "eval"), "Roost evaluation", data)
