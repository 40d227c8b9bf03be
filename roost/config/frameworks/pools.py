"""Rules that several frameworks share: engines cut from a pool of devices, and sizes that must divide it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from roost.config.findings import Where, counted, remainder
from roost.config.frameworks.arguments import Arguments, Start, resolved
from roost.config.job import (
    EXPERT_TENSOR,
    Component,
    CpuWorkers,
    DeviceList,
    Job,
    ModelUse,
    Notation,
    ParallelSizes,
    Role,
    size_place,
)
from roost.config.shell.state import Command, Value
from roost.config.source import Section

VISIBLE = "CUDA_VISIBLE_DEVICES"
USUAL_WIDTH = 8  # GPUs of a machine that pools are taken to share


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes with equally many GPUs each; `devices` are their GPUs, numbered over all machines."""

    nodes: int
    per_node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines of equal width, and the pools on them."""

    count: int
    width: int
    pools: Mapping[str, Pool]

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Nodes of each pool, and GPUs on each."""
        return {name: (pool.nodes, pool.per_node) for name, pool in self.pools.items()}


def machines_for(sizes: Mapping[str, tuple[int, int]], usual: int = USUAL_WIDTH) -> Machines:
    """The machines to plan on, for pools of (nodes, GPUs per node) in order.

    Pools with equal node counts share machines if all fit into usual ones. Otherwise machines are as wide as the widest
    pool, and each node of a pool is the first machine with enough GPUs left, so that no node is split over two.

    >>> machines_for({"trainer": (1, 4), "rollout": (1, 8)}).pools["rollout"].devices
    (8, 9, 10, 11, 12, 13, 14, 15)
    """
    together = sum(per_node for _, per_node in sizes.values())
    is_shared = len({nodes for nodes, _ in sizes.values()}) == 1 and together <= usual
    width = together if is_shared else max(per_node for _, per_node in sizes.values())
    used: list[int] = []  # GPUs of each machine
    pools = {}
    for name, (nodes, per_node) in sizes.items():
        fitting = [index for index, count in enumerate(used) if count + per_node <= width][:nodes]
        fitting += range(len(used), len(used) + nodes - len(fitting))
        used += [0] * (fitting[-1] + 1 - len(used))
        devices: list[int] = []
        for index in fitting:
            start = index * width + used[index]
            devices += range(start, start + per_node)
            used[index] += per_node
        pools[name] = Pool(nodes, per_node, tuple(devices))
    return Machines(len(used), width, pools)


def on_machines_of(width: int, job: Job) -> Job:
    """The job with its pools on machines of this width, instead of those that its reader assumed."""
    before, after = machines_for(job.pools), machines_for(job.pools, width)
    moved = {
        old: new
        for name, pool in before.pools.items()
        for old, new in zip(pool.devices, after.pools[name].devices, strict=True)
    }
    components = (
        replace(part, requested=DeviceList([moved[one] for one in part.requested.devices], part.requested.per_process))
        if isinstance(part.requested, DeviceList)
        else part
        for part in job.components
    )
    job = replace(job, components=tuple(components), pools={})
    if job.num_nodes is None:  # an inventory says it
        return job
    return replace(job, num_nodes=after.count, accelerators_per_node=after.width)


def engines_on(
    devices: Sequence[int],
    size: int,
    where: Where,
    root: Section,
    what: str = "engine",
    note: str = "",
    smaller: str = "",
) -> list[int]:
    """The devices of as many engines as fit; warns about those left over, and reports an error if none fits.

    `note` says where a size that is not written comes from; `smaller` is what to write for engines that fit.
    """
    count = len(devices) // size
    if count == 0:
        root.findings.error(
            "RST-N057",
            where,
            f"makes each {what} {counted(size, 'GPU')} large, but it has {counted(len(devices), 'GPU')}",
            f"{note}{len(devices)} // {size} = 0",
            f"{f'write {smaller}' if smaller else 'make it smaller'}, or give it at least {size} GPUs",
        )
        return []
    left = len(devices) % size
    if left:
        root.findings.warn(
            "RST-N055",
            where,
            f"leaves {counted(left, 'GPU')} without {'an' if what[0] in 'aeiou' else 'a'} {what}",
            f"{counted(len(devices), 'GPU')} % {size} for each = {left}; the program rounds down and says nothing",
            f"choose a size that divides {len(devices)}",
        )
    return list(devices[: count * size])


def check_divides(
    sizes: ParallelSizes, count: int, where: Where, root: Section, names: str = "", what: str = "learner"
) -> None:
    """Check that the parts of a model divide its devices; `names` describes sizes other than the usual three."""
    names = names or f"tensor {sizes.tensor} * pipeline {sizes.pipeline} * context {sizes.context}"
    if count % sizes.model:
        root.findings.error(
            "RST-N056",
            where,
            f"gives the {what} {counted(count, 'GPU')}, which the model's {sizes.model} parts do not divide",
            f"{names}: {remainder(count, sizes.model)}",
            f"use a multiple of {sizes.model} GPUs, or smaller sizes",
        )


def engine_experts(section: Section, key: str, gpus: int, root: Section, program: str) -> int:
    """The expert size of an engine: 1, or all `gpus` of a stage; TensorRT-LLM takes others too."""
    expert = section.whole_number(key, 1, 1) or 1
    if expert not in (1, gpus) and section.values.get("name") != "trtllm":
        root.findings.error(
            "RST-N056",
            section.where(key),
            f"is {expert}; it is 1, or the {gpus} GPUs of each stage of an engine",
            f"tensor size * data size = {gpus}; {program} ends with an assertion",
            f"write {section.spell(key, gpus)}",
        )
    return expert


