"""Check a run before launch: models on the Hugging Face hub, accelerators, the plan, and the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from roost.cluster.hardware.registry import installed_registry
from roost.cluster.inventory import Inventory
from roost.config.data import read_data
from roost.config.findings import Findings, Severity, Where, shown
from roost.config.job import Job, ModelLocation, model_location
from roost.config.train import Objective, TrainSettings
from roost.config.train_choices import OptimizerType
from roost.config.train_read import setting_location
from roost.doctor.judge import Level, judge_machine
from roost.doctor.probe import probe_machine
from roost.engines.command import EngineKind, InstalledVllm, ask_for_package, ask_for_sglang, ask_for_vllm
from roost.engines.protocol import EngineError
from roost.net.hub import check_on_hub
from roost.placement.memory.residency import Decision
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.placement.rules.engines import ROLLOUT, models_of, script_for_model
from roost.placement.rules.placing import spelled
from roost.procs.child_env import child_env
from roost.runtime.ray_address import running_here

RAY_ADDRESS = "RAY_ADDRESS"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """Accelerators of this machine."""

    accelerators: int = 0
    model: str = ""
    memory_gb: float | None = None

    @property
    def inventory(self) -> Inventory:
        node: dict[str, object] = {"accelerators": self.accelerators}
        if self.model:
            node["accelerator_model"] = self.model
        if self.memory_gb is not None:
            node["memory_gb"] = self.memory_gb
        return Inventory.from_dict({"nodes": [node]})


def accelerators_to_simulate(job: Job, address: str | None, environ: Mapping[str, str]) -> int:
    """Number of accelerators to simulate, so that a single-node job can be tried on a machine without any.

    0 if the machine has accelerators, if a cluster is named, or if the job needs several nodes.
    """
    requested = job.accelerators_per_node if job.accelerators_per_node is not None else job.last_device + 1
    if not requested or _is_elsewhere(job, address, environ) or installed_registry(environ).detect(environ) is not None:
        return 0
    return requested


def machine_of_run(job: Job, address: str | None, environ: Mapping[str, str]) -> ThisMachine | None:
    """Return this machine if the run uses it alone; None if it runs on a Ray cluster, whose nodes are not known yet."""
    if _is_elsewhere(job, address, environ):
        return None
    simulated = accelerators_to_simulate(job, address, environ)
    if simulated:
        return ThisMachine(simulated)
    if address is None and _joins_running_ray():
        return None
    found = installed_registry(environ).detect(environ)
    return ThisMachine() if found is None else ThisMachine(found[1].count, found[1].model, found[1].memory_gb)


def _is_elsewhere(job: Job, address: str | None, environ: Mapping[str, str]) -> bool:
    is_named = (address or environ.get(RAY_ADDRESS) or LOCAL) != LOCAL
    return is_named or (job.num_nodes or 1) > 1


def _joins_running_ray() -> bool:
    try:
        return running_here(lambda _: None) is not None  # warnings are printed when Ray is joined
    except ImportError:  # Ray is not installed, which is reported when it is needed
        return False


MOST_SIMULATED = 64  # upper bound when searching for the number of accelerators that would be enough


def check_before_launch(job: Job, settings: TrainSettings, address: str | None, environ: Mapping[str, str]) -> None:
    """Raise ConfigError with every mistake that is known before anything starts.

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
            check_optimizer_is_installed(job, settings, plan, findings)
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
    """Report model paths that do not exist here, where the driver reads the tokenizer."""
    fix = "name a folder with a Hugging Face checkpoint"
    for where, model in _models(job, settings):
        if model_location(model) is ModelLocation.MISSING:
            findings.error(
                "RST-E003", where, f"{shown(model)} does not exist", fix=script_for_model(where, model) or fix
            )


def _models(job: Job, settings: TrainSettings) -> list[tuple[Where, str]]:
    return models_of(settings, job.components, lambda name: setting_location(name, job))


def input_paths(job: Job, settings: TrainSettings) -> list[str]:
    """Absolute paths of the models and data files of a run; names on the hub are left out."""
    models = [model for _, model in _models(job, settings) if model_location(model) is not ModelLocation.HUB]
    data = read_data(settings.data, setting_location("data", job), Findings()) if settings.data else None
    sources = [] if data is None else [*data.sources, *(source for each in data.eval.values() for source in each)]
    files = [path for source in sources for path in source.path if Path(path).suffix or Path(path).exists()]
    return list(dict.fromkeys(str(Path(path).expanduser().absolute()) for path in (*models, *files)))


def check_machine(folder: Path, say: Callable[[str], None]) -> None:
    """Raise ConfigError if a check of this machine fails, such as of disk room or limits; report warnings."""
    findings = Findings()
    for check in judge_machine(probe_machine([folder])):
        if check.level is Level.FAILED:
            findings.error("RST-L002", Where("this machine"), f"{check.name}: {check.found}", fix=check.fix)
        elif check.level is Level.WARNING:
            say(f"{check.name}: {check.found}; {check.fix}")
    findings.raise_errors()


