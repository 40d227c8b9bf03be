"""NeMo-RL: YAML chains behind `examples/run_grpo.py` and its relatives.

Nodes of `cluster` are shared out in order: the learner's, those of engines that do not share them, the reward model's
and the teachers'. Critics and teachers of plain distillation run on the learner's GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.config.data import TEACHER
from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, Findings, Where, counted, remainder
from roost.config.frameworks.arguments import (
    Arguments,
    Start,
    file_option,
    find_file,
    over_file,
    read_chain,
    read_config,
    resolved_for,
)
from roost.config.frameworks.pools import Reader, check_divides, engines_on, megatron_sizes
from roost.config.frameworks.registry import Framework
from roost.config.frameworks.signs import NEMO_CONFIGS
from roost.config.job import (
    OFFLOADED_PARTS,
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
    known_count,
    read_model_config,
)
from roost.config.known_keys.tables import PLACING as FOR_PLACING, Entry
from roost.config.notations.algorithm import algorithm_of, completion_of
from roost.config.source import Section

VERSION = "NeMo-RL of 2026-08-22 (7ea279abf), examples/configs/grpo_math_1B.yaml"
DEFAULTS: Mapping[str, Any] = {
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 1,
    "policy.generation.backend": "vllm",
    "policy.generation.colocated.enabled": True,
    "teacher.num_nodes": 1,  # of each teacher with nodes of its own
    "teacher.gpus_per_node": 8,
}
ALGORITHMS = ("grpo", "ppo", "distillation")  # whose samples of a step are generated
WITHOUT_ENGINES = ("sft", "dpo", "rm")
PLACING = tuple(
    Entry(
        FOR_PLACING,
        """cluster.{num_nodes,gpus_per_node,segment_size}
        {grpo,ppo}.{async_grpo,async_ppo}.{enabled,max_trajectory_age_steps} async_rl.*
        policy.{model_name,max_total_sequence_length,train_micro_batch_size}
        policy.{automodel_cfg,dtensor_cfg,megatron_cfg}.{enabled,tensor_parallel_size,activation_checkpointing}
        policy.megatron_cfg.{tensor_model_parallel_size,pipeline_model_parallel_size,expert_model_parallel_size}
        policy.{automodel_cfg,dtensor_cfg}.{lora_cfg.enabled,lora_cfg.dim,expert_parallel_size,context_parallel_size}
        policy.megatron_cfg.{peft.enabled,peft.dim,context_parallel_size,expert_tensor_parallel_size}
        policy.{sequence_packing,dynamic_batching}.{enabled,train_mb_tokens}
        policy.generation.{backend,max_new_tokens} policy.generation.colocated.{enabled,resources.gpus_per_node}
        policy.generation.colocated.resources.num_nodes
        policy.generation.{vllm_cfg,trtllm_cfg}.{tensor_parallel_size,pipeline_parallel_size,expert_parallel_size}
        policy.generation.{vllm_cfg,trtllm_cfg}.{gpu_memory_utilization,moe_tensor_parallel_size,moe_expert_parallel_size}
        policy.generation.sglang_cfg.{gpus_per_server,mem_fraction_static,tp_size}
        policy.generation.sglang_cfg.sglang_server_config.{num_gpus,num_gpus_per_engine}
        env.reward_model.{model_name,resources.gpus_per_node,resources.num_nodes}
        env.reward_model.{automodel_cfg,dtensor_cfg}.{tensor,context}_parallel_size
        env.nemo_gym.num_gpu_nodes data.{train,validation,default}.env_name data.env_name
        value.model_name value.{automodel_cfg,dtensor_cfg,megatron_cfg}.{enabled,*_parallel_size}
        teacher.model_name teacher.{automodel_cfg,dtensor_cfg,megatron_cfg}.{enabled,*_parallel_size} teacher teachers
        on_policy_distillation.{enabled,teacher_model_by_agent_name.*,deduplicate_shared_teacher_checkpoints}
        on_policy_distillation.non_colocated_teachers.*""",
    ).patterns()
)


def with_config_file(start: Start, findings: Findings) -> Arguments:
    """The overrides over the config that `--config` names, or over the program's own."""
    arguments = start.arguments
    if "--config" in arguments.options:
        file = file_option("--config", arguments, start.command, findings)
    else:
        file = _own_config(start, findings)
    source = read_config(file, start.command, findings) if file is not None else None
    source = read_chain(source, findings) if source is not None else None
    if source is not None:
        arguments = over_file(source, arguments)
    arguments.values = resolved_for(arguments.values, start.command)
    return arguments


