"""Set up a run: cluster, plan, scenario, run folder, and the workers of each component."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from roost.cluster.hardware.accelerator import AcceleratorType
from roost.cluster.hardware.accelerators.simulated import COUNT_VARIABLE
from roost.config.data import is_teacher
from roost.config.findings import Findings, bug, counted
from roost.config.job import AUTO, Job, resolve_model
from roost.config.train import (
    AdvantageEstimator,
    LearnerSettings,
    OptimizerSettings,
    TrainSettings,
)
from roost.config.train_read import setting_location, task_place
from roost.engines.command import RETURN_EXPERTS, EngineKind, ServerSpec
from roost.engines.fleet import Fleet
from roost.engines.planned import EnginePlan, plan_engines
from roost.engines.protocol import InFlight
from roost.engines.residency import EngineSwitch
from roost.learner.forward import Head
from roost.learner.residence import WEIGHTS
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.shape import EXPERT_FAMILIES
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.placement.rescale import without_nodes
from roost.placement.routes import ServerRoute
from roost.placement.rules.rewards import placed_rewards
from roost.rollout.episode import Scenario, Split
from roost.rollout.rewards.config import ConfiguredRewards, make_rewards
from roost.runtime.cluster import NODE_LIMIT, Cluster
from roost.runtime.ray_address import running_here
from roost.runtime.worker import GroupSpec, LaunchOptions, WorkerGroup
from roost.trainer.learners import Learners, LearnerWorker, receiver_at
from roost.trainer.loop import DeviceSwitch, Models
from roost.trainer.preflight import RAY_ADDRESS, accelerators_to_simulate
from roost.trainer.records.checkpoints import TrainerState
from roost.trainer.records.resuming import (
    Say,
    plain,
    reopened,
)
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.targets import check_rows, check_targets, load_tokenizer, make_scenario

ACTOR, ROLLOUT, CRITIC, REFERENCE, INFERENCE = "actor", "rollout", "critic", "reference", "inference"

# Accelerators that learner and engines use; PyTorch calls both "cuda".
RUNS_MODELS = (AcceleratorType.NV_GPU, AcceleratorType.AMD_GPU)

REPLACEMENT_LIMIT = 60.0  # seconds for a lost node to come back, or for another in its place

# Runs on CPUs have more processes than cores: waiting threads must not spin.
PATIENT = {"OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True)
class RunSetup:
    """A plan in the form the trainer uses."""

    engines: EnginePlan
    switch: DeviceSwitch
    on_gpu: bool
    scorers: tuple[str, ...]  # components with a model other than the actor and the engines
    sharing: tuple[str, ...]  # those of the actor and the scorers that share a device with an engine
    threads: int | None = None  # per learner, if models run on CPUs


def run_setup(plan: Plan, settings: TrainSettings, on_gpu: bool) -> RunSetup:
    """Engines, device switch and scorers of a training run, from its plan. Without GPUs engines run on the CPU."""
    options = dict(settings.engine_options)
    if settings.sampling.router_replay and settings.engine == EngineKind.VLLM:
        options["args"] = (*options.get("args", ()), RETURN_EXPERTS)  # vLLM has no field for it in requests
    defaults = ServerSpec(
        EngineKind(settings.engine),
        settings.learner.model,
        device="auto" if on_gpu else "cpu",
        dtype=settings.learner.compute_dtype,
        seed=settings.seed,
        lora_rank=None if settings.learner.adapter is None else settings.learner.adapter.lora_rank,
        **options,
    )
    engines = plan_engines(plan, ROLLOUT, defaults, defaults.kind)  # train.engine wins over ROLL's strategy
    engines = replace(engines, servers=tuple(replace(one, model=resolve_model(one.model)) for one in engines.servers))
    scorers = scorers_of(plan, settings)
    threads = None
    if not on_gpu:
        learning = (ACTOR, *(name for name in scorers if name == CRITIC))
        threads, of_engines = threads_of(plan, learning, settings.max_staleness, os.cpu_count() or 1)
        plain = [
            replace(
                spec,
                device="cpu",
                memory_fraction=None,
                weight_transfer=None,
                env={"OMP_NUM_THREADS": str(of_engines), **PATIENT, **spec.env},
            )
            for spec in engines.servers
        ]
        engines = replace(engines, servers=tuple(plain))
    displaced = engines.displaced if len(engines.displaced) < len(engines.servers) else None
    engine_switch = EngineSwitch(
        engines.decision, sleep_level_of(settings), InFlight(settings.in_flight_mode), displaced
    )
    offloads = {name: _offloads(plan, name, settings) for name in (ACTOR, *scorers)}
    overlaps = on_gpu and all(each.overlaps_sync for each in plan.residency.of(ROLLOUT))
    switch = DeviceSwitch(engine_switch, offloads, overlaps)
    sharing = tuple(name for name in (ACTOR, *scorers) if devices_of(plan, name) & devices_of(plan, ROLLOUT))
    return RunSetup(engines, switch, on_gpu, scorers, sharing, threads)


def scorers_of(plan: Plan, settings: TrainSettings) -> tuple[str, ...]:
    """Return the critic, reference, inference and teachers that the run needs and the plan places."""
    needed = {
        CRITIC: settings.advantage.advantage_estimator is AdvantageEstimator.GAE,
        REFERENCE: settings.uses_reference,
        INFERENCE: settings.learner.loss.scores_policy,
        **{teacher.name: True for teacher in settings.teachers},
    }
    placed = {part.name for part in plan.components}
    return tuple(name for name, is_needed in needed.items() if is_needed and name in placed)


def _offloads(plan: Plan, name: str, settings: TrainSettings) -> tuple[str, ...]:
    """Parts that a component moves to the host while engines use its devices; only weights if it is never trained."""
    if name in (REFERENCE, INFERENCE) or is_teacher(name):
        return (WEIGHTS,)
    return plan[name].model.offloads if name == CRITIC else tuple(settings.learner.offloads)


def devices_of(plan: Plan, name: str) -> set[tuple[int, int]]:
    return {device for process in plan[name].table for device in process.devices}


def threads_of(plan: Plan, learning: Sequence[str], max_staleness: int, cores: int) -> tuple[int, int]:
    """Return threads per learner and per engine on CPUs: processes that run at the same time share the cores."""
    of_learners = Counter(node for name in learning for node in plan[name].table.nodes.tolist())
    of_engines = Counter(plan[ROLLOUT].table.nodes.tolist())
    learners, engines = (max(counts.values(), default=1) for counts in (of_learners, of_engines))
    if max_staleness:  # learners and engines run at the same time
        learners = engines = learners + engines
    return max(1, cores // learners), max(1, cores // engines)


def launch_options(setup: RunSetup, groups: Mapping[str, GroupSpec]) -> dict[str, LaunchOptions]:
    """Launch options of the learners."""
    return {} if setup.on_gpu else {name: LaunchOptions(env=PATIENT) for name in groups}


def sleep_level_of(settings: TrainSettings) -> int:
    """Sleep level of engines: 2 drops the weights; 1 keeps them, if only an adapter is synced."""
    return 2 if settings.learner.adapter is None else 1


def learner_groups(plan: Plan, settings: TrainSettings, setup: RunSetup) -> dict[str, GroupSpec]:
    """Worker groups of the learner and the scorers."""
    learner = resolved_learner(settings.learner, setup.on_gpu)
    policy = planned_learner(learner, plan[ACTOR])
    groups = {ACTOR: LearnerWorker.create_group(policy, Head.POLICY, setup.threads)}
    for name in setup.scorers:
        groups[name] = scorer_group(plan, name, learner, settings.critic_optimizer, setup.threads)
    return groups


def takes_images(fleet: Fleet) -> bool:
    """Return True if all engines take images, as far as they have started."""
    return all(member.capabilities.takes_images for member in fleet.pool.members.values())


def models_of(
    plan: Plan,
    groups: Mapping[str, WorkerGroup],
    fleet: Fleet,
    routes: Mapping[str, ServerRoute],
    setup: RunSetup,
    settings: TrainSettings,
    adapters: Path,
) -> Models:
    """The learners of worker groups, and the engines; `routes` is read at each weight sync, as engines may join."""
    find = partial(receiver_at, fleet=fleet, routes=routes)
    folder = adapters if settings.learner.adapter is not None else None
    shows_image = partial(takes_images, fleet)
    learners = {
        name: Learners(group, plan[name].parallel, routes, find, folder, shows_image) for name, group in groups.items()
    }
    sharing = tuple(learners[name] for name in setup.sharing)
    critic, reference, inference = (learners.get(name) for name in (CRITIC, REFERENCE, INFERENCE))
    teachers = {each.name: learners[each.name] for each in settings.teachers}
    return Models(fleet, learners[ACTOR], critic, reference, inference, sharing, teachers)


def resolved_learner(settings: LearnerSettings, on_gpu: bool) -> LearnerSettings:
    """Settings with the model's folder, and with the defaults that depend on the device."""
    recomputes, compiles = settings.activation_checkpointing, settings.compile
    return replace(
        settings,
        model=resolve_model(settings.model),
        activation_checkpointing=on_gpu if recomputes is None else recomputes,
        compile=False if compiles is None and not on_gpu else compiles,
    )


