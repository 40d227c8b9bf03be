"""A job as read from any notation: machines, components and their models, settings, and where each value came from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roost.config.data import is_teacher
from roost.config.findings import Finding, Where, shown, spell_path
from roost.config.known_keys.tables import KeyUse
from roost.config.ranks import Segment
from roost.config.source import MAX_NUMBER, Section, Source, Unresolved

if TYPE_CHECKING:
    from roost.config.train import TrainSettings


COMMAND_LINE = "command line"  # the file of a key that an override wrote
AUTO = "auto"  # a setting that the plan decides
MICRO_BATCH_TOKENS = 8_192  # default tokens of a learner's micro-batch


class Origin(StrEnum):
    """Source of a setting's value."""

    CONFIG = "config"  # keys of the config
    OVERRIDE = "command line"
    NOTATION = "notation default"  # of the program whose notation the config is in
    ROOST = "roost default"


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """A training setting as the run will use it."""

    name: str  # in the section `train`
    value: Any  # as JSON has it
    origin: Origin
    keys: tuple[Where, ...] = ()  # that decide it; empty for a default


def origin_of(keys: tuple[Where, ...]) -> Origin:
    """The origin of a value that these keys decide.

    >>> origin_of((Where("job.yaml", 3, 5, ("seed",)), Where(COMMAND_LINE, path=("seed",)))).value
    'command line'
    """
    return Origin.OVERRIDE if any(key.file == COMMAND_LINE for key in keys) else Origin.CONFIG


class Notation(StrEnum):
    """The notations that Roost reads: RLinf's, ROLL's and ml-loop's, and those of other frameworks."""

    RLINF = "rlinf"
    ROLL = "roll"
    LOOP = "loop"
    VERL = "verl"
    SLIME = "slime"
    MILES = "miles"
    OPENRLHF = "openrlhf"
    NEMO = "nemo"
    AREAL = "areal"
    SKYRL = "skyrl"
    PRIME = "prime"
    TRL = "trl"

    @property
    def program(self) -> str:
        """The program whose notation it is."""
        return _PROGRAMS.get(self, self.value)

    @property
    def is_trained(self) -> bool:
        """Return True for the three notations of `TRAINED`; the others are jobs of other frameworks."""
        return self in TRAINED

    @property
    def nodes_key(self) -> tuple[str, ...]:
        """The key with the number of nodes."""
        return _MACHINE_KEYS.get(self, (("num_nodes",), ("num_gpus_per_node",)))[0]

    @property
    def accelerators_key(self) -> tuple[str, ...]:
        """The key with the accelerators of a node."""
        return _MACHINE_KEYS.get(self, (("num_nodes",), ("num_gpus_per_node",)))[1]


_PROGRAMS = {
    Notation.RLINF: "RLinf",
    Notation.ROLL: "ROLL",
    Notation.LOOP: "ml-loop",
    Notation.OPENRLHF: "OpenRLHF",
    Notation.NEMO: "NeMo-RL",
    Notation.AREAL: "AReaL",
    Notation.SKYRL: "SkyRL",
    Notation.PRIME: "prime-rl",
    Notation.TRL: "TRL",
}
TRAINED = (Notation.RLINF, Notation.ROLL, Notation.LOOP)
_MACHINE_KEYS = {
    Notation.RLINF: (("cluster", "num_nodes"), ("cluster", "num_gpus_per_node")),
    Notation.VERL: (("trainer", "nnodes"), ("trainer", "n_gpus_per_node")),
    Notation.SLIME: (("--actor-num-nodes",), ("--num-gpus-per-node",)),
    Notation.MILES: (("--actor-num-nodes",), ("--num-gpus-per-node",)),
    Notation.OPENRLHF: (("--actor.num_nodes",), ("--actor.num_gpus_per_node",)),
    Notation.PRIME: (("deployment", "num_train_nodes"), ("deployment", "gpus_per_node")),
    Notation.AREAL: (("cluster", "n_nodes"), ("cluster", "n_gpus_per_node")),
    Notation.NEMO: (("cluster", "num_nodes"), ("cluster", "gpus_per_node")),
    Notation.TRL: (("num_machines",), ("num_processes",)),
    Notation.SKYRL: (
        ("trainer", "placement", "policy_num_nodes"),
        ("trainer", "placement", "policy_num_gpus_per_node"),
    ),
}