def _own_config(start: Start, findings: Findings) -> Path | None:
    """The config beside the program, its default; None, with a finding, if it is missing."""
    path = Path(start.program)
    own = path.parent / "configs" / NEMO_CONFIGS.get(path.stem, "grpo_math_1B.yaml")
    file = find_file(str(own), start.command)
    if file is None:
        findings.error(
            "RST-N060",
            Where(*start.command.words[start.at].position),
            f"{own}, which this program takes by itself, is not here; what it says about placement is not known",
            fix="plan from a checkout of NeMo-RL, or give --config",
        )
    return file


def read_nemo(root: Section, notation: Notation) -> Job:
    """Read the config of a NeMo-RL job."""
    return _Nemo(root, notation).job()


FRAMEWORK = Framework(read_nemo, PLACING, base=with_config_file)


@dataclass(frozen=True, slots=True)
class _Teacher:
    """A teacher on nodes of its own."""

    alias: str
    model: str | None
    nodes: int
    gpus: int
    sizes: ParallelSizes


@dataclass(slots=True)
class _Nemo(Reader):
    width: int = 1  # GPUs of a node

    def job(self) -> Job:
        cluster = self.root.below("cluster")
        nodes = cluster.whole_number("num_nodes", 1, int(DEFAULTS["cluster.num_nodes"]), MAX_NODES) or 1
        self.width = self._gpus(cluster, int(DEFAULTS["cluster.gpus_per_node"]))
        for key in ("num_nodes", "gpus_per_node"):
            if cluster.values.get(key) is None:
                self.root.findings.warn(
                    "RST-N070",
                    cluster.where(key),
                    f"is missing; planned with {DEFAULTS[f'cluster.{key}']}",
                    f"default of {VERSION}",
                    f"write {cluster.spell(key, 1)}",
                )
        if cluster.values.get("segment_size") is not None:
            why = "it keeps nodes together that are near each other, and the plan only numbers nodes"
            cluster.findings.warn(
                "RST-T014", cluster.where("segment_size"), "is not followed", why, "see NeMo-RL's log"
            )
        reward_nodes, reward_gpus = self._reward_size()
        teachers = list(self._own_teachers())
        policy = nodes if nodes == 1 else nodes - reward_nodes
        policy -= sum(teacher.nodes for teacher in teachers)
        if policy < 1:
            self.does_not_fit(
                cluster.where("num_nodes"),
                f"leaves no node for the learner: {nodes} - {nodes - policy}",
                f"the reward model takes {reward_nodes if nodes > 1 else 0}, teachers "
                f"{sum(teacher.nodes for teacher in teachers)}",
                f"write num_nodes: {nodes - policy + 1} or more",
            )
            policy = 1
        beside = reward_gpus if nodes == 1 else 0  # GPUs of a reward model on the learner's node
        learner, engines = self._shared_out(policy, beside)
        self._learner(learner)
        self._engines(engines)
        after = policy
        if reward_nodes:
            start = self.width - beside if nodes == 1 else policy * self.width
            self._reward(self._devices(1 if nodes == 1 else reward_nodes, reward_gpus, start))
            after += 0 if nodes == 1 else reward_nodes
        for teacher in teachers:
            self._teacher(teacher, self._devices(teacher.nodes, teacher.gpus, after * self.width))
            after += teacher.nodes
        self._notes(nodes)
        return self.as_job(nodes, self.width, self._settings())

    def _gpus(self, section: Section, default: int) -> int:
        return section.whole_number("gpus_per_node", 1, default, MAX_ACCELERATORS_PER_NODE) or 1

    def _devices(self, nodes: int, gpus: int, start: int) -> list[int]:
        """The first GPUs of some nodes in a row."""
        return [start + node * self.width + gpu for node in range(nodes) for gpu in range(min(gpus, self.width))]

    # --- sharing out

    def _generation(self) -> Section | None:
        generation = self.root.below("policy", "generation")
        trains_only = any(name in self.root for name in WITHOUT_ENGINES) or "teachers" in self.root
        return None if trains_only or not generation.values else generation

    def _is_shared(self) -> bool:
        generation = self._generation()
        return generation is None or generation.below("colocated").flag("enabled", True)

    def _shared_out(self, policy: int, beside: int) -> tuple[list[int], list[int]]:
        """The GPUs of the learner and of the engines."""
        free = self.width - beside
        if free < 1:
            where = self.root.where("env", "reward_model", "resources", "gpus_per_node")
            self.does_not_fit(
                where,
                f"leaves the learner no GPU: {self.width} - {beside}",
                "all are on one node",
                f"write cluster.gpus_per_node: {beside + 1} or more",
            )
            free = 1
        if self._is_shared():
            devices = self._devices(policy, free, 0)
            return devices, devices
        resources = self.root.below("policy", "generation", "colocated", "resources")
        gpus = resources.whole_number("gpus_per_node", 1, None, MAX_ACCELERATORS_PER_NODE)
        nodes = resources.whole_number("num_nodes", 1, None, MAX_NODES)
        if policy == 1:
            return self._split_node(resources, gpus, nodes, free)
        if nodes is None or gpus != self.width:
            key, value = ("num_nodes", 1) if nodes is None else ("gpus_per_node", self.width)
            self.does_not_fit(
                resources.where(key),
                "is missing" if resources.values.get(key) is None else f"is {gpus}, but engines take whole nodes",
                f"engines with GPUs of their own take whole nodes of the {policy}, with {self.width} each",
                f"write {resources.spell(key, value)}",
            )
            nodes = nodes or 1
        if nodes >= policy:
            self.does_not_fit(
                resources.where("num_nodes"),
                f"is {nodes}, which leaves the learner none of {counted(policy, 'node')}",
                "engines and learner do not share nodes",
                f"write num_nodes: {policy - 1} or less, or cluster.num_nodes: {nodes + 1} or more",
            )
            nodes = policy - 1
        own = policy - nodes
        return self._devices(own, self.width, 0), self._devices(nodes, self.width, own * self.width)

    def _split_node(
        self, resources: Section, gpus: int | None, nodes: int | None, free: int
    ) -> tuple[list[int], list[int]]:
        """Engines and learner on one node."""
        if gpus is None or gpus >= free:
            has = f"is {gpus}, but the node has {free} for engines and learner" if gpus else "is missing"
            fix = f"write {resources.spell('gpus_per_node', free - 1)}" if free > 1 else "give the job more GPUs"
            self.does_not_fit(resources.where("gpus_per_node"), has, "engines have GPUs of their own on that node", fix)
            gpus = max(1, free - 1)
        if nodes is not None and nodes > 1:
            self.does_not_fit(
                resources.where("num_nodes"),
                f"is {nodes}, but the learner and the engines have one node",
                "",
                f"write {resources.spell('num_nodes', 1)}",
            )
        own = max(1, free - gpus)
        return list(range(own)), list(range(own, max(own + 1, free)))

    # --- learner

    def _sizes(self, section: Section) -> ParallelSizes:
        megatron = section.below("megatron_cfg")
        if megatron.flag("enabled"):
            return megatron_sizes(megatron)
        plain = section.below(_plain(section))
        return ParallelSizes(
            plain.whole_number("tensor_parallel_size", 1, 1) or 1,
            context=plain.whole_number("context_parallel_size", 1, 1) or 1,
            expert=plain.whole_number("expert_parallel_size", 1, 1) or 1,
        )

    def _model(self, section: Section, trains: bool = True) -> ModelUse:
        path = first_text((section, "model_name"))
        is_megatron = section.below("megatron_cfg").values.get("enabled") is True
        backend = section.below("megatron_cfg" if is_megatron else _plain(section))
        adapter = backend.below("peft" if is_megatron else "lora_cfg")
        rank = first_number((adapter, "dim")) if adapter.values.get("enabled") is True else None
        batching = (section.below(name) for name in ("sequence_packing", "dynamic_batching"))
        packed = next((part for part in batching if part.values.get("enabled") is True), None)
        sequence = first_number((section, "max_total_sequence_length"))
        tokens = first_number((packed, "train_mb_tokens")) if packed is not None else None
        if tokens is None and sequence:
            tokens = sequence * (first_number((section, "train_micro_batch_size")) or 1)
        offloads = OFFLOADED_PARTS if trains and self._generation() is not None and self._is_shared() else ()
        return ModelUse(
            path,
            read_model_config(path),
            sharding=Sharding.OPTIMIZER if is_megatron else Sharding.FULL,
            strategy="megatron" if is_megatron else "dtensor",
            recomputes=backend.values.get("activation_checkpointing") is True,
            offloads=offloads,
            lora_rank=int(rank) if rank else None,
            tokens=int(tokens) if tokens else None,
            sequence=int(sequence) if sequence else None,
        )

    def _learner(self, devices: Sequence[int]) -> None:
        policy = self.root.below("policy")
        self._on_gpus("actor", policy, devices, Role.LEARNER)
        self._check_batch(policy, len(devices))
        if self.root.below("value").values:
            self._on_gpus("critic", self.root.below("value"), devices, Role.LEARNER)
        if self.root.below("teacher").values:
            self._on_gpus(TEACHER, self.root.below("teacher"), devices, Role.SCORER)
        several = self.root.mappings("teachers", "write - model_name: some/model") if "teachers" in self.root else []
        for index, section in enumerate(several):
            name = TEACHER if len(several) == 1 else f"{TEACHER}.{index}"
            self._on_gpus(name, section, devices, Role.SCORER)

    def _check_batch(self, policy: Section, gpus: int) -> None:
        """Check that a step has whole batches, and a batch equally many samples for every replica."""
        key = "train_global_batch_size"
        batch, parts = known_count(policy, key), self._sizes(policy).model
        names = ("num_prompts_per_step", "num_generations_per_prompt")
        sections = [section for name in ALGORITHMS if names[0] in (section := self.root.below(name))]
        if not batch or gpus % parts or len(sections) != 1:
            return
        replicas, where = gpus // parts, policy.where(key)
        prompts, samples = (known_count(sections[0], name) for name in names)
        if batch % replicas:
            what = f"is {counted(batch, 'sample')}, which NeMo-RL cannot divide by {counted(replicas, 'replica')}"
            why = f"{remainder(batch, replicas)}; {counted(gpus, 'GPU')} / {parts} for each replica = {replicas}"
            self.root.findings.error("RST-N088", where, what, why, f"write a multiple of {replicas}")
        elif prompts * samples % batch:
            what = f"is {counted(batch, 'sample')}, and a step has {prompts} * {samples}"
            why = f"{remainder(prompts * samples, batch)}; NeMo-RL ends with an assertion"
            fix = f"write a number that divides {prompts * samples}"
            self.root.findings.error("RST-N088", where, what, why, fix)

    def _on_gpus(self, name: str, section: Section, devices: Sequence[int], role: Role) -> None:
        """One process per GPU."""
        sizes = self._sizes(section)
        where = section.where("megatron_cfg" if section.below("megatron_cfg").flag("enabled") else _plain(section))
        check_divides(sizes, len(devices), where, self.root)
        written = ".".join(map(str, section.path))
        model = self._model(section, role is Role.LEARNER)
        self.add(name, written, where, DeviceList(devices, 1), role, sizes, model)

    # --- engines

    def _engine_sizes(self, generation: Section) -> tuple[ParallelSizes, Where, str | None]:
        """Sizes of an engine, the position of its size, and the key of its memory fraction."""
        backend = generation.text("backend") or str(DEFAULTS["policy.generation.backend"])
        if backend == "sglang":
            section = generation.below("sglang_cfg")
            server = section.below("sglang_server_config")
            size = server.whole_number("num_gpus_per_engine", 1) or section.whole_number("gpus_per_server", 1)
            size = size or section.whole_number("tp_size", 1, 1) or 1
            return ParallelSizes(tensor=size), section.where(), "mem_fraction_static"
        if backend == "megatron":
            section = self.root.below("policy", "megatron_cfg")
            sizes = megatron_sizes(section)
            return ParallelSizes(sizes.tensor, sizes.pipeline, expert=sizes.expert), section.where(), None
        section = generation.below("trtllm_cfg" if backend == "trtllm" else "vllm_cfg")
        tensor = section.whole_number("tensor_parallel_size", 1, 1) or 1
        expert = section.whole_number("expert_parallel_size", 1, 1) or 1
        if expert > 1 and expert % tensor:
            self.root.findings.error(
                "RST-N056",
                section.where("expert_parallel_size"),
                f"is {expert}, which is not a multiple of the tensor size {tensor}",
                "experts are split over whole engines",
                f"write {section.spell('expert_parallel_size', expert // tensor * tensor + tensor)}",
            )
        sizes = ParallelSizes(tensor, section.whole_number("pipeline_parallel_size", 1, 1) or 1, expert=expert)
        return sizes, section.where("tensor_parallel_size"), "gpu_memory_utilization"

    def _engines(self, devices: Sequence[int]) -> None:
        generation = self._generation()
        if generation is None:
            name = next((one for one in ("grpo", "ppo") if one in self.root), None)
            if name is not None:
                where, why = self.root.where("policy", "generation"), f"{name} generates"
                self.does_not_fit(where, "is missing, so that there are no engines", why, "write policy.generation")
            return
        sizes, where, fraction_key = self._engine_sizes(generation)
        size = sizes.tensor * sizes.pipeline
        per_node = min(len(devices), self.width)
        if len(devices) >= size and (len(devices) % size or (size <= per_node and per_node % size)):
            rest, of = (len(devices) % size, len(devices)) if len(devices) % size else (per_node % size, per_node)
            self.root.findings.error(
                "RST-N056",
                where,
                f"makes engines of {counted(size, 'GPU')}, which do not divide the {of} of {self._pool(of, devices)}",
                f"{of} % {size} = {rest}",
                f"choose a size that divides {of}",
            )
        used = engines_on(devices[: len(devices) - len(devices) % size or len(devices)], size, where, self.root)
        if not used:
            return
        backend = generation.text("backend") or str(DEFAULTS["policy.generation.backend"])
        section = generation.below(f"{backend}_cfg" if backend != "dynamo" else "vllm_cfg")
        fraction = fraction_of_device(section, fraction_key) if fraction_key else None
        path = first_text((self.root.below("policy"), "model_name"))
        model = ModelUse(path, read_model_config(path), memory_fraction=fraction, strategy=backend)
        requested = DeviceList(used, size)
        self.add("rollout", "policy.generation", generation.where(), requested, Role.ENGINE, sizes, model)

    def _pool(self, count: int, devices: Sequence[int]) -> str:
        return "all engines" if count == len(devices) else "a node"

    # --- reward model and teachers

    def _reward_size(self) -> tuple[int, int]:
        """Nodes of the reward model and GPUs on each; 0 if no dataset uses it."""
        if "reward_model" not in set(_environments(self.root.below("data"))):
            return 0, 0
        resources = self.root.below("env", "reward_model", "resources")
        gpus = self._gpus(resources, 1)
        if gpus > self.width:
            self.does_not_fit(
                resources.where("gpus_per_node"),
                f"is {gpus}, but nodes have {self.width}",
                "the reward model's processes on a node must fit it",
                f"write {resources.spell('gpus_per_node', self.width)}",
            )
        return resources.whole_number("num_nodes", 1, 1, MAX_NODES) or 1, gpus

    def _reward(self, devices: Sequence[int]) -> None:
        section = self.root.below("env", "reward_model")
        self._on_gpus("reward", section, devices, Role.SCORER)

    def _own_teachers(self) -> Iterator[_Teacher]:
        """Teachers on nodes of their own; those with the same model are one."""
        section = self.root.below("on_policy_distillation")
        own = section.below("non_colocated_teachers")
        if not (section.flag("enabled") and own.flag("enabled")):
            return
        seen: set[str] = set()
        for alias, model in section.below("teacher_model_by_agent_name").values.items():
            if section.flag("deduplicate_shared_teacher_checkpoints", True) and str(model) in seen:
                continue
            seen.add(str(model))
            special = own.below("teacher_overrides", str(alias))
            common = own.below("default_teacher_cfg")
            chosen = Section({**common.values, **special.values}, common.path, self.root.source, self.root.findings)
            gpus = self._gpus(chosen, int(DEFAULTS["teacher.gpus_per_node"]))
            if gpus > self.width:
                self.does_not_fit(
                    chosen.where("gpus_per_node"),
                    f"is {gpus} for the teacher {alias}, but nodes have {self.width}",
                    "a teacher's processes on a node must fit it",
                    f"write gpus_per_node: {self.width}",
                )
            nodes = chosen.whole_number("num_nodes", 1, int(DEFAULTS["teacher.num_nodes"]), MAX_NODES) or 1
            yield _Teacher(str(alias), str(model) if model else None, nodes, gpus, megatron_sizes(chosen))

    def _teacher(self, teacher: _Teacher, devices: Sequence[int]) -> None:
        section = self.root.below("on_policy_distillation", "non_colocated_teachers")
        where = section.where("default_teacher_cfg")
        sizes = teacher.sizes
        check_divides(sizes, len(devices), where, self.root)
        model = ModelUse(
            teacher.model, read_model_config(teacher.model), sharding=Sharding.OPTIMIZER, strategy="megatron"
        )
        name = f"{TEACHER}.{teacher.alias}"
        written = f"on_policy_distillation.teacher_model_by_agent_name.{teacher.alias}"
        self.add(name, written, where, DeviceList(devices, 1), Role.SCORER, sizes, model)

    # --- findings and settings

    def _asynchronous(self) -> list[Section]:
        """Sections that make the job asynchronous."""
        names = (("grpo", "async_grpo"), ("ppo", "async_ppo"), ("ppo", "async_grpo"))
        return [section for name in names if (section := self.root.below(*name)).flag("enabled")]

    def _is_asynchronous(self) -> bool:
        return "async_rl" in self.root or bool(self._asynchronous())

    def _settings(self) -> dict[str, object]:
        settings: dict[str, object] = {"engines_sleep": self._is_shared()}
        if self._is_asynchronous():
            settings["async_rollouts"] = True
        for section in self._asynchronous():
            settings["async_generation_ratio"] = section.whole_number("max_trajectory_age_steps", 1, 1)
        name = next((one for one in ("ppo", "grpo") if one in self.root), None)
        section = self.root.below(name, "adv_estimator") if name else self.root
        estimator = first_text((section, "name")) if name else None
        estimator = estimator or ({"ppo": "gae", "grpo": "grpo"}[name] if name else None)
        whitens = (estimator == "gae" and section.values.get("normalize_advantages") is True) or None
        penalty = first_number((self.root.below("loss_fn"), "reference_policy_kl_penalty")) or None
        prompt = first_number((self.root.below("data"), "max_input_seq_length"))
        policy = self.root.below("policy")
        response, sequence = (
            first_number(key)
            for key in ((policy.below("generation"), "max_new_tokens"), (policy, "max_total_sequence_length"))
        )
        settings |= completion_of(prompt, response, sequence)
        return settings | algorithm_of(self.notation, estimator, penalty, None, prompt, whitens)

    def _notes(self, nodes: int) -> None:
        if self._is_asynchronous() and self._generation() is not None and self._is_shared():
            self.root.findings.error(
                "RST-N058",
                self.root.where("policy", "generation", "colocated"),
                "gives the engines no nodes of their own",
                "an asynchronous job generates while it learns",
                "write policy.generation.colocated.enabled: false, and its resources",
            )
        name = re.search(r"-(\d{1,4})n(\d{1,2})g(?![a-z0-9])", Path(self.root.source.file or "").stem)
        if name is not None and (int(name[1]), int(name[2])) != (nodes, self.width):
            self.root.findings.warn(
                "RST-N071",
                self.root.where("cluster"),
                f"says {nodes} x {self.width}, but the name of the file says {name[1]} x {name[2]}",
                "recipes of NeMo-RL carry nodes and GPUs per node in their names",
                "correct one of them",
            )
        gym = first_number((self.root.below("env", "nemo_gym"), "num_gpu_nodes"))
        if gym:
            self.root.findings.note(
                "RST-N072",
                self.root.where("env", "nemo_gym", "num_gpu_nodes"),
                f"NeMo-Gym takes {counted(int(gym), 'node')} with GPUs beside cluster.num_nodes, which are not planned",
                fix=f"have {nodes + int(gym)} nodes",
            )
        if nodes > 1:
            self.root.findings.note(
                "RST-N059",
                self.root.where("cluster", "num_nodes"),
                "the order of the nodes is not fixed: Ray chooses one for each placement group",
                "planned are the learner's nodes first, then those of engines, reward model and teachers",
                "compare with the nodes that NeMo-RL prints, where the order matters",
            )


def _plain(section: Section) -> str:
    """The key of a learner without Megatron: automodel_cfg, or dtensor_cfg in older versions."""
    return "automodel_cfg" if "automodel_cfg" in section.values else "dtensor_cfg"


def _environments(data: Section) -> Iterator[str]:
    """The environments that datasets name."""
    for part in (data.values, *(data.values.get(name) for name in ("train", "validation", "default"))):
        for dataset in part if isinstance(part, list) else [part]:
            if isinstance(dataset, Mapping) and isinstance(dataset.get("env_name"), str):
                yield dataset["env_name"]
