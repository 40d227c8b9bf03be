"""Checks that `roost train` makes before it imports torch or starts Ray, so that mistakes are reported at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from roost.config.errors import Findings, Severity, Where, shown
from roost.config.job import Job, Notation
from roost.config.model_files import ModelPlace, model_place
from roost.config.training import TrainSettings
from roost.config.training_read import setting_place
from roost.engines.errors import EngineError
from roost.engines.installed_sglang import ask_for_sglang
from roost.engines.installed_vllm import ask_for_vllm
from roost.placement.engine_rules import ROLLOUT, models_of
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.procs.child import child_env
from roost.trainer.hub import check_on_hub
from roost.trainer.this_machine import ThisMachine, machine_of_run

MOST_SIMULATED = 64  # accelerators tried for the hint of how many to write
ENGINES = {"vllm": ("vLLM", ask_for_vllm), "sglang": ("SGLang", ask_for_sglang)}


def check_before_launch(job: Job, settings: TrainSettings, address: str | None, environ: Mapping[str, str]) -> None:
    """Raise a ConfigError with everything that is known to be wrong before anything starts.

    On this machine alone the whole plan is checked. The machines of a Ray cluster are not known yet; there, what the
    config says of them is checked.
    """
    findings = Findings()
    check_local_models(job, settings, findings)
    machine = machine_of_run(job, address, environ)
    if machine is not None:
        plan = _plan_here(job, machine, findings)
        if plan is not None:
            _check_engine_is_installed(job, settings, plan, findings)
    elif job.accelerators_per_node is not None:
        _plan_errors(job, findings)
    findings.raise_errors()


def check_models(job: Job, settings: TrainSettings, say: Callable[[str], None]) -> None:
    """Raise a ConfigError for a model that is neither here nor on the hub."""
    findings = Findings()
    check_local_models(job, settings, findings)
    findings.raise_errors()
    check_hub_models(job, settings, say)


def check_local_models(job: Job, settings: TrainSettings, findings: Findings) -> None:
    """A model given as a path must be here: the driver itself reads its tokenizer."""
    fix = "name a folder with a Hugging Face checkpoint"
    for where, model in _models(job, settings):
        if model_place(model) is ModelPlace.MISSING:
            findings.error(where, f"{shown(model)} does not exist", fix=fix_of_missing(job, where, fix))


def fix_of_missing(job: Job, where: Where, otherwise: str) -> str:
    """Name the script that makes the model, where the config that names the model has one beside it."""
    if not job.source.file or where.file != job.source.file:
        return otherwise
    script = Path(job.source.file).parent / "make_model.py"
    return f"make it first: python {script}" if script.is_file() else otherwise


def _models(job: Job, settings: TrainSettings) -> list[tuple[Where, str]]:
    return models_of(settings, job.components, lambda name: setting_place(name, job))


def check_hub_models(job: Job, settings: TrainSettings, say: Callable[[str], None]) -> None:
    """Raise a ConfigError for a name that neither the hub nor its local cache has."""
    findings = Findings()
    for where, model in _models(job, settings):
        wrong = check_on_hub(model, say) if model_place(model) is ModelPlace.HUB else None
        if wrong is not None:
            fix = "give the path of a folder with a Hugging Face checkpoint, or a model's name on the hub"
            findings.error(where, f"{shown(model)} {wrong}", fix=fix_of_missing(job, where, fix))
    findings.raise_errors()


def _plan_here(job: Job, machine: ThisMachine, findings: Findings) -> Plan | None:
    """The plan on this machine; its errors go to `findings`."""
    if machine.accelerators or job.accelerators_per_node is not None:
        return _plan_errors(job, findings, machine)
    plan = try_plan(job, Findings(), machine.inventory)
    if plan is not None:
        return plan
    enough = next((count for count in range(1, MOST_SIMULATED + 1) if _fits(job, count)), None)
    if enough is None:  # no number of accelerators cures it
        return _plan_errors(job, findings)
    path = ("cluster", "num_gpus_per_node") if job.notation is Notation.RLINF else ("num_gpus_per_node",)
    findings.error(
        job.source.where(path),
        "is not written, and this machine has no accelerators",
        "accelerators that are not there are simulated on the CPU, as many as the config says",
        f"write {'.'.join(path)}: {enough}, or name a Ray cluster with --address",
    )
    return None


def _fits(job: Job, accelerators: int) -> bool:
    return try_plan(job, Findings(), ThisMachine(accelerators).inventory) is not None


def _plan_errors(job: Job, findings: Findings, machine: ThisMachine | None = None) -> Plan | None:
    """Plan for the errors alone: warnings are printed with the plan on the machines that are found."""
    found = Findings()
    plan = try_plan(job, found, None if machine is None else machine.inventory)
    for finding in found.found:
        if finding.severity is Severity.ERROR:
            findings.error(finding.where, finding.what, finding.why, finding.fix)
    return plan


def _check_engine_is_installed(job: Job, settings: TrainSettings, plan: Plan, findings: Findings) -> None:
    """Ask the interpreter that will run the engine whether it has it."""
    if settings.engine not in ENGINES:
        return
    name, ask = ENGINES[settings.engine]
    written = settings.engine_options.get("python")
    python = str(written or _interpreter_of(plan) or sys.executable)
    env = settings.engine_options.get("env") or {}
    try:
        ask(python, child_env(os.environ, {str(key): str(value) for key, value in env.items()}))
    except EngineError as error:
        where: Where = setting_place("engine", job)
        findings.error(
            where if written is None else setting_place("engine_options", job).under("python"),
            f"{name} cannot be started with {python}",
            str(error),
            f"install {name} there, write train.engine_options.python: the Python of an environment that has it, or "
            "write train.engine: torch for the built-in engine",
        )


def _interpreter_of(plan: Plan) -> str | None:
    """The interpreter that the node group of the engines names, if it does."""
    table = plan[ROLLOUT].table
    for label in table.labels:
        path = table.inventory.group(label).software_of(0).python_interpreter_path
        if path is not None:
            return path
    return None