def add_visible(arguments: Arguments, command: Command, *section: str) -> None:
    """Add the GPUs that a command may see."""
    visible = command.variables.get(VISIBLE)
    if isinstance(visible, Value):
        text = visible.known if visible.known is not None else resolved(visible)
        arguments.set((*section, VISIBLE), text, visible.position)


def add_visible_of_script(arguments: Arguments, start: Start) -> None:
    """Add the GPUs that a script lets its command see; a running Ray has those that it was started with."""
    visible = start.command.variables.get(VISIBLE)
    if isinstance(visible, Value) and visible.position[1] is not None and "ray" not in start.before:
        add_visible(arguments, start.command)


def visible_devices(section: Section, *keys: str) -> list[int] | None:
    """The GPUs that a command may see, from the first key that lists some."""
    for key in (*keys, VISIBLE):
        value = section.get(key)
        parts = re.fullmatch(r"\d{1,6}(,\d{1,6})*", str(value).replace(" ", ""))
        if value is not None and parts is not None:
            return [int(part) for part in parts[0].split(",")]
    return None


def enough_visible(ids: list[int] | None, needed: int, section: Section, what: str = "processes") -> list[int] | None:
    """The first `needed` GPUs that a command may see; reports an error if there are fewer."""
    if ids is not None and len(ids) < needed:
        section.error(
            "RST-N082",
            VISIBLE,
            f"shows {counted(len(ids), 'GPU')} to {needed} {what}",
            f"{','.join(map(str, ids))} {'is' if len(ids) == 1 else 'are'} {len(ids)}, fewer than {needed}",
            "show more GPUs, or start fewer",
        )
        return None
    return ids[:needed] if ids is not None else None


def megatron_sizes(
    section: Section, are_flags: bool = False, default: ParallelSizes = ParallelSizes()
) -> ParallelSizes:
    """Sizes by Megatron's names, as keys or as flags."""
    names = (*(f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline")), "context_parallel_size")
    keys = (f"--{name.replace('_', '-')}" if are_flags else name for name in (*names, "expert_model_parallel_size"))
    others = (default.tensor, default.pipeline, default.context, default.expert)
    sizes = ParallelSizes(*(section.whole_number(key, 1, other) or 1 for key, other in zip(keys, others, strict=True)))
    of_experts = f"--{EXPERT_TENSOR.replace('_', '-')}" if are_flags else EXPERT_TENSOR
    return replace(sizes, expert_tensor=section.whole_number(of_experts, 1, default.expert_tensor))


def check_expert_parts(sizes: ParallelSizes, count: int, where: Where, part: Section, what: str = "learner") -> None:
    """Check that the expert sizes of Megatron in `part` divide the model's devices."""
    if sizes.expert_tensor is None:
        return
    parts = sizes.expert_tensor * sizes.expert * sizes.pipeline
    if count % parts:
        part.findings.error(
            "RST-N056",
            size_place(where, ".".join(map(str, part.path)), "expert_tensor"),
            f"splits experts over {parts} GPUs, which do not divide the {count} of the {what}",
            f"expert tensor {sizes.expert_tensor} * expert {sizes.expert} * pipeline {sizes.pipeline}: "
            f"{remainder(count, parts)}; Megatron ends with a RuntimeError",
            f"use a multiple of {parts} GPUs, or smaller sizes",
        )


@dataclass(slots=True)
class Reader:
    """Base of the readers of jobs: the config, and the components that were found in it."""

    root: Section
    notation: Notation
    components: list[Component] = field(default_factory=list)

    def add(
        self,
        name: str,
        written: str,
        where: Where,
        requested: DeviceList | CpuWorkers,
        role: Role,
        parallel: ParallelSizes | None = None,
        model: ModelUse | None = None,
    ) -> None:
        sizes, use = parallel or ParallelSizes(), model or ModelUse()
        self.components.append(Component(name, written, where, requested, sizes, (), role, use))

    def devices_of(self, name: str) -> set[int]:
        """The GPUs of a component; none if the job does not have it."""
        requested = (part.requested for part in self.components if part.name == name)
        return {device for one in requested if isinstance(one, DeviceList) for device in one.devices}

    def place(self, path: str) -> Where:
        """The position of a dotted key."""
        return self.root.where(*path.split("."))

    def inner(self, path: str) -> tuple[Section, str]:
        """The section of a dotted key, and the key in it."""
        *above, key = path.split(".")
        return self.root.below(*above), key

    def does_not_fit(self, where: Where, what: str, why: str, fix: str) -> None:
        """Report a share of the machines that is missing or does not fit."""
        self.root.findings.error("RST-N070", where, what, why, fix)

    @property
    def program(self) -> str:
        """The program that a script starts, without .py; empty for a config."""
        launch = self.root.source.launch
        return launch.program.removesuffix(".py") if launch is not None else ""

    def as_job(self, nodes: int, per_node: int, settings: Mapping[str, object]) -> Job:
        """The job of these components; without engines, settings of engines are left out."""
        if not any(part.role is Role.ENGINE for part in self.components):
            of_engines = ("engines_sleep", "async_rollouts", "async_generation_ratio")
            settings = {key: value for key, value in settings.items() if key not in of_engines}
        return Job(
            self.notation,
            self.root.source,
            tuple(self.components),
            num_nodes=nodes,
            accelerators_per_node=per_node,
            settings=settings,
        )
