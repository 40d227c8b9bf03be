"""Engines of verl: their sizes, and the devices that they are cut from."""

from __future__ import annotations

from collections.abc import Sequence

from roost.config.findings import Where, counted
from roost.config.frameworks.pools import Pool, engine_experts, engines_on
from roost.config.frameworks.verl_checks import check_engine_parts
from roost.config.job import ParallelSizes
from roost.config.source import Section

TENSOR = 2  # GPUs of an engine by default, of the policy's and of a reward model's


def engine_size(section: Section, root: Section) -> tuple[int, ParallelSizes]:
    """GPUs of an engine, and its parallel sizes."""
    tensor = section.whole_number("tensor_model_parallel_size", 1, TENSOR) or 1
    data, pipeline = (section.whole_number(f"{name}_parallel_size", 1, 1) or 1 for name in ("data", "pipeline_model"))
    parts = section.below("disaggregation")
    width = tensor
    if parts.flag("enabled"):
        prefill = parts.whole_number("prefill_replicas", 1, 1) or 1
        decode = parts.whole_number("decode_replicas", 1, 1) or 1
        width = tensor * prefill + (parts.whole_number("decode_tensor_model_parallel_size", 1) or tensor) * decode
    expert = engine_experts(section, "expert_parallel_size", tensor * data, root, "verl")
    return width * data * pipeline, ParallelSizes(tensor=tensor, pipeline=pipeline, expert=expert)


def _cut(
    devices: Sequence[int], size: int, engine: Section, where: Where, root: Section, what: str = "engine"
) -> list[int]:
    """The devices of engines whose sizes are in the section `engine`."""
    key = "tensor_model_parallel_size"
    note = "" if key in engine else f"verl's default of {key} is {TENSOR}; "
    tensor = engine.whole_number(key, 1, TENSOR) or 1
    fitting = len(devices) * tensor // size
    smaller = engine.spell(key, fitting) if fitting and size % tensor == 0 else ""
    return engines_on(devices, size, where, root, what, note, smaller)


def cut_pool(
    pool: Pool, size: int, engine: Section, where: Where, root: Section, gpus: Where, what: str = "engine"
) -> list[int]:
    """The devices of engines that are cut from all GPUs of a pool, one after another; `gpus` names GPUs per node."""
    width = pool.per_node
    check_engine_parts(size, width, gpus, root)
    if size < width and width % size and pool.nodes > 1:
        divisor = next(number for number in range(size, 0, -1) if width % number == 0)
        root.findings.warn(
            "RST-N056",
            where,
            f"makes each {what} {counted(size, 'GPU')} large, and nodes have {width}: some would be on two nodes",
            f"{width} % {size} = {width % size}; verl mixes the GPU numbers of both nodes, and does not start them",
            f"use engines of {counted(divisor, 'GPU')}, or of another size that divides {width}",
        )
    return _cut(pool.devices, size, engine, where, root, what)


def standalone(section: Section, engine: Section, size: int, pool: Pool | None, root: Section) -> list[int]:
    """The devices of engines on nodes of their own."""
    if pool is None:
        return []
    if pool.nodes > 1 and size < pool.per_node and pool.per_node % size:
        return _packed(section, size, pool, root)
    check_engine_parts(size, pool.per_node, section.where("n_gpus_per_node"), root)
    return _cut(pool.devices, size, engine, section.where("nnodes"), root)


def _packed(section: Section, size: int, pool: Pool, root: Section) -> list[int]:
    """The devices of engines none of which is on two nodes."""
    count, on_node = len(pool.devices) // size, pool.per_node // size
    where, packed = section.where("n_gpus_per_node"), pool.nodes * on_node
    if packed < count:
        root.findings.error(
            "RST-N057",
            where,
            f"is {pool.per_node}, so that {counted(packed, 'engine')} of {size} GPUs fit, but verl starts {count}",
            f"each has to be on one node: {pool.nodes} * ({pool.per_node} // {size}) = {packed}; "
            f"verl counts {len(pool.devices)} // {size} = {count}, and waits forever",
            f"use engines whose size divides {pool.per_node}",
        )
        return []
    left = len(pool.devices) - count * size
    root.findings.warn(
        "RST-N055",
        where,
        f"leaves {counted(left, 'GPU')} without an engine",
        f"{pool.per_node} of a node % {size} for each engine = {pool.per_node % size}",
        f"choose a size that divides {pool.per_node}",
    )
    starts = range(0, len(pool.devices), pool.per_node)
    found = [device for at in starts for device in pool.devices[at : at + on_node * size]]
    return found[: count * size]