@dataclass(frozen=True, slots=True)
class RankMap:
    """Resources and the processes on them, in ranks of one or several node groups (RLinf)."""

    segments: tuple[Segment, ...]
    node_groups: tuple[str, ...]
    where: Where  # of the ranks
    groups_where: Where


@dataclass(frozen=True, slots=True)
class DeviceList:
    """Accelerators of the whole cluster in the order written, split into processes (ROLL, ml-loop).

    If the devices do not divide, the last process has fewer.
    """

    devices: Sequence[int]
    per_process: int


@dataclass(frozen=True, slots=True)
class CpuWorkers:
    """Processes without devices, placed on the nodes round-robin (ROLL)."""

    count: int


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel sizes of one copy of a model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # processes that the experts of a mixture are split over; part of the other sizes
    shard: int | None = None  # processes that FSDP shards a learner over, including context groups; None: all
    expert_tensor: int | None = None  # processes that Megatron splits each expert over; None: as tensor

    def __post_init__(self) -> None:
        if self.expert_tensor == self.tensor:  # the same as None, so that equal sizes compare equal
            object.__setattr__(self, "expert_tensor", None)

    @property
    def model(self) -> int:
        return self.tensor * self.pipeline * self.context


EXPERT_TENSOR = "expert_tensor_parallel_size"
_SIZE_KEYS = {
    "tensor": ("tensor_model_parallel_size", "tensor_parallel_size"),
    "pipeline": ("pipeline_model_parallel_size", "pipeline_parallel_size"),
    "context": ("context_parallel_size", "ulysses_sequence_parallel_size", "ulysses_size"),
    "expert": ("expert_model_parallel_size", "expert_parallel_size"),
    "shard": ("fsdp_size",),
    "expert_tensor": (EXPERT_TENSOR,),
}


def size_place(place: Where, section: str, size: str) -> Where:
    """The key in a component's section that sets a parallel size; the component's own place if no key does.

    >>> deeper = ("actor", "megatron", "ckpt_convertor", "context_parallel_size")
    >>> at = {deeper: ("job.yaml", 5, 7), ("actor", "model", "context_parallel_size"): ("job.yaml", 7, 5)}
    >>> print(size_place(Where("job.yaml", 3, 1, ("cluster",), at), "actor", "context"))
    job.yaml:7:5 actor.model.context_parallel_size
    """
    found = [
        path
        for path in place.positions
        if path and path[-1] in _SIZE_KEYS[size] and spell_path(path).startswith(f"{section}.")
    ]
    if not found:
        return place
    path = min(found, key=len)  # deeper keys mean something else, such as sizes of a checkpoint converter
    return Where(*place.positions[path], path, place.positions)


