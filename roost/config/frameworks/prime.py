"""prime-rl: TOML files behind `rl @ rl.toml`.

Engines come first: on one node they take the first GPUs and the learner those after them, over several the first nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roost.config.findings import (
    MAX_ACCELERATORS_PER_NODE,
    MAX_NODES,
    Findings,
    KeyPath,
    Position,
    Where,
    counted,
    remainder,
)
from roost.config.frameworks.arguments import (
    Arguments,
    Start,
    find_file,
    merged,
    read_config,
    read_overrides,
    report_missing,
    resolved,
    switch_value,
    value_at,
)
from roost.config.frameworks.pools import (
    VISIBLE,
    Reader,
    add_visible,
    check_divides,
    enough_visible,
    visible_devices,
)
from roost.config.frameworks.registry import Framework
from roost.config.frameworks.toml import read_toml
from roost.config.job import (
    COMMAND_LINE,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Role,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
)
from roost.config.known_keys.tables import PLACING as FOR_PLACING, Entry
from roost.config.notations.algorithm import JOB_NAME, completion_of
from roost.config.shell.state import Command, Value
from roost.config.source import Section, Source

VERSION = "prime-rl of 2026-08-21 (559b44772)"
DEFAULTS: Mapping[str, Any] = {
    "deployment.type": "single_node",
    "deployment.gpus_per_node": 8,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "deployment.num_infer_replicas": 1,
    "deployment.num_gpus": 1,  # of supervised fine-tuning
    "inference.deployment.num_nodes": 2,
    "inference.vllm.tensor_parallel_size": 1,
    "inference.vllm.gpu_memory_utilization": 0.9,
    "orchestrator.max_off_policy_steps": 8,
}
# Keys of older versions, and those that give the same now.
OLD_KEYS: Mapping[str, str] = {
    "num_training_nodes": "deployment.num_train_nodes",
    "num_inference_nodes": "deployment.num_infer_nodes",
    "trainer_gpu_ids": "deployment.num_train_gpus",
    "inference_gpu_ids": "deployment.num_infer_gpus",
}
PLACING = (
    VISIBLE,
    *OLD_KEYS,
    *Entry(
        FOR_PLACING,
        """deployment.{type,gpus_per_node,num_train_gpus,num_infer_gpus,num_train_nodes,num_infer_nodes,num_gpus}
        deployment.{num_infer_replicas,nodes_per_fsdp_group,orchestrator_on_inference,num_nodes}
        {inference.deployment,deployment}.{prefill_nodes_per_replica,num_prefill_replicas,num_prefill_nodes}
        {inference.deployment,deployment}.{decode_nodes_per_replica,num_decode_replicas,num_decode_nodes}
        inference.deployment.{type,num_nodes,gpus_per_node} inference slurm slurm.*
        {inference.vllm,vllm}.{model,tensor_parallel_size,data_parallel_size,gpu_memory_utilization}
        {inference.vllm,vllm}.enable_expert_parallel inference.{enable_expert_parallel,gpu_memory_utilization}
        inference.{parallel,model}.{tp,dp,name} orchestrator.max_off_policy_steps
        orchestrator.train.sampling.max_completion_tokens
        model.name seq_len trainer.model.{name,seq_len,cp,ep,ac,ac.*,lora.rank} model.{seq_len,cp,ep,lora.rank}""",
    ).patterns(),
)


def read_arguments(words: Sequence[Value]) -> Arguments:
    """Files `@ a.toml`, and flags `--a.b-c 1` or overrides `a.b=1` over them."""
    found = Arguments()
    path: KeyPath = ()
    position: Position = (None, None, None)
    is_file = False
    for word in words:
        text = word.prefix
        if is_file or (text.startswith("@") and text != "@"):
            found.options[f"{'.'.join(map(str, path))}@{len(found.options)}"] = word if is_file else word.after(1)
            path, is_file = (), False
            continue
        flag = re.match(r"--([A-Za-z][\w.-]*)(=)?", text)
        if text == "@":
            is_file = True
            if path:
                _unset(found, path)
        elif flag is not None:
            path, position = tuple(flag[1].replace("-", "_").split(".")), word.position
            if flag[2]:
                found.set(path, resolved(word.after(flag.end())), position)
                path = ()
            else:
                found.set(path, switch_value(word), position)
        elif path:
            found.set(path, resolved(word), position)
            path = ()
        elif word.unknown is not None or "=" in text:
            one = read_overrides([word])
            found.unknown += one.unknown + one.stray
            for key in one.positions:
                found.set(key, value_at(one.values, key), word.position)
    return found


def _unset(arguments: Arguments, path: KeyPath) -> None:
    """Remove a flag that turned out to name the section of a file: `--trainer @ a.toml`."""
    inner = arguments.values
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1], None)
    arguments.positions.pop(path, None)


def with_config_files(start: Start, findings: Findings) -> Arguments:
    """The flags merged over the files that are named; later files override earlier ones."""
    read = _layered(Source({}), start.arguments, findings, start.command)
    add_visible(read, start.command)
    return read


def load_toml(file: Path, overrides: Sequence[str], findings: Findings) -> Source | None:
    """A TOML file with overrides or flags of the command line, and the further files that they name."""
    source = read_toml(file, findings)
    if source is None:
        return None
    words = [Value((word,) if word else (), (COMMAND_LINE, None, None)) for word in overrides]
    read = _layered(source, read_arguments(words), findings)
    for word in read.unknown:
        where = Where(COMMAND_LINE, path=(word.shown,))
        findings.error("RST-C051", where, "is not an override", fix="write key=value, --key value or @ file.toml")
    return Source(read.values, source.file, read.positions)


def _layered(base: Source, arguments: Arguments, findings: Findings, command: Command | None = None) -> Arguments:
    values, positions = dict(base.values), dict(base.positions)
    for name, word in arguments.options.items():
        section: KeyPath = tuple(part for part in name.partition("@")[0].split(".") if part)
        file = _file(word, command)
        if file is None:
            report_missing(word, findings)
            continue
        source = read_toml(file, findings) if command is None else read_config(file, command, findings)
        if source is not None:
            above: dict[Any, Any] = source.values
            for key in reversed(section):
                above = {key: above}
            values = merged(values, above)
            positions |= {(*section, *path): place for path, place in source.positions.items()}
    return Arguments(merged(values, arguments.values), {**positions, **arguments.positions}, {}, arguments.unknown)


def _file(word: Value, command: Command | None) -> Path | None:
    if not word.known:
        return None
    if command is not None:
        return find_file(word.known, command)
    return Path(word.known) if Path(word.known).is_file() else None


def read_prime(root: Section, notation: Notation) -> Job:
    """Read the config of a prime-rl job."""
    return _Prime(root, notation).job()


FRAMEWORK = Framework(read_prime, PLACING, read_arguments, base=with_config_files)


@dataclass(slots=True)
class _Prime(Reader):
    width: int = 8  # GPUs of a node

    def job(self) -> Job:
        for key in ("deployment", "inference", "trainer", "orchestrator"):
            self.root.mapping(key)
        for old, new in OLD_KEYS.items():
            if old in self.root:
                why = "prime-rl stops at a key that its version does not have"
                self.root.error("RST-N069", old, "is a key of older versions", why, f"write {new}")
        deployment = self.root.below("deployment")
        default = int(DEFAULTS["deployment.gpus_per_node"])
        self.width = deployment.whole_number("gpus_per_node", 1, default, MAX_ACCELERATORS_PER_NODE) or default
        kind = self._kind()
        if kind == "inference":
            nodes = self._serve()
        elif kind == "sft":
            nodes = self._fine_tune()
        elif (deployment.text("type") or DEFAULTS["deployment.type"]) == "multi_node":
            nodes = self._several_nodes()
        else:
            nodes = self._one_node()
        if nodes == 1 and deployment.text("type") != "multi_node":
            self._use_visible()
        settings: dict[str, object] = {"engines_sleep": False}
        lag = self.root.below("orchestrator").whole_number("max_off_policy_steps", 0)
        lag = DEFAULTS["orchestrator.max_off_policy_steps"] if lag is None else lag
        if lag > 0 and kind == "rl":
            settings |= {"async_rollouts": True, "async_generation_ratio": lag}
        sampling = self.root.below("orchestrator", "train", "sampling")
        settings |= completion_of(None, first_number((sampling, "max_completion_tokens")), None)
        name = first_text((self.root.below("slurm"), "job_name"))
        return self.as_job(nodes, self.width, settings | ({JOB_NAME: name} if name else {}))

    def _kind(self) -> str:
        """rl, sft or inference: which program the file is for."""
        name = self.program.replace(".", "/").rpartition("/")[2]
        if name in ("sft", "inference"):
            return name
        deployment = self.root.below("deployment")
        if any(key in self.root for key in ("orchestrator", "trainer", "inference")) or name == "rl":
            return "rl"
        if any(key in deployment for key in ("num_train_gpus", "num_infer_gpus", "num_train_nodes")):
            return "rl"
        return "inference" if "vllm" in self.root or deployment.text("type") == "disaggregated" else "sft"

    def _use_visible(self) -> None:
        """Place the job on the GPUs that its command may see, if these are known."""
        parts = [(part, part.requested) for part in self.components if isinstance(part.requested, DeviceList)]
        needed = max((max(requested.devices) + 1 for _, requested in parts), default=0)
        ids = enough_visible(visible_devices(self.root), needed, self.root, "processes")
        if ids is None:
            return
        self.components = [
            replace(part, requested=DeviceList([ids[device] for device in requested.devices], requested.per_process))
            for part, requested in parts
        ]
        self.width = max(self.width, *(device + 1 for device in ids))

    def _number(self, section: Section, key: str, minimum: int, default: int | None = None) -> int | None:
        return section.whole_number(key, minimum, default, MAX_NODES)

    def _devices(self, nodes: range) -> range:
        return range(nodes.start * self.width, nodes.stop * self.width)

    # --- one node

    def _one_node(self) -> int:
        deployment = self.root.below("deployment")
        train = self._number(deployment, "num_train_gpus", 1, int(DEFAULTS["deployment.num_train_gpus"])) or 1
        infer = self._number(deployment, "num_infer_gpus", 0, int(DEFAULTS["deployment.num_infer_gpus"])) or 0
        if train + infer > self.width:
            self.does_not_fit(
                deployment.where("num_train_gpus"),
                f"makes {counted(train + infer, 'GPU')} with those of the engines, but the node has {self.width}",
                f"{infer} + {train} > {self.width}",
                f"write gpus_per_node = {train + infer}, or fewer GPUs",
            )
            self.width = train + infer
        if not self._has_engines():
            if deployment.values.get("num_infer_gpus") is not None and infer:
                self._warn_unstarted(deployment.where("num_infer_gpus"), counted(infer, "GPU"))
            infer = 0
        if deployment.values.get("gpus_per_node") is None:
            self.width = train + infer  # the job asks for no more, and takes what the machine shows
        if infer:
            self._engines("rollout", range(infer), infer, self.root.below("inference"))
        self._learner(range(infer, infer + train), deployment.where("num_train_gpus"))
        return 1

    # --- several nodes

    def _several_nodes(self) -> int:
        deployment, inference = self.root.below("deployment"), self.root.below("inference")
        if "slurm" not in self.root:
            self.root.findings.error(
                "RST-N073",
                deployment.where("type"),
                "is multi_node, but there is no section [slurm]",
                "prime-rl starts jobs over several nodes by Slurm only",
                "add [slurm] with job_name",
            )
        train = self._number(deployment, "num_train_nodes", 1)
        if train is None:
            self.does_not_fit(deployment.where("num_train_nodes"), "is missing", "it has no default", "write it")
        groups = self._groups(inference)
        per_replica = self._number(deployment, "num_infer_nodes", 0)
        own = sum(nodes for _, nodes in groups) if groups else self._own_nodes(inference)
        if per_replica is None:
            per_replica = own if self._has_engines() else 0
        elif groups and per_replica != own:
            self.does_not_fit(
                deployment.where("num_infer_nodes"),
                f"is {per_replica}, but prefill and decode take {own}",
                " + ".join(f"{nodes} for {name}" for name, nodes in groups),
                f"write num_infer_nodes = {own}, or leave it out",
            )
            per_replica = own
        if bool(per_replica) != self._has_engines():
            what = "gives engines no nodes, but there is a section [inference]"
            if per_replica:
                what = f"gives engines {counted(per_replica, 'node')}, but there is no section [inference]"
            self.does_not_fit(deployment.where("num_infer_nodes"), what, "", "write both or neither")
        replicas = self._number(deployment, "num_infer_replicas", 1, 1) or 1
        infer = per_replica * replicas
        if infer and self._has_engines():
            self._replicas(groups or [("", per_replica)], replicas, inference)
        self._learner(self._devices(range(infer, infer + (train or 1))), deployment.where("num_train_nodes"))
        self._fsdp_groups(deployment, train or 1)
        return infer + (train or 1)

    def _fsdp_groups(self, deployment: Section, train: int) -> None:
        size = self._number(deployment, "nodes_per_fsdp_group", 1)
        if size is not None and train % size:
            self.root.findings.error(
                "RST-N056",
                deployment.where("nodes_per_fsdp_group"),
                f"is {size}, which does not divide the learner's {counted(train, 'node')}",
                remainder(train, size),
                "write a number that divides them",
            )

    def _own_nodes(self, inference: Section) -> int:
        """Nodes of a replica, by [inference.deployment]."""
        own = inference.below("deployment")
        if own.text("type") != "multi_node":
            return 1
        return self._number(own, "num_nodes", 1, int(DEFAULTS["inference.deployment.num_nodes"])) or 1

    def _groups(self, inference: Section) -> list[tuple[str, int]]:
        """Nodes for prefill and for decode of a replica; empty where engines do both."""
        own = inference.below("deployment")
        if own.text("type") != "disaggregated":
            return []
        groups = []
        for name in ("prefill", "decode"):
            written = self._number(own, f"num_{name}_nodes", 1)
            each = self._number(own, f"{name}_nodes_per_replica", 1, 1) or 1
            groups.append((name, written or each * (self._number(own, f"num_{name}_replicas", 1, 1) or 1)))
        return groups

    def _replicas(self, groups: Sequence[tuple[str, int]], replicas: int, inference: Section) -> None:
        """Place engines replica by replica: the nodes for prefill, then those for decode."""
        devices: dict[str, list[int]] = {}
        node = 0
        for _ in range(replicas):
            for name, nodes in groups:
                devices.setdefault(name, []).extend(self._devices(range(node, node + nodes)))
                node += nodes
        for name, taken in devices.items():
            self._engines(f"rollout.{name}" if name else "rollout", taken, self.width, inference)

    # --- other programs

    def _serve(self) -> int:
        groups = self._groups(self.root)
        if not groups:
            is_several = self.root.below("deployment").text("type") == "multi_node"
            nodes = self._own_nodes(self.root)
            tensor, _ = self._tensor(self.root)
            if not is_several and self.root.below("deployment").values.get("gpus_per_node") is None:
                parallel = self.root.below("vllm").whole_number("data_parallel_size", 1)
                parallel = parallel or self.root.below("parallel").whole_number("dp", 1, 1) or 1
                self.width = tensor * parallel
            groups = [("", nodes)]
        self._replicas(groups, 1, self.root)
        return sum(nodes for _, nodes in groups)

    def _fine_tune(self) -> int:
        deployment = self.root.below("deployment")
        nodes, key = 1, "num_gpus"
        if deployment.text("type") == "multi_node":
            nodes, key = self._number(deployment, "num_nodes", 1, 2) or 2, "num_nodes"
        else:
            gpus = self._number(deployment, "num_gpus", 1, int(DEFAULTS["deployment.num_gpus"])) or 1
            self.width = gpus if deployment.values.get("gpus_per_node") is None else max(gpus, self.width)
            self._learner(range(gpus), deployment.where(key))
            return 1
        self._learner(self._devices(range(nodes)), deployment.where(key))
        return nodes

    # --- components

    def _has_engines(self) -> bool:
        return isinstance(self.root.values.get("inference"), Mapping)

    def _warn_unstarted(self, where: Where, count: str) -> None:
        self.root.findings.warn(
            "RST-N067",
            where,
            f"gives engines {count}, but there is no section [inference], so that none is started",
            "prime-rl then expects a server that is started separately",
            "add [inference], or leave the key out",
        )

    def _tensor(self, inference: Section) -> tuple[int, Where]:
        """GPUs of an engine, and where that is written."""
        places = ((inference.below("vllm"), "tensor_parallel_size"), (inference.below("parallel"), "tp"))
        section, key = next((one for one in places if one[0].values.get(one[1]) is not None), places[0])
        size = section.whole_number(key, 1, int(DEFAULTS["inference.vllm.tensor_parallel_size"])) or 1
        return size, section.where(key)

    def _engines(self, name: str, devices: Sequence[int], per_node: int, inference: Section) -> None:
        tensor, where = self._tensor(inference)
        if per_node % tensor:
            code = "RST-N057" if tensor > per_node else "RST-N056"
            what = f"makes each engine {counted(tensor, 'GPU')} large, but there are {per_node} for engines on a node"
            self.root.findings.error(
                code,
                where,
                what,
                remainder(per_node, tensor),
                f"choose a size that divides {per_node}",
            )
            return
        section = inference.below("vllm")
        replicas = section.whole_number("data_parallel_size", 1)
        if replicas is not None and self._kind() == "rl" and replicas * tensor != len(devices):
            why = f"engines are as many as fit on the GPUs for them: {len(devices)} / {tensor}"
            where = section.where("data_parallel_size")
            section.findings.warn("RST-T014", where, "is not followed", why, "leave it out")
        fraction = fraction_of_device(section, "gpu_memory_utilization")
        if fraction is None:
            fraction = fraction_of_device(inference, "gpu_memory_utilization")
        places = ((section, "model"), (inference.below("model"), "name"), (self.root.below("model"), "name"))
        path = first_text(*places)
        model = ModelUse(
            path,
            read_model_config(path),
            memory_fraction=fraction or float(DEFAULTS["inference.vllm.gpu_memory_utilization"]),
            strategy="vllm",
        )
        has_groups = any(one.values.get("enable_expert_parallel") is True for one in (section, inference))
        sizes = ParallelSizes(tensor, expert=per_node if has_groups else 1)  # over all engines of a node
        requested = DeviceList(devices, tensor)
        written = ".".join(map(str, inference.path)) or "inference"
        self.add(name, written, inference.where(), requested, Role.ENGINE, sizes, model)

    def _learner(self, devices: Sequence[int], where: Where) -> None:
        trainer = self.root.below("trainer", "model")
        shared = self.root.below("model")
        sizes = ParallelSizes(
            context=self._size("cp", trainer, shared),
            expert=self._size("ep", trainer, shared),
        )
        check_divides(sizes, len(devices), where, self.root, f"context {sizes.context}")
        path = first_text((trainer, "name"), (shared, "name"))
        sequence = first_number((trainer, "seq_len"), (shared, "seq_len"), (self.root, "seq_len"))
        rank = first_number((trainer.below("lora"), "rank"), (shared.below("lora"), "rank"))
        model = ModelUse(
            path,
            read_model_config(path),
            strategy="fsdp",
            recomputes="ac" in trainer or "ac" in shared,
            lora_rank=int(rank) if rank else None,
            tokens=int(sequence) if sequence else None,
            sequence=int(sequence) if sequence else None,
        )
        written = "trainer" if "trainer" in self.root else "deployment"
        self.add("actor", written, where, DeviceList(devices, 1), Role.LEARNER, sizes, model)

    def _size(self, key: str, *sections: Section) -> int:
        written = (section for section in sections if section.values.get(key) not in (None, "auto"))
        return next((section.whole_number(key, 1, 1) or 1 for section in written), 1)
