"""AReaL: YAML configs with a `backend` for each role, or one `allocation_mode` for all.

Roles are created in order: actor, critic, reference, teacher, then the engines; each takes the next GPUs, or those of
the role that it is colocated with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.config.data import TEACHER
from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, Findings, Where, counted, shown
from roost.config.frameworks.allocation import Allocation, AllocationError, parse_allocations, parse_backend
from roost.config.frameworks.arguments import (
    Arguments,
    Start,
    file_option,
    over_file,
    read_config,
    resolved_for,
    warn_defaults,
)
from roost.config.frameworks.pools import Reader
from roost.config.frameworks.registry import Framework
from roost.config.job import (
    OFFLOADED_PARTS,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    Role,
    Sharding,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
)
from roost.config.known_keys.tables import PLACING as FOR_PLACING, Entry
from roost.config.notations.algorithm import (
    BASELINE,
    LEAVES_OUT,
    NORMALISED,
    STD,
    WEIGHT_UPDATE,
    WHITEN,
    algorithm_of,
    completion_of,
)
from roost.config.source import Section
from roost.config.train_choices import RewardScope

VERSION = "AReaL of 2026-08-22 (cbff54d64)"
DEFAULTS: Mapping[str, Any] = {
    "cluster.n_gpus_per_node": 8,
    "actor.kl_ctl": 0.1,
    "actor.weight_update_mode": "xccl",
    "rollout.max_head_offpolicyness": 0,
}
ROLES = {"ref": "reference"}  # names of roles here, where they differ
PLACING = tuple(
    Entry(
        FOR_PLACING,
        """allocation_mode enable_offload cluster.{n_nodes,n_gpus_per_node} scheduler.type
        {actor,critic,ref,rollout}.{backend,path,offload} {actor,critic,ref,rollout}.scheduling_strategy.*
        actor.{kl_ctl,weight_update_mode,_version,use_lora,lora_rank,gradient_checkpointing} actor.mb_spec.*
        actor.{reward_norm,adv_norm}.{mean_level,std_level,mean_leave1out,group_size} actor.max_new_tokens
        gconfig.{max_new_tokens,max_tokens} train_dataset.max_length
        rollout.{max_head_offpolicyness,_version} sglang.mem_fraction_static vllm.gpu_memory_utilization
        teacher.engine_type teacher.{train,rollout}.{backend,path} teacher.{train,rollout}.scheduling_strategy.*""",
    ).patterns()
)


def with_config_file(start: Start, findings: Findings) -> Arguments:
    """The overrides over the config that `--config` names."""
    file = file_option("--config", start.arguments, start.command, findings)
    source = read_config(file, start.command, findings) if file is not None else None
    if source is None:
        return start.arguments
    if source.values.get("defaults"):
        warn_defaults(source, findings)
    arguments = over_file(source, start.arguments)
    arguments.values = resolved_for(arguments.values, start.command)
    return arguments


def read_areal(root: Section, notation: Notation) -> Job:
    """Read the config of an AReaL job."""
    return _AReaL(root, notation).job()


FRAMEWORK = Framework(read_areal, PLACING, base=with_config_file)


# What happens if roles need more GPUs than there are, by scheduler type.
_WITHOUT_ROOM = {
    "local": "the local scheduler then gives some GPUs to two roles and says nothing",
    "ray": "Ray waits for GPUs that the nodes do not have",
    "slurm": "Slurm gives each role nodes of its own",
}


@dataclass(slots=True)
class _AReaL(Reader):
    devices: dict[str, Sequence[int]] = field(default_factory=dict)  # of each role, by its written name
    width: int = 8  # GPUs of a node
    free: int = 0  # the first GPU that no role has

    def job(self) -> Job:
        cluster = self.root.below("cluster")
        default = int(DEFAULTS["cluster.n_gpus_per_node"])
        self.width = cluster.whole_number("n_gpus_per_node", 1, default, MAX_ACCELERATORS_PER_NODE) or default
        written = cluster.whole_number("n_nodes", 1, None, MAX_NODES)
        if self._is_legacy():
            self._legacy()
        else:
            self._roles(written)
        needed = max(1, -(-self.free // self.width))
        scheduler = self.root.below("scheduler").text("type") or "local"
        if written is not None and self.free > written * self.width:
            self.root.findings.warn(
                "RST-N074",
                cluster.where("n_nodes"),
                f"makes {counted(written * self.width, 'GPU')}, but the roles take {self.free}",
                f"{written} x {self.width} < {self.free}; {_WITHOUT_ROOM.get(scheduler, _WITHOUT_ROOM['local'])}",
                f"write {cluster.spell('n_nodes', needed)}, or colocate roles",
            )
        if written is not None and not self.root.findings.has_errors:
            self._note_unused(cluster, written * self.width)
        return self.as_job(max(written or needed, needed), self.width, self._settings())

    def _note_unused(self, cluster: Section, gpus: int) -> None:
        """Note GPUs of the cluster that no role takes."""
        used = len({device for devices in self.devices.values() for device in devices})
        if 0 < used < gpus:
            self.root.findings.note(
                "RST-N090",
                cluster.where("n_nodes"),
                f"makes {counted(gpus, 'GPU')}, of which the roles take {used}",
                f"no role takes the other {gpus - used}",
                "write larger backends, or reserve fewer machines",
            )

    def _settings(self) -> dict[str, object]:
        settings: dict[str, object] = {"engines_sleep": self._shares_with_actor()}
        lag = self.root.below("rollout").whole_number("max_head_offpolicyness", 0)
        if lag and not self._shares_with_actor():
            settings |= {"async_rollouts": True, "async_generation_ratio": lag}
        mode = first_text((self.root.below("actor"), "weight_update_mode"))
        settings |= {WEIGHT_UPDATE: mode} if mode else {}
        names = {part.name for part in self.components}
        penalty = self._penalty() if "reference" in names else None
        prompt, response, sequence = self._lengths()
        is_rl = {"actor", "rollout"} <= names
        estimator, scopes = self._estimator(has_critic="critic" in names) if is_rl else (None, {})
        settings |= algorithm_of(self.notation, estimator, in_reward=penalty or None, prompt=prompt) | scopes
        return settings | completion_of(prompt, response, sequence)

    def _lengths(self) -> tuple[int | None, int | None, int | None]:
        """Maximum tokens of a prompt, a completion and a sequence; None if not written."""
        actor, sampling = self.root.below("actor"), self.root.below("gconfig")
        response = sampling.whole_number("max_new_tokens", 1) or actor.whole_number("max_new_tokens", 1)
        return (
            self.root.below("train_dataset").whole_number("max_length", 1),
            response,
            sampling.whole_number("max_tokens", 1),
        )

    def _estimator(self, has_critic: bool) -> tuple[str, dict[str, object]]:
        """The advantage estimator, by how rewards are normalised, and the normalisations that its name does not say.

        Without a critic AReaL's generalised advantages are the rewards.
        """
        mean, std = self._scopes("reward_norm")
        over, by = self._scopes("adv_norm")
        found: dict[str, object] = {}
        if over is by is RewardScope.BATCH:
            found[WHITEN] = True
        elif over is not RewardScope.NONE or by is not RewardScope.NONE:
            found[WHITEN] = f"{over.value}/{by.value}"  # of the mean and of the standard deviation
        leaves_one_out = self.root.below("actor", "reward_norm").flag("mean_leave1out")
        if leaves_one_out and mean is RewardScope.GROUP and not has_critic:
            name, mean = "rloo", RewardScope.NONE
        elif has_critic or leaves_one_out or (mean, std) not in NORMALISED:
            name = "gae" if has_critic else "reinforce"
        else:
            return NORMALISED[mean, std], found
        if leaves_one_out and mean is not RewardScope.NONE:
            found[LEAVES_OUT] = True
        written = {BASELINE: mean, STD: std}
        return name, found | {key: scope.value for key, scope in written.items() if scope is not RewardScope.NONE}

    def _scopes(self, key: str) -> tuple[RewardScope, RewardScope]:
        """Levels of the mean and the standard deviation of a normalisation; AReaL's default is the batch."""
        section = self.root.below("actor").mapping(key)
        if section is None:
            return RewardScope.NONE, RewardScope.NONE
        return self._scope(section, "mean_level"), self._scope(section, "std_level")

    def _scope(self, section: Section, key: str) -> RewardScope:
        word = section.text(key) if key in section else "batch"
        if word not in (None, "batch", "group"):
            section.error("RST-N075", key, f"is {shown(word)}", "AReaL has batch, group and null", "write one of these")
            return RewardScope.NONE
        return RewardScope(word or "none")

    def _shares_with_actor(self) -> bool:
        actor, rollout = self.devices.get("actor"), self.devices.get("rollout")
        return actor is not None and rollout is not None and bool(set(actor) & set(rollout))

    # --- allocation_mode

    def _is_legacy(self) -> bool:
        has_backends = any(self.root.below(role).values.get("backend") for role in ("actor", "rollout"))
        if has_backends and "allocation_mode" in self.root:
            self.root.findings.warn(
                "RST-N069",
                self.root.where("allocation_mode"),
                "is not used: roles have a backend each",
                "allocation_mode is the way of older versions",
                "remove it",
            )
        return not has_backends and "allocation_mode" in self.root

    def _legacy(self) -> None:
        text = self.root.text("allocation_mode")
        try:
            groups = parse_allocations(text or "")
        except AllocationError as error:
            self.root.error("RST-N075", "allocation_mode", f"{shown(text)}: {error.what}", error.why, error.fix)
            return
        where = self.root.where("allocation_mode")
        for group in groups:
            start = self._start(group[0])
            for index, one in enumerate(group):
                role = one.name or ("rollout" if one.is_engine else "actor")
                self.devices[role] = self._cut(one, start) if index == 0 else self.devices[_name(group[0])]
                self._add(role, one, where, self.root.below(role if role in self.root else "actor"))
            self.free = max(self.devices[_name(group[0])], default=self.free - 1) + 1
        actor = next((one for group in groups for one in group if _name(one) == "actor"), None)
        for name in ("critic", "ref") if actor is not None else ():
            section = self.root.below(name)
            is_started = bool(section.values) and (name == "critic" or self._starts_reference(section))
            if is_started and actor is not None and name not in self.devices:
                self.devices[name] = self.devices["actor"]
                self._add(name, actor, where, section)

    # --- roles

    def _roles(self, nodes: int | None) -> None:
        actor = self._role("actor")
        for name in ("critic", "ref"):
            section = self.root.below(name)
            if not section.values or (name == "ref" and not self._starts_reference(section)):
                continue
            self._role(name, actor)
        teacher = self.root.below(TEACHER)
        kind = "train" if teacher.text("engine_type") == "train" else "rollout"
        if teacher.values and kind == "train":
            self._role(TEACHER, None, teacher.below("train"))
        self._role("rollout", shares=self._awex_shares(actor, nodes))
        if teacher.values and kind == "rollout":
            self._role(TEACHER, None, teacher.below("rollout"))
        self._check_sharing()

    def _starts_reference(self, section: Section) -> bool:
        """Return True if the reference is started, for a KL; note one that is configured without a KL."""
        actor, coefficient = self.root.below("actor"), self._penalty()
        if isinstance(coefficient, int | float) and coefficient > 0:
            return True
        self.root.findings.note(
            "RST-N067",
            section.where(),
            "the reference is configured, but not started",
            f"actor.kl_ctl is {shown(coefficient)}, and AReaL starts it for a KL above 0 only",
            f"write {actor.spell('kl_ctl', 0.1)} if it is wanted",
        )
        return False

    def _penalty(self) -> object:
        coefficient = self.root.below("actor").get("kl_ctl")
        return DEFAULTS["actor.kl_ctl"] if coefficient is None else coefficient

    def _awex_shares(self, actor: Allocation | None, nodes: int | None) -> bool:
        """Return True if version 1 of awex puts engines on the actor's GPUs, whatever the strategies say."""
        section, rollout = self.root.below("actor"), self._parsed(self.root.below("rollout"), quietly=True)
        if actor is None or rollout is None or section.text("weight_update_mode") != "awex":
            return False
        total = actor.world + rollout.world
        is_first = (section.text("_version") or "v1") == "v1" and rollout.world == actor.world
        if not is_first or nodes is None or total <= nodes * self.width:
            return False
        strategy = self.root.below("rollout", "scheduling_strategy")
        if strategy.text("type") != "colocation":
            self.root.findings.warn(
                "RST-N068",
                section.where("weight_update_mode"),
                "is awex, so that engines share the actor's GPUs although both are to be separate",
                f"{actor.world} + {rollout.world} > {nodes} x {self.width}, and GPUs are given out again",
                "write scheduling_strategy: {type: colocation, target: actor} in rollout, to say what happens",
            )
        return True

    def _parsed(self, section: Section, quietly: bool = False) -> Allocation | None:
        text = section.values.get("backend") if quietly else section.text("backend")
        if not isinstance(text, str) or not text:
            return None
        try:
            return parse_backend(text)
        except AllocationError as error:
            if not quietly:
                section.error("RST-N075", "backend", f"{shown(text)}: {error.what}", error.why, error.fix)
            return None

    def _role(
        self, name: str, default: Allocation | None = None, section: Section | None = None, shares: bool = False
    ) -> Allocation | None:
        """Place a role; critic and reference without a backend have the actor's."""
        section = section if section is not None else self.root.below(name)
        if not section.values:
            return None
        allocation = self._parsed(section)
        if allocation is None:
            if section.values.get("backend") in (None, "") and default is None and name in ("actor", "rollout"):
                section.error("RST-N075", "backend", "is missing", "the role has no devices without it", "write it")
            allocation = default
        if allocation is None:
            return None
        strategy = section.below("scheduling_strategy")
        target = strategy.text("target") if strategy.text("type") == "colocation" else "actor" if shares else None
        where = section.where("backend")
        if target is not None:
            self.devices[name] = self._beside(allocation, ROLES.get(target, target), target, strategy)
        else:
            self.devices[name] = self._cut(allocation, self._start(allocation))
            self.free = max(self.devices[name]) + 1
        self._add(name, allocation, where, section)
        return allocation

    def _start(self, allocation: Allocation) -> int:
        """The GPU that a role begins at: of a new node under Slurm, or where a node's end would cut an engine."""
        used = self.free % self.width
        by_node = self.root.below("scheduler").text("type") == "slurm"
        if used and (by_node or used + allocation.per_process > self.width):
            return self.free + self.width - used
        return self.free

    def _cut(self, allocation: Allocation, start: int) -> list[int]:
        """The GPUs of a role; engines within a node do not reach over its end."""
        size = allocation.per_process
        if size > self.width:
            if size % self.width:
                self.root.findings.error(
                    "RST-N056",
                    self.root.where("cluster", "n_gpus_per_node"),
                    f"is {self.width}, of which an engine of {size} GPUs cannot take whole nodes",
                    f"{size} % {self.width} = {size % self.width}",
                    f"use engines whose size is a multiple of {self.width}, or divides it",
                )
            return list(range(start, start + allocation.world))
        devices: list[int] = []
        for _ in range(allocation.processes):
            if start % self.width + size > self.width:
                start += self.width - start % self.width
            devices += range(start, start + size)
            start += size
        return devices

    def _beside(self, allocation: Allocation, shown_target: str, target: str, strategy: Section) -> list[int]:
        """The GPUs of the role that another is colocated with."""
        found = self.devices.get(target)
        if found is None:
            self.root.findings.error(
                "RST-N068",
                strategy.where("target"),
                f"is {shown(target)}, which has no devices yet",
                f"roles that have: {', '.join(self.devices) or 'none'}; they are created in order",
                "name one of them" if self.devices else "write type: separation",
            )
            return self._cut(allocation, self._start(allocation))
        if allocation.world != len(found):
            self.root.findings.error(
                "RST-N066",
                strategy.where("target"),
                f"is {shown_target} with {counted(len(found), 'GPU')}, but the role takes {allocation.world}",
                "colocated roles must have as many",
                f"write a backend of {counted(len(found), 'GPU')}",
            )
        return list(found)[: allocation.world] if allocation.world <= len(found) else list(found)

    def _check_sharing(self) -> None:
        """Check that engines on the actor's GPUs have offloading, and a weight route other than xccl."""
        if not self._shares_with_actor():
            return
        mode = self.root.below("actor").text("weight_update_mode") or DEFAULTS["actor.weight_update_mode"]
        wrong = []
        if not self.root.flag("enable_offload") and mode != "awex":
            wrong.append(("enable_offload", "is not true", "write enable_offload: true"))
        if mode == "xccl":
            wrong.append(("actor", "sends weights by xccl", "write weight_update_mode: disk in actor"))
        for key, what, fix in wrong:
            self.root.error("RST-N068", key, f"{what}, but the engines share the actor's GPUs", fix=fix)

    # --- components

    def _add(self, role: str, allocation: Allocation, where: Where, section: Section) -> None:
        devices = self.devices[role]
        size = allocation.per_process
        usable = len(devices) - len(devices) % size
        if not usable:
            return
        name = ROLES.get(role, role)
        if name in (part.name for part in self.components):
            return
        kind = Role.ENGINE if allocation.is_engine else Role.LEARNER
        if name == "reference" or name.startswith(TEACHER):
            kind = Role.SCORER
        requested = DeviceList(devices[:usable], size)
        written = ".".join(map(str, section.path)) or role
        model = self._model(section, allocation, kind)
        self.add(name, written, where, requested, kind, allocation.sizes, model)

    def _model(self, section: Section, allocation: Allocation, kind: Role) -> ModelUse:
        path = first_text((section, "path"), (self.root.below("actor"), "path"))
        if allocation.is_engine:
            key = "mem_fraction_static" if allocation.backend == "sglang" else "gpu_memory_utilization"
            fraction = fraction_of_device(self.root.below(allocation.backend), key)
            return ModelUse(path, read_model_config(path), memory_fraction=fraction, strategy=allocation.backend)
        tokens = first_number((section.below("mb_spec"), "max_tokens_per_mb"))
        rank = first_number((section, "lora_rank")) if section.values.get("use_lora") is True else None
        rests = kind is Role.LEARNER and (section.values.get("offload") is True or self._is_colocated_rollout())
        return ModelUse(
            path,
            read_model_config(path),
            sharding=Sharding.OPTIMIZER if allocation.backend == "megatron" else Sharding.FULL,
            strategy=allocation.backend,
            recomputes=section.values.get("gradient_checkpointing") is True,
            offloads=OFFLOADED_PARTS if rests else (),
            lora_rank=int(rank) if rank else None,
            tokens=int(tokens) if tokens else None,
            sequence=self._lengths()[2] if kind is Role.LEARNER else None,
        )

    def _is_colocated_rollout(self) -> bool:
        return self.root.below("rollout", "scheduling_strategy").values.get("type") == "colocation"


def _name(allocation: Allocation) -> str:
    return allocation.name or ("rollout" if allocation.is_engine else "actor")
