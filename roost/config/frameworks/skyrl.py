"""SkyRL: keys `a.b=c` behind `skyrl.train.entrypoints.main_base` and its relatives.

With `colocate_all` the policy, the reference, the critic and the engines share one group of GPUs. Otherwise the policy
and the reference share the policy's nodes, and the critic and the engines have GPUs of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roost.config.findings import MAX_ACCELERATORS_PER_NODE, MAX_NODES, Findings, Where, counted, remainder
from roost.config.frameworks.arguments import Arguments, Start
from roost.config.frameworks.pools import (
    USUAL_WIDTH,
    Machines,
    Reader,
    check_divides,
    engine_experts,
    machines_for,
    megatron_sizes,
)
from roost.config.frameworks.registry import Framework
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
from roost.config.notations.algorithm import algorithm_of
from roost.config.source import Section

VERSION = "SkyRL of 2026-08-21 (a9564572e)"
DEFAULTS: Mapping[str, Any] = {
    "trainer.placement.colocate_all": True,
    "trainer.placement.colocate_policy_ref": True,
    "trainer.placement.num_nodes": 1,  # of the policy, the reference and the critic, each
    "trainer.placement.num_gpus_per_node": 1,
    "trainer.algorithm.use_kl_loss": True,
    "trainer.algorithm.use_kl_in_reward": False,
    "trainer.algorithm.kl_loss_coef": 0.001,
    "trainer.algorithm.advantage_estimator": "grpo",
    "trainer.strategy": "fsdp",
    "trainer.policy.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "trainer.max_prompt_length": 512,
    "generator.sampling_params.max_generate_length": 1024,
    "generator.inference_engine.num_engines": 1,
    "generator.inference_engine.gpu_memory_utilization": 0.8,
    "generator.inference_engine.distributed_executor_backend": "mp",
    "placement.num_nodes": 1,  # of supervised fine-tuning
    "placement.num_gpus_per_node": 4,
}
TRAIN_BATCH, MINI_BATCH, SAMPLES = 1024, 256, 5  # defaults of batches, in prompts, and of a group
# Keys of engines before 2026, directly in `generator`.
OLD = {
    "num_engines": "num_inference_engines",
    "tensor_parallel_size": "inference_engine_tensor_parallel_size",
    "pipeline_parallel_size": "inference_engine_pipeline_parallel_size",
    "data_parallel_size": "inference_engine_data_parallel_size",
    "expert_parallel_size": "inference_engine_expert_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "backend": "backend",
    "run_engines_locally": "run_engines_locally",
    "external_server_urls": "remote_inference_engine_urls",
}
CONFIG_OPTIONS = ("--config", "--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
ROLES = {"policy": "actor", "ref": "reference", "critic": "critic"}
PLACING = tuple(
    Entry(
        FOR_PLACING,
        f"""trainer.placement.{{colocate_all,colocate_policy_ref}}
        trainer.placement.{{policy,ref,critic}}_num_nodes trainer.placement.{{policy,ref,critic}}_num_gpus_per_node
        trainer.algorithm.{{use_kl_loss,use_kl_in_reward}} trainer.{{policy,critic,ref}}.model.path
        trainer.policy.model.lora.rank trainer.{{strategy,max_prompt_length}}
        trainer.{{max_tokens_per_microbatch,micro_train_batch_size_per_gpu}}
        trainer.gradient_checkpointing trainer.{{policy,critic,ref}}.sequence_parallel_size
        trainer.{{policy,critic,ref}}.megatron_config.{{tensor,pipeline,expert}}_model_parallel_size
        trainer.{{policy,critic,ref}}.megatron_config.{{context,expert_tensor}}_parallel_size
        trainer.fully_async.{{enabled,simulate_training,max_staleness_steps}}
        generator.inference_engine.{{tensor,pipeline,data,expert}}_parallel_size
        generator.inference_engine.{{num_engines,run_engines_locally,external_proxy_url,external_server_urls,enable_pd}}
        generator.inference_engine.{{num_prefill,gpu_memory_utilization,backend,distributed_executor_backend}}
        generator.{{{",".join(OLD.values())}}} generator.sampling_params.max_generate_length
        placement.{{num_nodes,num_gpus_per_node}} model.path model.lora.rank strategy
        max_length micro_train_batch_size_per_gpu""",
    ).patterns()
)


def without_config_file(start: Start, findings: Findings) -> Arguments:
    """The arguments; reports a config file, which is not read."""
    for name in CONFIG_OPTIONS:
        option = start.arguments.options.get(name)
        if option is not None:
            findings.error(
                "RST-N060",
                Where(*option.position),
                f"{name} is not followed; what the config says about placement is not known",
                "jobs of SkyRL are read from their keys a.b=c, and from a YAML file that is planned itself",
                "plan the config itself, with the other keys after it: roost plan CONFIG a.b=c",
            )
    return start.arguments


def read_skyrl(root: Section, notation: Notation) -> Job:
    """Read the keys of a SkyRL job."""
    return _SkyRL(root, notation).job()


FRAMEWORK = Framework(read_skyrl, PLACING, base=without_config_file)


@dataclass(slots=True)
class _SkyRL(Reader):
    def job(self) -> Job:
        if self.program.endswith("main_sft"):
            return self._supervised()
        for section, key in (("trainer", "placement"), ("generator", "inference_engine")):
            within = self.root.mapping(section)
            if within is not None:
                within.mapping(key)
        shares_all = self._flag("trainer.placement.colocate_all")
        engines, size = (0, 1) if self._is_elsewhere(shares_all) else self._engine_numbers()
        started = self._started()
        if self._is_async() and shares_all:
            self.root.findings.error(
                "RST-N058",
                self.place("trainer.placement.colocate_all"),
                "gives the engines no GPUs of their own",
                "the job generates while it learns; colocate_all is true by default, and SkyRL ends with an assertion",
                "write trainer.placement.colocate_all=false",
            )
        counts = {role: self._count(role) for role in ROLES}
        for role in ("ref", "critic"):
            if started[role] and (shares_all or (role == "ref" and self._shares_ref())):
                self._check_equal(role, counts, is_product=shares_all)
        if shares_all and started["policy"]:
            self._check_engines(engines, size, counts["policy"])
        machines = self._machines(counts, started, engines * size, shares_all)
        self._report_unused(started)
        learner = machines.pools["policy"].devices if started["policy"] else ()
        for role in ROLES:
            if started[role]:
                devices = learner if shares_all or role not in machines.pools else machines.pools[role].devices
                self._learner(role, devices)
        own = machines.pools["engines"].devices if "engines" in machines.pools else learner
        self._engines(own[: engines * size], size)
        self._check_executor(machines.width)
        self._report_machines(machines)
        settings: dict[str, object] = {"engines_sleep": shares_all}
        if self._is_async():
            settings["async_rollouts"] = True
            lag = self.root.below("trainer", "fully_async").whole_number("max_staleness_steps", 1)
            settings |= {} if lag is None else {"async_generation_ratio": lag}
        job = self.as_job(machines.count, machines.width, settings | self._algorithm(started["ref"]))
        return replace(job, pools=machines.sizes)

    def _algorithm(self, has_reference: bool) -> dict[str, object]:
        section = self.root.below("trainer", "algorithm")
        written = section.values.get("kl_loss_coef")
        coefficient = DEFAULTS["trainer.algorithm.kl_loss_coef"] if written is None else written
        in_reward = section.flag("use_kl_in_reward")
        in_loss = coefficient if has_reference and not in_reward else None
        estimator = first_text((section, "advantage_estimator")) or DEFAULTS["trainer.algorithm.advantage_estimator"]
        prompt = first_number((self.root.below("trainer"), "max_prompt_length"))
        prompt = prompt or DEFAULTS["trainer.max_prompt_length"]
        penalty, whitens = coefficient if has_reference else None, section.flag("advantage_batch_normalize") or None
        return algorithm_of(self.notation, estimator, in_loss, penalty, prompt, whitens)

    def _supervised(self) -> Job:
        """Supervised fine-tuning: a learner only."""
        section = self.root.below("placement")
        nodes = section.whole_number("num_nodes", 1, DEFAULTS["placement.num_nodes"], MAX_NODES) or 1
        key = "num_gpus_per_node"
        per_node = section.whole_number(key, 1, DEFAULTS[f"placement.{key}"], MAX_ACCELERATORS_PER_NODE) or 1
        machines = machines_for({"policy": (nodes, per_node)})
        path = first_text((self.root.below("model"), "path"))
        rank, length = first_number((self.root.below("model", "lora"), "rank")), first_number((self.root, "max_length"))
        size = self.root.whole_number("micro_train_batch_size_per_gpu", 1, 2) or 1
        strategy = first_text((self.root, "strategy")) or DEFAULTS["trainer.strategy"]
        model = ModelUse(
            path,
            read_model_config(path),
            strategy=strategy,
            lora_rank=int(rank) if rank else None,
            sharding=_sharding(strategy),
            sequence=int(length) if length else None,
            tokens=int(length * size) if length else None,
        )
        requested = DeviceList(machines.pools["policy"].devices, 1)
        self.add("actor", "placement", section.where(key), requested, Role.LEARNER, None, model)
        return self.as_job(machines.count, machines.width, {})

    # --- keys

    def _flag(self, path: str) -> bool:
        section, key = self.inner(path)
        return section.flag(key, bool(DEFAULTS.get(path, False)))

    def _engine_key(self, key: str) -> tuple[Section, str]:
        """The section and key where a setting of the engines is written: the current one, or that before 2026."""
        section, generator = self.root.below("generator", "inference_engine"), self.root.below("generator")
        is_old = key not in section and OLD.get(key, "") in generator
        return (generator, OLD[key]) if is_old else (section, key)

    def _engine_number(self, key: str, minimum: int, default: int) -> int:
        section, written = self._engine_key(key)
        return section.whole_number(written, minimum, default) or minimum

    def _engine_where(self, key: str) -> Where:
        section, written = self._engine_key(key)
        return section.where(written)

    def _is_async(self) -> bool:
        return self._flag("trainer.fully_async.enabled") or "async" in self.program.rpartition(".")[2]

    def _started(self) -> dict[str, bool]:
        """The learners that the job starts."""
        name = self.program.rpartition(".")[2].rpartition("/")[2]
        trains = name not in ("serve", "main_generate") and not self._flag("trainer.fully_async.simulate_training")
        in_loss, in_reward = (self._flag(f"trainer.algorithm.{key}") for key in ("use_kl_loss", "use_kl_in_reward"))
        algorithm = self.root.below("trainer", "algorithm")
        if trains and in_loss and in_reward:
            self.root.findings.error(
                "RST-N068",
                algorithm.where("use_kl_in_reward"),
                "cannot be used with trainer.algorithm.use_kl_loss",
                "use_kl_loss is true by default; SkyRL ends with an assertion",
                "write trainer.algorithm.use_kl_loss=false",
            )
        elif trains and in_loss and "use_kl_loss" not in algorithm:
            self.root.findings.note(
                "RST-N080",
                algorithm.where("use_kl_loss"),
                "a reference is started, though the job does not ask for one",
                "trainer.algorithm.use_kl_loss is not written, and its default is true",
                "write trainer.algorithm.use_kl_loss=false to do without it",
            )
        critic = first_text((self.root.below("trainer", "critic", "model"), "path"))
        return {"policy": trains, "ref": trains and (in_loss or in_reward), "critic": trains and critic is not None}

    # --- learners

    def _count(self, role: str) -> tuple[int, int]:
        """Nodes of a role, and GPUs on each."""
        section = self.root.below("trainer", "placement")
        nodes, gpus = (DEFAULTS[f"trainer.placement.{key}"] for key in ("num_nodes", "num_gpus_per_node"))
        return (
            section.whole_number(f"{role}_num_nodes", 1, nodes, MAX_NODES) or 1,
            section.whole_number(f"{role}_num_gpus_per_node", 1, gpus, MAX_ACCELERATORS_PER_NODE) or 1,
        )

    def _shares_ref(self) -> bool:
        return self._flag("trainer.placement.colocate_policy_ref")

    def _check_equal(self, role: str, counts: Mapping[str, tuple[int, int]], is_product: bool) -> None:
        (nodes, per_node), (of_policy, width) = counts[role], counts["policy"]
        if nodes * per_node == of_policy * width and (is_product or nodes == of_policy):
            return
        key = f"trainer.placement.{role}_num"
        self.root.findings.error(
            "RST-N066",
            self.place(f"{key}_gpus_per_node"),
            f"gives the {ROLES[role]} {nodes} x {counted(per_node, 'GPU')}, but it shares those of the policy, "
            f"which has {of_policy} x {width}",
            "the default is 1 x 1, whatever the policy has; SkyRL ends with an assertion",
            f"write {key}_nodes={of_policy} {key}_gpus_per_node={width}",
        )

    def _report_unused(self, started: Mapping[str, bool]) -> None:
        reasons = {
            "ref": "neither trainer.algorithm.use_kl_loss nor use_kl_in_reward is true",
            "critic": "trainer.critic.model.path is not set",
        }
        for role, why in reasons.items():
            section, key = self.root.below("trainer", "placement"), f"{role}_num_gpus_per_node"
            if started["policy"] and not started[role] and key in section:
                what = f"gives GPUs to the {ROLES[role]}, which is never started"
                self.root.findings.note("RST-N067", section.where(key), what, why, "remove it")

    def _sizes(self, role: str) -> ParallelSizes:
        section = self.root.below("trainer", role)
        if self._strategy() != "megatron":
            return ParallelSizes(context=section.whole_number("sequence_parallel_size", 1, 1) or 1)
        return megatron_sizes(section.below("megatron_config"))

    def _strategy(self) -> str:
        return first_text((self.root.below("trainer"), "strategy")) or str(DEFAULTS["trainer.strategy"])

    def _path(self) -> str:
        return first_text((self.root.below("trainer", "policy", "model"), "path")) or str(
            DEFAULTS["trainer.policy.model.path"]
        )

    def _check_batch(self, role: str, replicas: int) -> None:
        """Check that a step has whole minibatches, and a minibatch at least a sample for each replica."""
        trainer, key = self.root.below("trainer"), f"{role}_mini_batch_size"
        is_written = [trainer.values.get(name) is not None for name in ("train_batch_size", key)]
        batch, mini = known_count(trainer, "train_batch_size", TRAIN_BATCH), known_count(trainer, key, MINI_BATCH)
        samples = known_count(self.root.below("generator"), "n_samples_per_prompt", SAMPLES)
        if not any(is_written) or not batch or not mini or not samples:
            return
        default = "" if is_written[1] else f"SkyRL takes {MINI_BATCH} where {key} is not written; "
        if batch % mini:
            what = f"is {batch}, which {key} {mini} does not divide"
            if not is_written[0]:
                what = f"is {mini}, which does not divide a batch of {batch}, the default"
            why = f"{default}{remainder(batch, mini)}; SkyRL ends with an assertion"
            place = trainer.where("train_batch_size" if is_written[0] else key)
            self.root.findings.error("RST-N088", place, what, why, f"write a multiple of {mini}, or another {key}")
        elif mini * samples < replicas:
            what = f"makes a minibatch of {mini} * {counted(samples, 'sample')} for {counted(replicas, 'replica')}"
            why, fix = f"{default}SkyRL ends with an assertion", f"write {-(-replicas // samples)} or more"
            self.root.findings.error("RST-N088", trainer.where(key), what, why, fix)
        else:
            self._check_share(key, batch * samples // replicas, mini * samples // replicas, replicas)

    def _check_share(self, key: str, batch: int, mini: int, replicas: int) -> None:
        """A replica's samples of a step are whole minibatches, and those of a minibatch whole micro-batches."""
        trainer, micro_key = self.root.below("trainer"), "micro_train_batch_size_per_gpu"
        micro = known_count(trainer, micro_key, 1)
        if batch % mini:
            what = f"gives a replica {counted(mini, 'sample')}, which do not divide its {batch} of a step"
            why, fix = f"{remainder(batch, mini)}; SkyRL ends with an assertion", f"write a multiple of {replicas}"
            self.root.findings.error("RST-N088", trainer.where(key), what, why, fix)
        elif micro and mini % micro:
            what = f"is {micro}, which does not divide a replica's {counted(mini, 'sample')} of a minibatch"
            why, fix = f"{remainder(mini, micro)}; SkyRL ends with an assertion", f"write a divisor of {mini}"
            self.root.findings.error("RST-N088", trainer.where(micro_key), what, why, fix)

    def _learner(self, role: str, devices: Sequence[int]) -> None:
        trainer = self.root.below("trainer")
        where = self.place(f"trainer.placement.{role}_num_gpus_per_node")
        sizes = self._sizes(role)
        check_divides(sizes, len(devices), where, self.root, what="learner" if role == "policy" else ROLES[role])
        if role != "ref":
            self._check_batch(role, max(1, len(devices) // sizes.model))
        path = first_text((trainer.below(role, "model"), "path")) or self._path()
        tokens = first_number((trainer, "max_tokens_per_microbatch")) or 0
        rank = first_number((trainer.below("policy", "model", "lora"), "rank"))
        lengths = [
            first_number(self.inner(key)) or DEFAULTS[key]
            for key in ("trainer.max_prompt_length", "generator.sampling_params.max_generate_length")
        ]
        is_frozen = role == "ref"
        if tokens <= 0:  # -1 is off
            tokens = sum(lengths) * (trainer.whole_number("micro_train_batch_size_per_gpu", 1, 1) or 1)
        model = ModelUse(
            path,
            read_model_config(path),
            sharding=_sharding(self._strategy()),
            strategy=self._strategy(),
            sequence=int(sum(lengths)),
            tokens=None if is_frozen else int(tokens),
            recomputes=trainer.flag("gradient_checkpointing", True),
            offloads=OFFLOADED_PARTS if self._flag("trainer.placement.colocate_all") and not is_frozen else (),
            lora_rank=int(rank) if rank and role == "policy" else None,
        )
        kind = Role.SCORER if is_frozen else Role.LEARNER
        written = f"trainer.placement.{role}"
        self.add(ROLES[role], written, where, DeviceList(devices, 1), kind, sizes, model)

    # --- engines

    def _is_elsewhere(self, shares_all: bool) -> bool:
        """Return True if engines run elsewhere, at addresses that the job names."""
        for key in ("external_proxy_url", "external_server_urls"):
            section, written = self._engine_key(key)
            is_given = section.values.get(written) is not None
            is_old = written == OLD["external_server_urls"] and self._runs_engines()
            if is_given and not is_old:
                if shares_all:
                    self.root.findings.error(
                        "RST-N068",
                        section.where(written),
                        "cannot be used with trainer.placement.colocate_all",
                        "engines elsewhere share no GPUs; colocate_all is true by default",
                        "write trainer.placement.colocate_all=false",
                    )
                return True
        return not self._runs_engines()

    def _runs_engines(self) -> bool:
        section, written = self._engine_key("run_engines_locally")
        return section.flag(written, True)

    def _engine_numbers(self) -> tuple[int, int]:
        """Engines, and the GPUs of each."""
        tensor, pipeline, data = (
            self._engine_number(f"{kind}_parallel_size", 1, 1) for kind in ("tensor", "pipeline", "data")
        )
        count = self._engine_number("num_engines", 1, DEFAULTS["generator.inference_engine.num_engines"])
        return count, tensor * pipeline * data

    def _check_engines(self, engines: int, size: int, policy: tuple[int, int]) -> None:
        gpus = policy[0] * policy[1]
        if engines and engines * size != gpus:
            key = self._engine_where("num_engines").key_path
            fix = "choose a size of engines that divides it" if gpus % size else f"write {key}={gpus // size}"
            self.root.findings.error(
                "RST-N066",
                self._engine_where("num_engines"),
                f"gives the engines {counted(engines * size, 'GPU')}, but they share the policy's {gpus}",
                f"{counted(engines, 'engine')} * {size} = {engines * size}; colocate_all is true by default",
                f"{fix}, or trainer.placement.colocate_all=false",
            )

    def _engines(self, devices: Sequence[int], size: int) -> None:
        if not devices or len(devices) % size:
            return  # elsewhere, or an error already
        section, key = self._engine_key("gpu_memory_utilization")
        fraction = fraction_of_device(section, key) or DEFAULTS["generator.inference_engine.gpu_memory_utilization"]
        backend = first_text(self._engine_key("backend")) or "vllm"
        model = ModelUse(self._path(), read_model_config(self._path()), memory_fraction=fraction, strategy=backend)
        sizes, where = self._engine_sizes(), self._engine_where("num_engines")
        prefill = self._prefill(len(devices) // size) * size
        parts = {"rollout.prefill": devices[:prefill], "rollout.decode": devices[prefill:]}
        for name, part in (parts if prefill else {"rollout": devices}).items():
            requested = DeviceList(part, size)
            self.add(name, "generator.inference_engine", where, requested, Role.ENGINE, sizes, model)

    def _engine_sizes(self) -> ParallelSizes:
        tensor, pipeline, data = (
            self._engine_number(f"{kind}_parallel_size", 1, 1) for kind in ("tensor", "pipeline", "data")
        )
        expert = engine_experts(*self._engine_key("expert_parallel_size"), tensor * data, self.root, "SkyRL")
        return ParallelSizes(tensor, pipeline, expert=expert)

    def _check_executor(self, width: int) -> None:
        """Warn about engines over several nodes without Ray; the `mp` executor stays on one."""
        tensor, pipeline = (self._engine_number(f"{kind}_parallel_size", 1, 1) for kind in ("tensor", "pipeline"))
        key = "distributed_executor_backend"
        section = self.root.below("generator", "inference_engine")
        default = DEFAULTS[f"generator.inference_engine.{key}"]
        backend = first_text((section, key)) or default
        size = tensor * pipeline
        engines = [part.requested for part in self.components if part.role is Role.ENGINE]
        spans = [
            one.devices[at : at + size]
            for one in engines
            if isinstance(one, DeviceList)
            for at in range(0, len(one.devices), size)
        ]
        over = sum(min(span) // width != max(span) // width for span in spans)
        if backend == "mp" and over:
            self.root.findings.warn(
                "RST-N068",
                section.where(key),
                f"is mp, which keeps an engine on one node, but {over} of {len(spans)} would be on several",
                f"tensor {tensor} * pipeline {pipeline} = {size}, a node has {width}; {VERSION} has {default}",
                f"write generator.inference_engine.{key}=ray",
            )

    def _prefill(self, engines: int) -> int:
        """Engines that only read prompts; 0 where each engine does both."""
        section = self.root.below("generator", "inference_engine")
        if not section.flag("enable_pd"):
            return 0
        count = section.whole_number("num_prefill", 0, 0) or 0
        if not 0 < count < engines:
            self.root.findings.error(
                "RST-N063",
                section.where("num_prefill"),
                f"is {count} of {counted(engines, 'engine')}; prefill and decode each need at least one",
                f"decode has the rest: {engines} - {count} = {engines - count}",
                "write a number above 0 and below num_engines",
            )
            return 0
        return count

    # --- machines

    def _machines(
        self, counts: Mapping[str, tuple[int, int]], started: Mapping[str, bool], gpus: int, shares_all: bool
    ) -> Machines:
        sizes = {}
        if started["policy"]:
            sizes["policy"] = counts["policy"]
        if not shares_all or not started["policy"]:
            if started["ref"] and not self._shares_ref():
                sizes["ref"] = counts["ref"]
            if started["critic"]:
                sizes["critic"] = counts["critic"]
            if gpus:
                several = [width for nodes, width in sizes.values() if nodes > 1]
                width = max(several, default=max([USUAL_WIDTH, *(width for _, width in sizes.values())]))
                sizes["engines"] = (1, gpus) if gpus <= width else (-(-gpus // width), width)
        return machines_for(sizes or {"policy": (1, 1)})

    def _report_machines(self, machines: Machines) -> None:
        if machines.count == 1:
            return
        place = self.place("trainer.placement.policy_num_nodes")
        if any(pool.per_node != machines.width for pool in machines.pools.values()):
            sizes = ", ".join(f"{name} {pool.nodes} x {pool.per_node}" for name, pool in machines.pools.items())
            self.root.findings.note(
                "RST-N065",
                place,
                f"the groups are planned on {counted(machines.count, 'machine')} of {counted(machines.width, 'GPU')}",
                f"nodes x GPUs: {sizes}; a SkyRL job does not say how many GPUs a machine has",
                "compare with the machines of the cluster",
            )
        self.root.findings.note(
            "RST-N059",
            place,
            "the order of the nodes is not fixed: SkyRL sorts them by the random ID that Ray gives each",
            "ranks may be on other nodes after a restart; planned are the policy's nodes first, in order",
            "compare with the nodes that SkyRL prints, where the order matters",
        )


def _sharding(strategy: str) -> Sharding:
    return Sharding.OPTIMIZER if strategy == "megatron" else Sharding.FULL