def planned_learner(settings: LearnerSettings, part: ComponentPlan) -> LearnerSettings:
    """Settings with the mesh of a learner's plan and, if the plan chose them, the layers to recompute."""
    planned = replace(settings, parallel=part.parallel)
    if settings.activation_checkpointing != AUTO:
        return planned
    return replace(
        planned, activation_checkpointing=part.model.recomputes, recomputed_layers=part.model.recomputed_layers
    )


def scorer_group(
    plan: Plan, name: str, learner: LearnerSettings, critic: OptimizerSettings, threads: int | None
) -> GroupSpec:
    """Worker group of a scorer. Inference starts from the policy's model, others may have their own."""
    own = plan[name].model.path if name != INFERENCE else None
    model = resolve_model(own or learner.model)
    # The policy's routed experts cannot be replayed in another model.
    replays = learner.router_replay and name in (INFERENCE, REFERENCE) and model == resolve_model(learner.model)
    settings = replace(planned_learner(learner, plan[name]), model=model, adapter=None, router_replay=replays)
    family = (plan[name].model.config or {}).get("model_type", EXPERT_FAMILIES[0])
    if name != CRITIC or family not in EXPERT_FAMILIES:  # it has no routers, or these are not trained
        settings = replace(settings, router_aux_loss_coef=0.0)
    if name == CRITIC:
        return LearnerWorker.create_group(replace(settings, optimizer=critic), Head.VALUE, threads)
    # Never trained, so weights are stored in the compute dtype.
    settings = replace(settings, weight_dtype=learner.compute_dtype)
    return LearnerWorker.create_group(settings, Head.POLICY, threads, learns=False)