def check_hub_models(job: Job, settings: TrainSettings, say: Callable[[str], None]) -> None:
    """Raise a ConfigError for a name that neither the hub nor its local cache has."""
    findings = Findings()
    for where, model in _models(job, settings):
        wrong = check_on_hub(model, say) if model_location(model) is ModelLocation.HUB else None
        if wrong is not None:
            fix = "give the path of a folder with a Hugging Face checkpoint, or a model's name on the hub"
            findings.error("RST-E005", where, f"{shown(model)} {wrong}", fix=script_for_model(where, model) or fix)
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
    path = job.notation.accelerators_key
    findings.error(
        "RST-L001",
        job.source.where(path),
        "is not written, and this machine has no accelerators",
        "accelerators that are not there are simulated on the CPU, as many as the config says",
        f"write {'.'.join(path)}: {enough}, or name a Ray cluster with --address",
    )
    return None


def _fits(job: Job, accelerators: int) -> bool:
    return try_plan(job, Findings(), ThisMachine(accelerators).inventory) is not None


def _plan_errors(job: Job, findings: Findings, machine: ThisMachine | None = None) -> Plan | None:
    """Plan, and report only the errors: warnings are printed later, with the plan on the machines of the run."""
    found = Findings()
    plan = try_plan(job, found, None if machine is None else machine.inventory)
    for finding in found.found:
        if finding.severity is Severity.ERROR:
            findings.error(finding.code, finding.where, finding.what, finding.why, finding.fix)
    return plan


def _check_engine_is_installed(job: Job, settings: TrainSettings, plan: Plan, findings: Findings) -> None:
    """Check that the interpreter of the engines has the engine installed."""
    if settings.objective is Objective.SFT:
        return
    ask: Callable[[str, Mapping[str, str]], object]
    match kind := EngineKind(settings.engine):
        case EngineKind.TORCH:
            return
        case EngineKind.VLLM:
            name, ask = "vLLM", ask_for_vllm
        case EngineKind.SGLANG:
            name, ask = "SGLang", ask_for_sglang
        case _:
            assert_never(kind)
    written = settings.engine_options.get("python")
    python = str(written or _interpreter_of(plan, ROLLOUT) or sys.executable)
    env = settings.engine_options.get("env") or {}
    try:
        found = ask(python, child_env(os.environ, {str(key): str(value) for key, value in env.items()}))
    except EngineError as error:
        where: Where = setting_location("engine", job)
        built_in = spelled(where, "train.engine", "hf" if "actor_rollout_ref" in where.path else "torch")
        findings.error(
            "RST-E008",
            where if written is None else setting_location("engine_options", job).under("python"),
            f"{name} cannot be started with {python}",
            str(error),
            f"install {name} there, write train.engine_options.python: the Python of an environment that has it, or "
            f"write {built_in} for the built-in engine",
        )
        return
    asleep = next((held for held in plan.residency.of(ROLLOUT) if held.decision is Decision.SLEEP), None)
    if isinstance(found, InstalledVllm) and found.is_for_cpu and asleep is not None:
        findings.error(
            "RST-E010",
            setting_location("engine", job),
            "is vLLM's build for CPUs, which cannot sleep, but rollout shares accelerators with the learner",
            f"between phases its engines would sleep: {asleep.reason}",
            "place rollout on accelerators of its own, write enable_sleep_mode: false for it, with which its servers "
            "restart in every step, or write train.engine: torch",
        )


def needs_package_here(settings: TrainSettings, plan: Plan) -> bool:
    """Return True if the optimizer needs a package of its own, and the learner runs with this interpreter.

    Another interpreter, which the config names, may be on other machines alone.
    """
    return _needs_package(settings) and plan["actor"].process(0).interpreter in (None, sys.executable)


def _needs_package(settings: TrainSettings) -> bool:
    return settings.learner.optimizer.optimizer is OptimizerType.ADAMW_8BIT


def check_optimizer_is_installed(job: Job, settings: TrainSettings, plan: Plan, findings: Findings) -> None:
    """Check that the interpreter of the learner, with its environment, has the package of its optimizer."""
    if not _needs_package(settings):
        return
    learner = plan["actor"].process(0)
    try:
        ask_for_package(
            "torchao", "torchao", learner.interpreter or sys.executable, {**os.environ, **learner.start_env}
        )
    except EngineError as error:
        findings.error(
            "RST-E011",
            setting_location("optimizer", job),
            "is adamw_8bit, which needs the package torchao",
            str(error),
            "install it there (pip install torchao), or write optimizer: adamw in train",
        )


def _interpreter_of(plan: Plan, component: str) -> str | None:
    """Interpreter configured for the node group of a component, if any."""
    table = plan[component].table
    for label in table.labels:
        path = table.inventory.group(label).software_of(0).python_interpreter_path
        if path is not None:
            return path
    return None
