"""A job as read from any notation: machines, components, training settings, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from roost.config.findings import Finding, Where
from roost.config.known_keys.tables import KeyUse
from roost.config.ranks import Segment
from roost.config.source import Source

if TYPE_CHECKING:
    from roost.config.train import TrainSettings

COMMAND_LINE = "command line"  # the file of a key that an override wrote
AUTO = "auto"  # a setting that the plan decides


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
    """The notations Roost reads: three that it also trains from and writes, and the jobs of other frameworks."""

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
        """Return True if Roost reads training settings of the notation and writes it; the others are planned only."""
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
    """Accelerators of the whole cluster in the order written, cut into processes (ROLL, ml-loop).

    The last process takes what is left over, where the devices do not divide.
    """

    devices: Sequence[int]
    per_process: int


@dataclass(frozen=True, slots=True)
class CpuWorkers:
    """Processes without devices, dealt out over the nodes in turn (ROLL)."""

    count: int


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Parallel sizes of one copy of a model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1  # how many processes the experts of a mixture are cut over, within the others
    shard: int | None = None  # processes that FSDP shards a learner over, context groups among them; None: all

    @property
    def model(self) -> int:
        return self.tensor * self.pipeline * self.context


def family(name: str) -> str:
    """The component that a part of it belongs to: engines for prefill and for decode are both engines of the policy.

    >>> family("rollout.prefill"), family("rollout")
    ('rollout', 'rollout')
    """
    return name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Dimensions of a learner's device mesh; ranks of the last are neighbours."""

    replicate: int = 1  # copies of the sharded weights (HSDP)
    shard: int = 1  # ranks with samples of their own that share one copy of the weights (FSDP)
    context: int = 1  # ranks that share the tokens of a batch, and the weights as well
    tensor: int = 1  # ranks that share every matrix product
    expert: int = 1  # ranks among those of FSDP and tensor that share the experts of a mixture

    @classmethod
    def of(cls, sizes: ParallelSizes, ranks: int) -> MeshSizes:
        """The mesh of so many ranks. Raise ValueError if they cannot be divided so.

        >>> MeshSizes.of(ParallelSizes(tensor=2, shard=2), 8)
        MeshSizes(replicate=2, shard=2, context=1, tensor=2, expert=1)
        """
        if ranks % (sizes.context * sizes.tensor):
            raise ValueError(f"{ranks} ranks cannot be divided into {_groups_of(sizes)}")
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


def _groups_of(sizes: ParallelSizes) -> str:
    groups = {"context": sizes.context, "tensor": sizes.tensor}
    named = [f"{name} groups of {size}" for name, size in groups.items() if size > 1]
    return " times ".join(named)


def heads_divide(size: int, heads: int, key_heads: int) -> bool:
    """Return True if each of `size` ranks gets as many heads, and the key heads that they use.

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
    """A component's model and its memory as the config has them; None where it has nothing."""

    path: str | None = None
    config: Mapping[str, Any] | None = None  # the model's config.json, where its folder is on this machine
    weight_bytes: int = 2
    memory_fraction: float | None = None  # of each device, for an engine
    kv_sequences: tuple[int, int] | None = None  # at most in all KV caches at once, and the tokens of each
    tokens: int | None = None  # that a learner works on at a time
    recomputes: bool = True  # activations of a learner, which then keeps the inputs of its layers only
    recomputed_layers: int | None = None  # the first so many, where it recomputes; None: all
    compute_bytes: int = 2  # of weights and activations in a learner's passes
    compiles: bool | None = None  # layers of a learner; None: by their size
    sequence: int | None = None  # tokens of the longest sequence
    sharding: Sharding = Sharding.FULL
    lora_rank: int | None = None  # of a LoRA adapter, where only that is trained
    strategy: str | None = None  # the name of what runs it, where the notation has one
    optimizer: str = "adamw"  # of a learner, as train.optimizer has it
    optimizer_on_host: bool = False  # whether a learner's optimizer state stays in host memory
    offloads: tuple[str, ...] = ()  # what a learner moves to host memory between its phases: weight, grad, optimizer
    can_sleep: bool = True  # whether an engine can free its memory without being stopped
    unused_because: str = ""  # why no phase ever uses the component, where the config says so


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a job: its name in Roost's words, its name in the file, and what was asked for it."""

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
    """One declared device such as a robot, as written; the hardware registry knows which fields it may have."""

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
    """Inputs of the model-parallel layout beside the ranks."""

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
    layout: Layout = Layout.AS_WRITTEN
    model_parallel: ModelParallelSettings = ModelParallelSettings()
    settings: Mapping[str, Any] = field(default_factory=dict)
    managers: Mapping[str, str] = field(
        default_factory=dict
    )  # component -> component whose process 0 starts and stops it
    training: TrainSettings | None = None  # where the config says how to train, not only where
    resolved: tuple[ResolvedSetting, ...] = ()  # the training settings with their origins
    keys: tuple[KeyUse, ...] = ()  # every key of the config, and what becomes of it
    warnings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def last_device(self) -> int:
        """The highest device number that device lists name; -1 where there is none."""
        lists = (
            component.requested.devices for component in self.components if isinstance(component.requested, DeviceList)
        )
        return max((max(devices) for devices in lists), default=-1)