def joined_address(job: Job, address: str | None) -> str | None:
    """Return the address of the running cluster to join; `address` itself if it is set or Ray is started here.

    With the address, a run that loses this cluster reconnects to it instead of starting a private Ray.
    """
    import ray

    is_known = address is not None or bool(os.environ.get(RAY_ADDRESS)) or ray.is_initialized()
    if is_known or accelerators_to_simulate(job, address, os.environ):
        return address
    return running_here(lambda _: None)  # warnings are printed when Ray is joined


@contextlib.contextmanager
def open_cluster(
    job: Job, address: str | None, log_dir: str, say: Callable[[str], None], former: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Join or start the cluster that a job runs on; `former` are the Ray ids of the nodes it ran on before."""
    simulated = accelerators_to_simulate(job, address, os.environ)
    before = os.environ.get(COUNT_VARIABLE)
    if simulated:
        verb = "is" if simulated == 1 else "are"
        say(f"there is no accelerator here: {simulated} {verb} simulated, and everything runs on the CPU")
        os.environ[COUNT_VARIABLE] = str(simulated)  # inherited by the processes that Ray starts
        address = "local"
    say("starting Ray on this machine" if address == "local" else "connecting to Ray")
    config = None if job.source.values.get("cluster") is None else dict(job.source.values)
    try:
        limit = REPLACEMENT_LIMIT if former else NODE_LIMIT
        with Cluster(
            job.num_nodes, config, address, log_dir=log_dir, node_timeout=limit, say=say, former=former
        ) as cluster:
            yield cluster
    finally:
        if simulated:
            os.environ.pop(COUNT_VARIABLE)
            os.environ.update({} if before is None else {COUNT_VARIABLE: before})


def has_gpus(plan: Plan) -> bool:
    """Return True if the machines of a plan have real accelerators that models run on.

    Raises a ValueError if the plan uses accelerators that models cannot run on.
    """
    nodes = plan.inventory.nodes
    held = {node for part in plan.components for node, _ in devices_of(plan, part.name)}
    check_runs_models(nodes[node].accelerator_type for node in held)
    return any(node.accelerator_type in RUNS_MODELS for node in nodes)


def check_runs_models(types: Iterable[str]) -> None:
    """Raise a ValueError for accelerators that learner and engines would leave unused.

    >>> check_runs_models(["NV_GPU", "NPU"])
    Traceback (most recent call last):
    ...
    ValueError: models run on NV_GPU, AMD_GPU and simulated accelerators, not on NPU; place the job on nodes with these
    """
    known = (*RUNS_MODELS, AcceleratorType.SIMULATED, AcceleratorType.NO_ACCEL)
    wrong = sorted({str(kind) for kind in types} - set(known))
    if wrong:
        good = f"{', '.join(RUNS_MODELS)} and simulated accelerators"
        raise ValueError(f"models run on {good}, not on {', '.join(wrong)}; place the job on nodes with these")


def planned(job: Job, cluster: Cluster, run: RunFolder, say: Say) -> Plan:
    """The plan of a job on a cluster; if nodes of the run were lost, its plan without them, and what changes."""
    if cluster.lost and run.plan_file.exists():
        change = without_nodes(Plan.from_json(run.plan_file.read_text(encoding="utf-8")), cluster.lost)
        say("\n  ".join(["going on with the nodes that are left:", *change.lines()]))
        return change.plan
    findings = Findings()
    plan = try_plan(job, findings, cluster)
    findings.raise_errors()
    if plan is None:
        raise bug("there is no plan, and no finding says why")
    return plan


def load_scenario(job: Job, settings: TrainSettings) -> tuple[Scenario, Any]:
    """Load the scenario of a job, and the tokenizer it was built with."""
    findings = Findings()
    routing = check_targets(settings, job, findings)
    findings.raise_errors()
    try:
        tokenizer = load_tokenizer(settings.learner.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{settings.learner.model} has no tokenizer that can be loaded: {error}") from error
    scenario = make_scenario(settings.task, tokenizer, task_place(settings, job), findings)
    findings.raise_errors()
    if scenario is None:
        raise bug("there is no scenario, and no finding says why")
    check_rows(settings, job, routing, findings, scenario)
    findings.raise_errors()
    return scenario, tokenizer


def load_rewards(job: Job, settings: TrainSettings) -> ConfiguredRewards:
    """Build the rewards that score in the driver, for one attempt: they belong to its event loop."""
    findings = Findings()
    placed = placed_rewards(settings.rewards, {part.name for part in job.components})
    rewards = make_rewards(settings.rewards, setting_location("rewards", job), findings, placed)
    findings.raise_errors()
    return rewards


def with_step_count(settings: TrainSettings, scenario: Scenario, say: Say) -> TrainSettings:
    """Return the settings with the number of steps, which may follow from max_epochs; report it and the data."""
    if hasattr(scenario, "data_summary"):
        say(scenario.data_summary())
    if settings.max_epochs is None:
        return settings
    tasks, groups = scenario.size(Split.TRAIN), settings.rollout.prompts_per_step
    found = settings.for_tasks(tasks)
    if not found.step_count:
        why = f"the task has {tasks} training tasks, a step uses {groups}, and an incomplete batch is dropped"
        raise ValueError(f"max_epochs {settings.max_epochs} makes no step: {why}; use fewer groups")
    how = f"max_epochs {settings.max_epochs} over {tasks} tasks, {groups} of them a step"
    if found.max_steps == settings.max_steps:
        bound = replace(settings, max_steps=None).for_tasks(tasks).step_count
        how = f"max_steps {settings.max_steps} ends the run; {how}, would be {bound}"
    elif settings.max_steps is not None:
        how = f"the data end before max_steps {settings.max_steps}; {how}"
    say(f"{counted(found.step_count, 'step')}: {how}")
    return found


def data_end(job: Job, settings: TrainSettings, scenario: Scenario) -> str:
    """Message for a run whose data ended before `max_steps` of the job; else an empty string."""
    wanted = job.training.max_steps if job.training is not None else None
    if wanted is None or settings.step_count >= wanted:
        return ""
    tasks, key = counted(scenario.size(Split.TRAIN), "task"), setting_location("max_epochs", job).key_path
    return f"the data ended at step {settings.step_count}, before max_steps {wanted}: {tasks}; raise {key} to train on"


def check_shared_disk(cluster: Cluster, folder: Path) -> None:
    """Raise if a node cannot see the run folder: checkpoints are written and read on several nodes."""
    if cluster.blind_nodes:
        names = ", ".join(cluster.nodes[rank].report.name for rank in cluster.blind_nodes)
        raise ValueError(
            f"{names} cannot see {folder}; keep runs on a disk that all machines share (--runs, or --scratch)"
        )


def open_run(
    job: Job, plan: Plan, settings: TrainSettings, folder: Path, state: TrainerState | None, say: Say
) -> RunFolder:
    """Create the run folder, or reopen it if the run continues."""
    if state is not None:
        run = reopened(RunFolder(folder), settings, state, say)
        run.write_plan(plan.to_json())
        return run
    config = yaml.safe_dump(plain(job.source.values), sort_keys=False)
    return RunFolder.create(folder, config, plan.to_json())