def family(name: str) -> str:
    """The component of a part: engines for prefill and for decode are both `rollout`.

    >>> family("rollout.prefill"), family("rollout")
    ('rollout', 'rollout')
    """
    return name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Dimensions of a learner's device mesh, outermost first."""

    replicate: int = 1  # copies of the sharded weights (HSDP)
    shard: int = 1  # ranks with samples of their own that share one copy of the weights (FSDP)
    context: int = 1  # ranks that split the tokens of a batch; FSDP shards weights over them too
    tensor: int = 1  # ranks that split every matrix product
    expert: int = 1  # ranks that split the experts of a mixture, among those of FSDP and tensor

    @classmethod
    def of(cls, sizes: ParallelSizes, ranks: int) -> MeshSizes:
        """The mesh of `ranks` ranks. Raise ValueError if the sizes do not divide them.

        >>> MeshSizes.of(ParallelSizes(tensor=2, shard=2), 8)
        MeshSizes(replicate=2, shard=2, context=1, tensor=2, expert=1)
        """
        if ranks % (sizes.context * sizes.tensor):
            raise ValueError(f"{ranks} ranks cannot be divided into {groups_of(sizes)}")
        # As in verl and RLinf, a size above the number of ranks means all of them.
        is_all = sizes.shard is None or sizes.shard >= ranks
        fsdp = ranks // sizes.tensor if is_all else sizes.shard or 1
        if fsdp % sizes.context:
            raise ValueError(f"FSDP over {fsdp} ranks cannot be divided into context groups of {sizes.context}")
        if ranks % (fsdp * sizes.tensor):
            of_tensor = f" times tensor size {sizes.tensor}" if sizes.tensor > 1 else ""
            raise ValueError(f"{ranks} ranks cannot be divided into FSDP groups of {fsdp}{of_tensor}")
        if fsdp * sizes.tensor % sizes.expert:
            raise ValueError(
                f"copies of {fsdp * sizes.tensor} ranks cannot be divided into expert groups of {sizes.expert}"
            )
        replicate = ranks // (fsdp * sizes.tensor)
        return cls(replicate, fsdp // sizes.context, sizes.context, sizes.tensor, sizes.expert)

    def __str__(self) -> str:
        """The sizes above 1.

        >>> str(MeshSizes(replicate=2, shard=4, tensor=2)), str(MeshSizes(shard=8, expert=4))
        ('2 replicate x 4 shard x 2 tensor', '8 shard, 4 expert')
        """
        names = ("replicate", "shard", "context", "tensor")
        sizes = " x ".join(f"{getattr(self, name)} {name}" for name in names if getattr(self, name) > 1)
        return f"{sizes}, {self.expert} expert" if self.expert > 1 else sizes

    @property
    def fsdp(self) -> int:
        """Ranks that FSDP shards the weights of one copy over."""
        return self.shard * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP shards the same experts over."""
        return self.fsdp * self.tensor // self.expert

    @property
    def model(self) -> int:
        """Ranks that compute the same samples together."""
        return self.context * self.tensor

    @property
    def averaged(self) -> int:
        """Ranks that FSDP averages gradients over."""
        return self.replicate * self.fsdp

    @property
    def data(self) -> int:
        """Groups of ranks that have samples of their own."""
        return self.replicate * self.shard


def groups_of(sizes: ParallelSizes) -> str:
    """The groups that compute the same samples: `context groups of 2 times tensor groups of 4`."""
    groups = {"context": sizes.context, "tensor": sizes.tensor}
    named = [f"{name} groups of {size}" for name, size in groups.items() if size > 1]
    return " times ".join(named)


def heads_divide(size: int, heads: int, key_heads: int) -> bool:
    """Return True if attention heads divide evenly over `size` ranks, each with the KV heads that its heads use.

    >>> heads_divide(2, 8, 2), heads_divide(4, 8, 2), heads_divide(3, 9, 2), heads_divide(16, 8, 8)
    (True, True, False, False)
    """
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


class Role(StrEnum):
    """Role of a component in training, which decides the phases it is active in."""

    LEARNER = "learner"  # trains: actor, critic
    ENGINE = "engine"  # generates: rollout, a judge served by an engine
    SCORER = "scorer"  # reads finished rollouts with a model: inference, reference
    HELPER = "helper"  # works while rollouts are generated: env, agent, reward


class Sharding(StrEnum):
    """Sharding of a learner's state over its processes."""

    FULL = "full"  # weights, gradients and optimizer state over all processes (FSDP)
    OPTIMIZER = "optimizer"  # weights and gradients over the model sizes, optimizer state over all (Megatron)
    NONE = "none"  # each process holds everything


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A component's model, and what the config says about its memory; None if it says nothing."""

    path: str | None = None
    config: Mapping[str, Any] | None = None  # the model's config.json, if its folder is on this machine
    weight_bytes: int = 2
    memory_fraction: float | None = None  # of each device, for an engine
    kv_sequences: tuple[int, int] | None = None  # most sequences in all KV caches at once, and tokens of each
    tokens: int | None = None  # of a learner's micro-batch
    recomputes: bool = True  # activation checkpointing: a learner keeps the inputs of its layers only
    recomputes_by_default: bool = False  # whether the job leaves `recomputes` to the program
    recomputed_layers: int | None = None  # number of first layers that are recomputed; None: all
    compute_bytes: int = 2  # of a weight or activation in a learner's forward and backward pass
    compiles: bool | None = None  # layers of a learner; None: by their size
    sequence: int | None = None  # tokens of the longest sequence
    longest: int | None = None  # tokens of the longest sample of a run, or of an engine's context
    sharding: Sharding = Sharding.FULL
    lora_rank: int | None = None  # of a LoRA adapter, if only that is trained
    strategy: str | None = None  # engine or training backend, if the notation names one
    optimizer: str = "adamw"  # of a learner, as train.optimizer has it
    trained_bytes: int | None = None  # of a trained weight and its moments; None: 32-bit copies beside the weights
    optimizer_on_host: bool = False  # whether a learner's optimizer state stays in host memory
    offloads: tuple[str, ...] = ()  # what a learner moves to host memory between its phases: weight, grad, optimizer
    is_saved: bool = False  # whether the checkpoints of a run have a learner or scorer
    can_sleep: bool = True  # whether an engine can free its memory without being stopped
    unused_because: str = ""  # why no phase uses the component, if the config says that

    @property
    def named_bytes(self) -> int:
        """Bytes of the dtype that a notation with a single dtype key names: the compute dtype of a trained model."""
        return self.weight_bytes if self.trained_bytes is None else self.compute_bytes

    @property
    def names_type(self) -> bool:
        """True if that key must be written: for another dtype than the default 16 bits, and for a trained model."""
        return self.named_bytes != 2 or self.trained_bytes is not None


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a job: its name in Roost, its name in the file, and the placement it asks for."""

    name: str
    written_name: str
    where: Where
    requested: RankMap | DeviceList | CpuWorkers
    parallel: ParallelSizes = ParallelSizes()
    env: tuple[tuple[str, str], ...] = ()
    role: Role = Role.HELPER
    model: ModelUse = ModelUse()


@dataclass(frozen=True, slots=True)
class EnvConfig:
    """Environment variables and interpreter of some nodes of a group; `node_ranks` None is all of the group's."""

    node_ranks: tuple[range, ...] | None
    env_vars: tuple[tuple[str, str], ...]
    python_interpreter_path: str | None
    where: Where


@dataclass(frozen=True, slots=True)
class HardwareItem:
    """One declared device such as a robot, as written; the hardware registry checks its fields."""

    fields: Mapping[str, Any]
    where: Where


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """A labelled set of nodes as written. `node_ranks` None is all nodes."""

    label: str
    node_ranks: tuple[range, ...] | None
    where: Where
    ranks_where: Where
    hardware_where: Where
    env_configs: tuple[EnvConfig, ...] = ()
    hardware_type: str | None = None
    hardware: tuple[HardwareItem, ...] | None = None
    ignore_hardware: bool = False


class Layout(StrEnum):
    """Rule by which RLinf component placements become processes: as written, or by the models' parallel sizes."""

    AS_WRITTEN = "as_written"
    MODEL_PARALLEL = "model_parallel"


@dataclass(frozen=True, slots=True)
class ModelParallelSettings:
    """Settings of the model-parallel layout."""

    recompute_logprobs: bool = False
    auto_scheduler: bool = False
    use_pre_process_policy: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a config says about machines and placement, in one form for all notations."""

    notation: Notation
    source: Source
    components: tuple[Component, ...]
    node_groups: tuple[NodeGroup, ...] = ()
    num_nodes: int | None = None
    accelerators_per_node: int | None = None
    assumes_machines: bool = False  # the two numbers are assumed; an inventory replaces them
    layout: Layout = Layout.AS_WRITTEN
    model_parallel: ModelParallelSettings = ModelParallelSettings()
    settings: Mapping[str, Any] = field(default_factory=dict)
    # component -> the component whose process 0 starts and stops it
    managers: Mapping[str, str] = field(default_factory=dict)
    training: TrainSettings | None = None  # None: the config only places
    trains: bool = False  # read to be trained by Roost, not only planned
    resolved: tuple[ResolvedSetting, ...] = ()  # the training settings with their origins
    keys: tuple[KeyUse, ...] = ()  # every key of the config, and how it is used
    warnings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()
    # Nodes of each pool and GPUs on each, of a job that does not say how many GPUs a machine has.
    pools: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def last_device(self) -> int:
        """The highest device number in device lists; -1 if there are none."""
        lists = (
            component.requested.devices for component in self.components if isinstance(component.requested, DeviceList)
        )
        return max((max(devices) for devices in lists), default=-1)


DEFAULT_ADAPTER_RANK = 16
COMPILED_SIZE = 200_000_000  # parameters from which compiling layers pays, in learner and engine
OFFLOADED_PARTS = ("weight", "grad", "optimizer")
ENGINE_STRATEGIES = ("vllm", "sglang")
_BYTES = {"32": 4, "fp32": 4, "float32": 4, "32-true": 4, "fp8": 1, "float8": 1, "int8": 1}
_MAX_CONFIG_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_LONGEST_HUB_NAME = 96


class ModelLocation(StrEnum):
    """Location of a model that a config names."""

    FOLDER = "folder"  # that is here
    MISSING = "missing"  # a path, and there is nothing at it here
    HUB = "hub"  # no folder here, and a possible name on the Hugging Face hub


def model_location(model: str) -> ModelLocation:
    """Decide whether a model is a local path or a hub name, from the name and that path alone.

    A relative path such as `runs/model` is also a possible hub name. Without a folder of that name it counts as one,
    whether or not `runs` exists; only a look-up can tell.

    >>> [model_location(name).value for name in ("Qwen/Qwen2.5-0.5B", "./Qwen", "/data/models/Qwen")]
    ['hub', 'missing', 'missing']
    """
    if _local(model) is not None:
        return ModelLocation.FOLDER
    is_name = len(model) <= _LONGEST_HUB_NAME and _HUB_NAME.fullmatch(model)
    return ModelLocation.HUB if is_name else ModelLocation.MISSING


def is_in_hub_cache(model: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the hub cache has a model; found without huggingface_hub, which planning does not import."""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    snapshots = Path(cache).expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/config.json"))


def resolve_model(model: str) -> str:
    """The absolute path of a local model, for processes with another working directory; a hub name stays as it is."""
    path = _local(model)
    return model if path is None else str(path.absolute())


def _local(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, or the home of an unknown user
        return None


def read_model_config(path: str | None) -> dict[str, Any] | None:
    """The `config.json` in a model's folder; None where the path is a hub name or the folder is elsewhere."""
    if not path:
        return None
    try:
        file = Path(path).expanduser() / "config.json"
        with file.open("rb") as stream:
            config = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: ~somebody who is not here, or nesting without end
        return None
    return config if isinstance(config, dict) else None


def first_text(*places: tuple[Section, str]) -> str | None:
    """The first text among several keys; for settings of other programs, whose other values are ignored.

    A job can be planned without it, so an unresolved interpolation is only noted.
    """
    for section, key in places:
        value = section.values.get(key)
        if isinstance(value, Unresolved):
            what = f"{shown(value.text)} is not known, and is left out"
            section.findings.note("RST-N086", section.where(key), what, value.reason, value.fix)
        if isinstance(value, str) and value:
            return value
    return None


def first_number(*places: tuple[Section, str]) -> float | None:
    """The first number above 0 among several keys."""
    for section, key in places:
        value = section.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER:
            return value
    return None


def known_count(section: Section, key: str, usual: int = 0) -> int:
    """A written number; `usual` if none is written, 0 if it is wrong or not resolved."""
    return usual if section.values.get(key) is None else int(first_number((section, key)) or 0)


def fraction_of_device(section: Section, *keys: str) -> float | None:
    """The fraction of each device's memory that an engine takes; report an error for a value that is no fraction."""
    for key in keys:
        value = section.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            what = f"is {shown(value)}; it must be a fraction above 0 and at most 1"
            section.error("RST-M001", key, what, fix="write 0.9")
            return None
        return float(value)
    return None


def bytes_of(precision: str | None) -> int:
    """Bytes of a weight in a precision as configs name it; 16 bits by default."""
    return _BYTES.get(str(precision).lower().removeprefix("torch."), 2)


def teacher_model(root: Section, component: str) -> str | None:
    """The model that `train.teacher` names for a component."""
    return first_text((root.below("train", *component.split(".")), "model"))


def role_by_name(name: str) -> Role:
    """The role of a component by its name, for notations without another sign of it."""
    if name in ("actor", "critic"):
        return Role.LEARNER
    if name == "rollout" or name.startswith("rollout_"):
        return Role.ENGINE
    if name in ("inference", "actor_inference", "critic_inference", "reference") or is_teacher(name):
        return Role.SCORER
    return Role.HELPER


def role_by_strategy(strategy: str | None, name: str) -> Role:
    """The role of a component by its ROLL strategy; without one, by its name."""
    if strategy is None:
        return role_by_name(name)
    if strategy.endswith("_train"):
        return Role.LEARNER
    if strategy in ENGINE_STRATEGIES or (strategy == "hf_infer" and name == "rollout"):
        return Role.ENGINE  # the built-in engine takes the place of Hugging Face's generate
    return Role.HELPER if name.startswith("reward") else Role.SCORER


def eos_ids(generation: Any, config: Any) -> frozenset[int]:
    """End-of-text tokens: those of the generation config if any, else those of the model's config."""
    for ids in (getattr(generation, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
