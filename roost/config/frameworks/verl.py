"""verl: Hydra overrides behind `verl.trainer.main_ppo` and its relatives.

A pool of `trainer.nnodes` nodes holds one learner process per GPU, with the reference and the critic in the same
processes, and engines that are cut from the pool in order. Asynchronous trainers have engines on nodes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from roost.config.data import TEACHER
from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, Findings, Position, Where, counted
from roost.config.frameworks.arguments import (
    Arguments,
    Start,
    hydra_config,
    over_file,
    read_config,
    read_flags,
    resolved_for,
    warn_defaults,
)
from roost.config.frameworks.pools import (
    Machines,
    Pool,
    Reader,
    add_visible_of_script,
    check_divides,
    check_expert_parts,
    engines_on,
    enough_visible,
    machines_for,
    megatron_sizes,
    visible_devices,
)
from roost.config.frameworks.registry import Framework
from roost.config.frameworks.signs import OWN_VERL
from roost.config.frameworks.verl_checks import (
    check_engine,
    check_learner,
    check_megatron_keys,
    check_separate_async,
    check_signs,
)
from roost.config.frameworks.verl_engines import TENSOR, cut_pool, engine_size, standalone
from roost.config.job import (
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Role,
    Sharding,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
    size_place,
)
from roost.config.known_keys.tables import PLACING as FOR_PLACING, Entry
from roost.config.notations.algorithm import algorithm_of
from roost.config.shell.state import Reading, Value
from roost.config.source import Section

CPUS = 3  # that a worker's place in Ray has beside its GPU
VERSION = "verl 0.9 of 2026-08-22 (1dda039b9)"
# Defaults of verl's own configs, by the path of the key; a number that is not here has none.
DEFAULTS: Mapping[str, Any] = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.v1.trainer_mode": "sync",
    "rollout.nnodes": 1,  # in the configs of fully_async and one_step_off
    "rollout.n_gpus_per_node": 8,
    "actor_rollout_ref.rollout.nnodes": 0,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": TENSOR,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "algorithm.adv_estimator": "gae",
    "async_training.staleness_threshold": 0.1,  # of fully_async
    "async_training.trigger_parameter_sync_step": 4,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "reward.reward_model.n_gpus_per_node": 8,
    "reward.reward_model.rollout.tensor_model_parallel_size": TENSOR,
    "distillation.n_gpus_per_node": 8,
}
OWN_CONFIGS = re.compile(
    r"(?:\w*ppo_\w*trainer|dapo_\w*trainer|prime_trainer|spin_trainer"
    r"|sppo_trainer|entropy_trainer|one_step_off_\w+|fully_async_\w+)(?:\.ya?ml)?"
)
PLACING = tuple(
    Entry(
        FOR_PLACING,
        """trainer.{nnodes,n_gpus_per_node,use_v1} trainer.v1.trainer_mode model_engine
        rollout.{nnodes,n_gpus_per_node} data.{max_prompt_length,max_response_length}
        actor_rollout_ref.rollout.{name,nnodes,n_gpus_per_node,gpu_memory_utilization,free_cache_engine}
        actor_rollout_ref.rollout.{tensor_model,pipeline_model,data,expert}_parallel_size
        actor_rollout_ref.rollout.disaggregation.* actor_rollout_ref.model.{path,lora_rank,lora.rank,lora_adapter_path}
        actor_rollout_ref.model.enable_gradient_checkpointing
        actor_rollout_ref.actor.{strategy,use_kl_loss,ulysses_sequence_parallel_size}
        {actor_rollout_ref.actor,critic}.{ppo_max_token_len_per_gpu,ppo_micro_batch_size_per_gpu,use_dynamic_bsz}
        {actor_rollout_ref.actor,critic}.megatron.*_offload
        {actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.{tensor,pipeline,expert}_model_parallel_size
        {actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron.{context,expert_tensor}_parallel_size
        actor_rollout_ref.actor.fsdp_config.{fsdp_size,ulysses_sequence_parallel_size,*_offload}
        actor_rollout_ref.ref.{strategy,ulysses_sequence_parallel_size}
        actor_rollout_ref.ref.fsdp_config.{fsdp_size,ulysses_sequence_parallel_size}
        algorithm.{adv_estimator,use_kl_in_reward} critic.{enable,strategy,ulysses_sequence_parallel_size}
        critic.fsdp.{fsdp_size,ulysses_sequence_parallel_size,*_offload}
        critic.model.{path,lora_rank,lora.rank,enable_gradient_checkpointing}
        critic.model.fsdp_config.{fsdp_size,ulysses_sequence_parallel_size,*_offload}
        reward.reward_model.* reward_model.{enable,enable_resource_pool,nnodes,n_gpus_per_node,rollout.*,model.path}
        distillation.* async_training.{use_dynamic_resource_scheduling,use_trainer_do_validate,staleness_threshold}
        async_training.trigger_parameter_sync_step CUDA_VISIBLE_DEVICES ray_start.num_cpus
        ray_kwargs.ray_init.num_cpus""",
    ).patterns()
)
ASYNCHRONOUS = ("fully_async", "one_step_off", "separate_async")


def with_config_file(start: Start, findings: Findings) -> Arguments:
    """The arguments merged over the config file that they name, if it is a user's own and exists."""
    arguments, command = start.arguments, start.command
    name = arguments.options.get("--config-name") or arguments.options.get("-cn")
    text, file = hydra_config(start)
    folder = arguments.options.get("--config-path") or arguments.options.get("-cp") or Value(("config",))
    is_usual = re.search(r"(^|/)config/?$", folder.shown) is not None  # where verl has its own configs
    is_own = OWN_CONFIGS.fullmatch(text) and is_usual if text else name is None and OWN_VERL.fullmatch(start.program)
    if not is_own:
        source = read_config(file, command, findings) if file is not None else None
        if source is None:
            findings.warn(
                "RST-N060",
                Where(*(command.words[start.at] if name is None else name).position),
                f"{f'the config of {start.program}' if name is None else name.shown or 'the config'} is not here; "
                "verl's own defaults are used instead of it",
                f"defaults of {VERSION}",
                "plan from the folder that the job is started in",
            )
        else:
            if not _are_own(source.values.get("defaults")):
                warn_defaults(source, findings)
            arguments = over_file(source, arguments)
    if "megatron" in (text or "").lower():
        arguments.values.setdefault("model_engine", "megatron")
    if is_own:
        check_megatron_keys(arguments, findings)
        check_signs(command.words[start.at + 1 :], findings)
    arguments.values = resolved_for(arguments.values, command)
    add_visible_of_script(arguments, start)
    return arguments


def _are_own(defaults: Any) -> bool:
    """Return True if a config's `defaults` name only configs of verl, whose values Roost knows."""
    names = defaults if isinstance(defaults, list) else [] if defaults is None else [defaults]
    return all(isinstance(name, str) and (name == "_self_" or OWN_CONFIGS.fullmatch(name)) for name in names)


def read_verl(root: Section, notation: Notation) -> Job:
    """Read the config of a verl job."""
    return _Verl(root, notation).job()


def with_ray(arguments: Arguments, reading: Reading) -> Arguments:
    """The arguments with the most CPUs that a `ray start` of the script gives a node, if each says how many."""
    found: list[tuple[int, Position]] = []
    for command in reading.commands.values():
        names = [(word.known or "").rpartition("/")[2] for word in command.words]
        at = next((at for at, pair in enumerate(pairwise(names)) if pair == ("ray", "start")), None)
        if at is None:
            continue
        flags = read_flags(command.words[at + 2 :])
        cpus = flags.values.get("--num-cpus")
        if isinstance(cpus, bool) or not isinstance(cpus, int):
            return arguments  # as many as the node has
        found += [(cpus, flags.positions[("--num-cpus",)])] if cpus else []  # a head may have none
    if found:
        arguments.set(("ray_start", "num_cpus"), *max(found, key=itemgetter(0)))
    return arguments


FRAMEWORK = Framework(read_verl, PLACING, base=with_config_file, beside=with_ray)


@dataclass(slots=True)
class _Verl(Reader):
    def job(self) -> Job:
        trainer = self.root.below("trainer")
        nodes = self._count(trainer, "nnodes", 1, MAX_NODES) or 1
        per_node = self._count(trainer, "n_gpus_per_node", 1, MAX_ACCELERATORS_PER_NODE) or 1
        if nodes == 1:
            enough_visible(visible_devices(self.root), per_node, self.root, "processes")
        self._check_cpus(per_node)
        mode = self._mode()
        machines = machines_for({"trainer": (nodes, per_node), **self._own_pools(mode, per_node)})
        pools = machines.pools
        self._learner(pools["trainer"].devices)
        if mode == "separate_async":
            check_separate_async(self.root, "reward" in pools)
        self._rollout(pools, mode)
        self._reward(pools)
        self._teachers(pools.get("teacher"))
        self._note_machines(machines)
        if sum(pool.nodes for pool in pools.values()) > 1:
            self.root.findings.note(
                "RST-N059",
                self.place("trainer.nnodes"),
                "the order of the nodes is not fixed: verl sorts them by IP address as text, and Ray places pools",
                '"10.0.0.10" comes before "10.0.0.2"; planned are the trainer\'s nodes first, in order',
                "compare with the nodes that verl prints, where the order matters",
            )
        job = self.as_job(machines.count, machines.width, self._settings(mode))
        return replace(job, pools=machines.sizes)

    def _check_cpus(self, per_node: int) -> None:
        """Warn if Ray has too few CPUs for the learner's processes on a node."""
        for path in ("ray_start.num_cpus", "ray_kwargs.ray_init.num_cpus"):
            section, key = self.inner(path)
            cpus, needed = section.whole_number(key, 0), per_node * CPUS
            if cpus is not None and cpus < needed:
                self.root.findings.warn(
                    "RST-N089",
                    section.where(key),
                    f"is {counted(cpus, 'CPU')}, and the learner takes {needed} of each node",
                    f"verl asks Ray for {CPUS} with each of {counted(per_node, 'GPU')}, and waits for them forever",
                    f"give Ray {needed} CPUs or more, or leave it out",
                )

    # --- pools

    def _own_pools(self, mode: str, per_node: int) -> dict[str, tuple[int, int]]:
        """Nodes and GPUs per node of the pools beside the trainer's."""
        found = {}
        if mode in ("fully_async", "one_step_off"):
            found["rollout"] = self._pool(self.root.below("rollout"), int(DEFAULTS["rollout.n_gpus_per_node"]))
        elif mode == "separate_async":
            found["rollout"] = self._pool(self.root.below("actor_rollout_ref", "rollout"), per_node)
        reward = self._reward_section()
        if reward.flag("enable") and reward.flag("enable_resource_pool"):
            found["reward"] = self._pool(reward, int(DEFAULTS["reward.reward_model.n_gpus_per_node"]))
            self._check_pool(reward, "the reward model")
        teachers = self.root.below("distillation")
        if teachers.flag("enabled"):
            found["teacher"] = self._pool(teachers, int(DEFAULTS["distillation.n_gpus_per_node"]))
            self._check_pool(teachers, "the teachers")
        return {name: (nodes, width) for name, (nodes, width) in found.items() if nodes}

    def _pool(self, section: Section, default_per_node: int) -> tuple[int, int]:
        """Nodes of a pool, and GPUs on each."""
        nodes = self._count(section, "nnodes", 0, MAX_NODES) or 0
        return nodes, section.whole_number("n_gpus_per_node", 1, default_per_node, MAX_ACCELERATORS_PER_NODE) or 1

    def _check_pool(self, section: Section, owner: str) -> None:
        """Check that a pool of its own has nodes; verl's default is 0."""
        written = section.values.get("nnodes")
        if written in (None, 0):
            default = "" if written == 0 else "the default is 0; "
            self.does_not_fit(
                section.where("nnodes"),
                f"gives {owner} no nodes",
                f"{default}verl ends with a ValueError",
                f"write {section.spell('nnodes', 1)}",
            )

    def _note_machines(self, machines: Machines) -> None:
        """Note the assumed machines if a pool does not fill its nodes."""
        if all(pool.per_node == machines.width for pool in machines.pools.values()):
            return
        sizes = ", ".join(f"{name} {pool.nodes} x {pool.per_node}" for name, pool in machines.pools.items())
        self.root.findings.note(
            "RST-N065",
            self.place("trainer.n_gpus_per_node"),
            f"the pools are planned on {counted(machines.count, 'machine')} of {counted(machines.width, 'GPU')}",
            f"nodes x GPUs: {sizes}; a verl job does not say how many GPUs a machine has",
            "compare with the machines of the cluster",
        )

    # --- keys

    def _count(self, section: Section, key: str, minimum: int, maximum: int | None = None) -> int | None:
        path = ".".join([*map(str, section.path), key])
        return section.whole_number(key, minimum, DEFAULTS.get(path), maximum)

    def _flag(self, path: str, default: bool = False) -> bool:
        section, key = self.inner(path)
        return section.flag(key, default)

    def _mode(self) -> str:
        for name in ("fully_async", "one_step_off"):
            if name in self.program:
                return name
        rollout = self.root.below("rollout").values  # only configs of asynchronous trainers have it
        if rollout and "async_training" in self.root:
            return "fully_async"
        if "nnodes" in rollout or "n_gpus_per_node" in rollout:
            return "one_step_off"
        trainer = self.root.below("trainer")
        if not trainer.flag("use_v1", True):
            return "sync"
        return trainer.below("v1").text("trainer_mode") or str(DEFAULTS["trainer.v1.trainer_mode"])

    def _settings(self, mode: str) -> dict[str, object]:
        settings: dict[str, object] = {"engines_sleep": self._engines_sleep()}
        if mode in ASYNCHRONOUS:
            settings["async_rollouts"] = True
        if mode == "fully_async":
            settings["async_generation_ratio"] = self._lag()
        in_loss, in_reward = (
            self._coefficient(key) if self._flag(switch) else None
            for switch, key in (
                ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"),
                ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
            )
        )
        prompt = first_number((self.root.below("data"), "max_prompt_length"))
        policy_loss = self.root.below("actor_rollout_ref", "actor", "policy_loss")
        is_gspo = self._estimator() == "grpo" and policy_loss.values.get("loss_mode") == "gspo"
        estimator = "gspo" if is_gspo else self._estimator()
        return settings | algorithm_of(self.notation, estimator, in_loss, in_reward, prompt)

    def _engines_sleep(self) -> bool:
        """Return True if engines on the learner's GPUs sleep; verl never lets those on GPUs of their own sleep."""
        sections = {"rollout": self.root.below("actor_rollout_ref"), "reward": self._reward_section()}
        beside = (section for name, section in sections.items() if self.devices_of(name) & self.devices_of("actor"))
        engines = next(beside, None)
        return engines is not None and engines.below("rollout").flag("free_cache_engine", True)

    def _lag(self) -> float:
        """Steps that samples of fully_async may be behind.

        Engines get weights every trigger_parameter_sync_step steps, and until then may generate samples for these
        steps and for staleness_threshold times as many.
        """
        training = self.root.below("async_training")
        more = training.number("staleness_threshold")
        steps = training.whole_number("trigger_parameter_sync_step", 1)
        more = float(DEFAULTS["async_training.staleness_threshold"]) if more is None else more
        steps = steps or int(DEFAULTS["async_training.trigger_parameter_sync_step"])
        return round(steps * (1 + more) - 1, 6)

    def _coefficient(self, path: str) -> object:
        section, key = self.inner(path)
        value = section.values.get(key)
        return DEFAULTS[path] if value is None else value

    def _estimator(self) -> str:
        return self.root.below("algorithm").text("adv_estimator") or str(DEFAULTS["algorithm.adv_estimator"])

    # --- learner

    def _strategy(self, part: Section, default: str | None = None) -> str:
        """Training backend of a model: from its own section, else `model_engine` of the job."""
        written, engine = part.text("strategy"), first_text((self.root, "model_engine"))
        return written or default or engine or str(DEFAULTS["actor_rollout_ref.actor.strategy"])

    def _state(self, part: Section, strategy: str) -> Section:
        """The section of a model's engine: its sizes, and what is offloaded."""
        if strategy == "megatron":
            return part.below("megatron")
        if part.path == ("critic",):
            return part.below("fsdp") if "fsdp" in part else part.below("model", "fsdp_config")
        return part.below("fsdp_config")

    def _sizes(self, part: Section, strategy: str, default: ParallelSizes) -> ParallelSizes:
        """The parallel sizes of a model; those that are not written are the default's."""
        state = self._state(part, strategy)
        if strategy == "megatron":
            return megatron_sizes(state, default=default)
        size = state.whole_number("fsdp_size", -1, -1) or -1
        return ParallelSizes(context=self._ulysses(part, state, default), shard=size if size > 0 else None)

    def _ulysses(self, part: Section, state: Section, default: ParallelSizes) -> int:
        """Ulysses sequence parallel size, beside FSDP."""
        key = "ulysses_sequence_parallel_size"
        written = next((one for one in (part, state) if one.values.get(key) not in (None, 1)), part)
        return written.whole_number(key, 1, default.context) or 1

    def _lora_rank(self, model: Section) -> int | None:
        rank = first_number((model, "lora_rank"), (model.below("lora"), "rank"))
        return int(rank) if rank else None

    def _tokens(self, part: Section, sizes: ParallelSizes) -> int | None:
        """Tokens of a micro-batch of the actor or critic in `part`."""
        per_gpu = "ppo_max_token_len_per_gpu"
        size, tokens = (first_number((part, key)) for key in ("ppo_micro_batch_size_per_gpu", per_gpu))
        is_dynamic = part.flag("use_dynamic_bsz", self._flag("actor_rollout_ref.actor.use_dynamic_bsz"))
        if size and not is_dynamic:
            lengths = (DEFAULTS["data.max_prompt_length"], DEFAULTS["data.max_response_length"])
            return int(size) * (self._sequence() or sum(lengths))
        if is_dynamic and not tokens:
            tokens = DEFAULTS[".".join([*map(str, part.path), per_gpu])]
        return int(tokens) * sizes.context if tokens else None

    def _model(self, part: Section, model: Section, path: str | None, strategy: str, sizes: ParallelSizes) -> ModelUse:
        """Model of the actor or the critic; a critic without offloads of its own has the actor's."""
        actor = self.root.below("actor_rollout_ref", "actor")
        states = [self._state(one, strategy).values for one in (part, actor)]
        names = {"param_offload": "weight", "grad_offload": "grad", "optimizer_offload": "optimizer"}
        written = {key: [one[key] for one in states if one.get(key) is not None] for key in names}
        return ModelUse(
            path,
            read_model_config(path),
            sharding=Sharding.OPTIMIZER if strategy == "megatron" else Sharding.FULL,
            strategy=strategy,
            offloads=tuple(names[key] for key, found in written.items() if found[:1] == [True]),
            lora_rank=self._lora_rank(model),
            tokens=self._tokens(part, sizes),
            sequence=self._sequence(),
            recomputes=model.flag("enable_gradient_checkpointing", True),
        )

    def _sequence(self) -> int | None:
        data = self.root.below("data")
        names = ("max_prompt_length", "max_response_length")
        lengths = [first_number((data, name)) for name in names]
        if not any(lengths):
            return None
        return int(sum(length or DEFAULTS[f"data.{name}"] for name, length in zip(names, lengths, strict=True)))

    def _path(self) -> str | None:
        return first_text((self.root.below("actor_rollout_ref", "model"), "path"))

    def _learner(self, pool: Sequence[int]) -> None:
        actor, policy = (self.root.below("actor_rollout_ref", name) for name in ("actor", "model"))
        strategy = self._strategy(actor)
        sizes = self._sizes(actor, strategy, ParallelSizes())
        where = self.place("trainer.n_gpus_per_node")
        model = self._model(actor, policy, self._path(), strategy, sizes)
        check_divides(sizes, len(pool), where, self.root)
        check_expert_parts(sizes, len(pool), where, actor)
        is_own = self._mode() != "fully_async" and (not self.program or bool(OWN_VERL.fullmatch(self.program)))
        check_learner(self.root, len(pool), strategy, sizes, is_own)
        devices = DeviceList(pool, 1)
        self.add("actor", "actor_rollout_ref.actor", where, devices, Role.LEARNER, sizes, model)
        adapter = first_text((policy, "lora_adapter_path"))
        uses_kl = self._flag("actor_rollout_ref.actor.use_kl_loss") or self._flag("algorithm.use_kl_in_reward")
        if uses_kl and not model.lora_rank and not adapter:
            ref = self.root.below("actor_rollout_ref", "ref")
            own = self._strategy(ref, strategy)
            scoring = self._sizes(ref, own, sizes)
            frozen = ModelUse(
                model.path,
                model.config,
                sharding=Sharding.OPTIMIZER if own == "megatron" else Sharding.FULL,
                strategy=own,
                sequence=model.sequence,
            )
            if scoring.model != sizes.model:
                self._check(scoring, pool, ref, "reference")
            self.add("reference", "actor_rollout_ref.ref", where, devices, Role.SCORER, scoring, frozen)
        critic = self.root.below("critic")
        has_critic = critic.get("enable")
        if has_critic is True or (has_critic is None and self._estimator() == "gae"):
            path = first_text((critic.below("model"), "path")) or model.path
            own = self._strategy(critic)
            valuing = self._sizes(critic, own, ParallelSizes())
            value = self._model(critic, critic.below("model"), path, own, valuing)
            self._check(valuing, pool, critic, "critic")
            self.add("critic", "critic", where, devices, Role.LEARNER, valuing, value)

    def _check(self, sizes: ParallelSizes, pool: Sequence[int], part: Section, what: str) -> None:
        """Check that the sizes of a model beside the actor divide the pool; errors are at the first size above 1."""
        place, section = self.place("trainer.n_gpus_per_node"), ".".join(map(str, part.path))
        above_one = (name for name in ("tensor", "pipeline", "context") if getattr(sizes, name) > 1)
        where = next((size_place(place, section, name) for name in above_one), place)
        check_divides(sizes, len(pool), where, self.root, what=what)
        check_expert_parts(sizes, len(pool), place, part, what)

    # --- engines

    def _gpus(self) -> Where:
        return self.place("trainer.n_gpus_per_node")

    def _rollout(self, pools: Mapping[str, Pool], mode: str) -> None:
        section = self.root.below("actor_rollout_ref", "rollout")
        size, sizes = engine_size(section, self.root)
        check_engine(section)
        where = section.where("tensor_model_parallel_size")
        devices: list[int] = []
        training = self.root.below("async_training")
        lends = training.flag("use_dynamic_resource_scheduling") or training.flag("use_trainer_do_validate")
        if mode not in ("fully_async", "one_step_off") or lends:
            devices += cut_pool(pools["trainer"], size, section, where, self.root, self._gpus())
        of_pool = section if mode == "separate_async" else self.root.below("rollout")
        own = standalone(of_pool, section, size, pools.get("rollout"), self.root)
        if mode in ASYNCHRONOUS and not own and not lends and not self.root.findings.has_errors:
            self.root.findings.error(
                "RST-N058",
                section.where("nnodes") if mode == "separate_async" else self.place("rollout.nnodes"),
                "gives the engines no nodes of their own",
                f"{mode} generates while it learns, and needs engines beside the trainer's nodes",
                "write a number of nodes above 0",
            )
        if devices or own:
            model = ModelUse(
                self._path(),
                read_model_config(self._path()),
                memory_fraction=fraction_of_device(section, "gpu_memory_utilization")
                or float(DEFAULTS["actor_rollout_ref.rollout.gpu_memory_utilization"]),
                strategy=section.text("name"),
                sequence=self._sequence(),
            )
            requested = DeviceList([*devices, *own], size)
            self.add("rollout", "actor_rollout_ref.rollout", where, requested, Role.ENGINE, sizes, model)

    def _reward_section(self) -> Section:
        section = self.root.below("reward", "reward_model")
        return section if "enable" in section else self.root.below("reward_model")

    def _reward(self, pools: Mapping[str, Pool]) -> None:
        section = self._reward_section()
        if not section.flag("enable"):
            return
        engine = section.below("rollout")
        size, sizes = engine_size(engine, self.root)
        where = section.where("enable")
        if section.flag("enable_resource_pool"):
            devices = standalone(section, engine, size, pools.get("reward"), self.root)
        else:
            key = engine.where("tensor_model_parallel_size")
            devices = cut_pool(pools["trainer"], size, engine, key, self.root, self._gpus(), "reward engine")
        if devices:
            path = first_text((section, "model_path"), (section.below("model"), "path"))
            fraction = fraction_of_device(engine, "gpu_memory_utilization")
            model = ModelUse(path, read_model_config(path), memory_fraction=fraction)
            self.add(
                "reward",
                ".".join(map(str, section.path)),
                where,
                DeviceList(devices, size),
                Role.ENGINE,
                sizes,
                model,
            )

    def _teachers(self, pool: Pool | None) -> None:
        if pool is None:
            return
        section = self.root.below("distillation")
        models = section.below("teacher_models")
        names = [str(name) for name, value in models.values.items() if isinstance(value, Mapping)]
        single = section.below("teacher_model")
        teachers = [(name, models.below(name)) for name in names] or [(TEACHER, single)]
        left: Sequence[int] = pool.devices
        for name, teacher in teachers:
            tensor = teacher.below("inference").whole_number("tensor_model_parallel_size", 1, 1) or 1
            default = max(1, len(left) // tensor) if len(teachers) == 1 else 1
            replicas = teacher.whole_number("num_replicas", 1, default) or 1
            if replicas * tensor > len(left) and "num_replicas" in teacher:
                self.root.findings.error(
                    "RST-N056",
                    teacher.where("num_replicas"),
                    f"is {replicas}, but the teachers' pool has {counted(len(left), 'GPU')} left for this teacher",
                    f"{replicas} replicas * {counted(tensor, 'GPU')} = {replicas * tensor}",
                    f"write num_replicas: {max(1, len(left) // tensor)}, or a larger pool",
                )
                return
            devices = engines_on(left[: replicas * tensor], tensor, section.where("nnodes"), self.root, "teacher")
            left = left[replicas * tensor :]
            if not devices:
                continue
            path = first_text((teacher, "model_path"), (teacher.below("model"), "path"))
            label = TEACHER if len(teachers) == 1 else f"{TEACHER}.{name}"
            self.add(
                label,
                ".".join(map(str, teacher.path)),
                section.where("enabled"),
                DeviceList(devices, tensor),
                Role.SCORER,
                ParallelSizes(tensor=tensor),
                ModelUse(path, read_model_config(path)),
            )
