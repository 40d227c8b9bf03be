"""Fixes for an over-full device: changes to the plan with which everything fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from roost.config.job import OFFLOADED_PARTS, Notation, Role, Sharding
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.model import (
    ENGINE_FRACTION,
    MIN_ENGINE_FRACTION,
    RESERVED_FRACTION,
    cached_bytes,
    engine_memory,
    engine_sizes,
    known_shape,
    kv_tokens,
)
from roost.placement.memory.phases import Phase, State
from roost.placement.memory.traffic import micro_batch_tokens

if TYPE_CHECKING:
    from roost.placement.memory.residency import ClassResidency

LEAST_TOKENS = 1024  # of a micro-batch that a fix suggests; with smaller ones a device is idle
MORE_DEVICES = "use more devices or larger parallel sizes"

Parts = Mapping[str, ComponentPlan]
Fits = Callable[[Parts], bool]  # whether the device has room once these components are as given
Change = tuple[str, Parts]  # a fix, and the components that it changes


def fix_of(
    residency: ClassResidency, phase: Phase, by_name: Parts, notation: Notation, excess: float, fits: Fits
) -> str:
    """Fixes for a device that is over-full by `excess` GiB in a phase: single changes, else a pair of them."""
    held = {name: by_name[name] for name in residency.device_class.components}
    ways = {
        "settings": [*_settings(by_name), *_micro_batches(by_name)],
        "offload": [*_offloads(residency, phase, by_name, notation)],
        "shard": [*_shards(held)],
        "fraction": [*_fractions(residency, phase, held, excess)],
    }
    first = ("settings", "shard") if phase is Phase.LEARN else ("offload", "shard", "fraction")
    for names in (first, tuple(name for name in ways if name not in first)):
        found = [fix for name in names if (fix := _first(ways[name], fits))]
        if found:
            return ", or ".join(found if "settings" in names else [*found, MORE_DEVICES])
    # Where learners learn, to offload between phases is of no use alone; generation may need it as well.
    offloads = ways["offload"] or [*_offloads(residency, Phase.GENERATE, by_name, notation)]
    if pair := _first(_pairs(offloads[-1:] + ways["shard"], [*ways["settings"], *ways["shard"]]), fits):
        return pair
    if ways["offload"] and (pair := _offload_with_fraction(residency, phase, held, ways["offload"][-1], fits)):
        return pair
    return f"{MORE_DEVICES}, or smaller batches" if len(held) == 1 else MORE_DEVICES


def _first(changes: Sequence[Change], fits: Fits) -> str:
    """The first change that is enough; empty if none is."""
    return next((fix for fix, changed in changes if fits(changed)), "")


def _pairs(ones: Sequence[Change], others: Sequence[Change]) -> list[Change]:
    """Each pair of changes as one change; `_both` merges components that both change."""
    return [
        (f"{one}, and {other}", {**changed, **_both(changed, more)})
        for one, changed in ones
        for other, more in others
        if one != other
    ]


def _both(changed: Parts, more: Parts) -> Parts:
    """Components with both changes; offloads and sharding that the first one sets win."""
    return {
        name: part
        if name not in changed
        else replace(
            part,
            model=replace(part.model, offloads=changed[name].model.offloads or part.model.offloads),
            parallel=changed[name].parallel if changed[name].parallel.shard is None else part.parallel,
        )
        for name, part in more.items()
    }


def _settings(parts: Parts) -> Iterator[Change]:
    """Settings of Roost's learner, the cheapest first; a smaller micro-batch than the longest sample saves nothing."""
    learners = [part for part in parts.values() if part.role is Role.LEARNER and part.model.trained_bytes is not None]
    if not learners:
        return

    def with_fields(**fields: object) -> Parts:
        return {part.name: replace(part, model=replace(part.model, **fields)) for part in learners}  # type: ignore[arg-type]

    if not all(part.model.recomputes for part in learners):
        yield "write activation_checkpointing: true in train", with_fields(recomputes=True)
    if not learners[0].model.optimizer_on_host:
        yield "write optimizer_cpu_offload: true in train", with_fields(optimizer_on_host=True)
    for tokens in _fewer_tokens(learners):
        yield f"write micro_batch_tokens: {tokens} in train", with_fields(tokens=tokens)
    if learners[0].model.optimizer == "adamw":
        yield "write optimizer: adamw_8bit in train", with_fields(optimizer="adamw_8bit")


def _micro_batches(parts: Parts) -> Iterator[Change]:
    """Smaller micro-batches of learners of other programs, which have keys of their own for tokens or samples."""
    learners = [part for part in parts.values() if part.role is Role.LEARNER and part.model.tokens is not None]
    if not learners or any(part.model.trained_bytes is not None for part in learners):
        return
    most = max(map(micro_batch_tokens, learners))
    for tokens in _fewer_tokens(learners):
        changed = {
            part.name: replace(part, model=replace(part.model, tokens=min(micro_batch_tokens(part), tokens)))
            for part in learners
        }
        yield f"make micro-batches {most // tokens} times smaller: at most {tokens:,} tokens", changed


def _fewer_tokens(learners: Sequence[ComponentPlan]) -> Iterator[int]:
    """The tokens of the largest micro-batch halved again and again, down to those of the longest sample."""
    tokens = max(map(micro_batch_tokens, learners))
    least = max(LEAST_TOKENS, *(max(part.model.sequence or 0, part.model.longest or 0) for part in learners))
    while tokens // 2 >= least:
        tokens //= 2
        yield tokens


def _offloads(residency: ClassResidency, phase: Phase, parts: Parts, notation: Notation) -> Iterator[Change]:
    """Offload learners that stay on the device between their phases: each alone, and all together."""
    if len(residency.device_class.components) == 1:
        return
    staying = [share.component for share in residency.phases[phase] if share.state in (State.STAYS, State.OFFLOADED)]
    learners = [
        parts[name]
        for name in staying
        if parts[name].role is Role.LEARNER
        and set(parts[name].model.offloads) < set(_offloadable(parts[name], notation))
    ]
    for some in [*([part] for part in learners), *([learners] if len(learners) > 1 else [])]:
        names = " and ".join(part.name for part in some)
        changed = {
            part.name: replace(part, model=replace(part.model, offloads=_offloadable(part, notation))) for part in some
        }
        keys = ", ".join(dict.fromkeys(_offload_keys(part, notation) for part in some))
        yield f"let the {names} offload ({keys})", changed


def _offloadable(part: ComponentPlan, notation: Notation) -> tuple[str, ...]:
    """Parts of a learner that the notation has keys for: verl with FSDP has none for gradients."""
    is_fsdp = notation is Notation.VERL and part.model.sharding is not Sharding.OPTIMIZER
    return tuple(each for each in OFFLOADED_PARTS if each != "grad") if is_fsdp else OFFLOADED_PARTS


def _offload_keys(part: ComponentPlan, notation: Notation) -> str:
    """The keys that offload a learner."""
    if notation is not Notation.VERL:
        return "offload_weight, offload_grad, offload_optimizer"
    if part.model.sharding is Sharding.OPTIMIZER:
        return f"{part.written_name}.megatron.{{param,grad,optimizer}}_offload"
    state = "fsdp" if part.name == "critic" else "fsdp_config"
    return f"{part.written_name}.{state}.{{param,optimizer}}_offload"


def _shards(parts: Parts) -> Iterator[Change]:
    """Shard over all ranks the learners and scorers that FSDP copies (HSDP): each alone, and all together."""
    copied = [
        part
        for part in parts.values()
        if (mesh := part.mesh) is not None and part.model.sharding is Sharding.FULL and mesh.replicate > 1
    ]
    for some in [*([part] for part in copied), *([copied] if len(copied) > 1 else [])]:
        names = " and ".join(part.name for part in some)
        changed = {part.name: replace(part, parallel=replace(part.parallel, shard=None)) for part in some}
        ranks = " and ".join(dict.fromkeys(str(part.world_size // part.parallel.tensor) for part in some))
        now = " and ".join(dict.fromkeys(str(part.mesh.fsdp) for part in some if part.mesh is not None))
        yield f"shard the {names} over all {ranks} ranks, not {now} (fsdp_size)", changed


def _fractions(residency: ClassResidency, phase: Phase, parts: Parts, excess: float) -> Iterator[Change]:
    """Give an engine a fraction of the device that is smaller by `excess` GiB.

    First one that keeps what the driver, NCCL and fragmentation need, then one that just fits.
    """
    reserve = (1 - RESERVED_FRACTION) * (residency.device_class.memory_gb or 0.0)
    yield from _smaller_fractions(residency, phase, parts, excess + reserve)
    yield from _smaller_fractions(residency, phase, parts, excess)


def _smaller_fractions(residency: ClassResidency, phase: Phase, parts: Parts, less: float) -> Iterator[Change]:
    """Give an engine `less` GiB less of the device, if its KV cache still holds one sequence."""
    memory = residency.device_class.memory_gb
    for share in residency.phases[phase]:
        part = parts[share.component]
        if memory is None or part.role is not Role.ENGINE or share.state not in (State.RUNS, State.STAYS):
            continue
        now = part.model.memory_fraction or ENGINE_FRACTION
        fraction = math.floor((now - less / memory) * 100) / 100
        shape, sizes = known_shape(part), engine_sizes(part)
        if shape is None or fraction < MIN_ENGINE_FRACTION:
            continue
        cache = engine_memory(shape, sizes, memory, fraction, part.model.weight_bytes).kv_cache
        if kv_tokens(shape, sizes, cache, cached_bytes(part)) >= max(part.model.longest or part.model.sequence or 1, 1):
            changed = {part.name: replace(part, model=replace(part.model, memory_fraction=fraction))}
            yield f"give the engines of {part.name} a memory fraction of {fraction:g}", changed


def _offload_with_fraction(residency: ClassResidency, phase: Phase, parts: Parts, offload: Change, fits: Fits) -> str:
    """The offload together with a memory fraction of an engine; empty if there is none with which everything fits.

    What is still in excess after the offload is found by trying.
    """
    fix, changed = offload

    def with_offload(others: Iterator[Change]) -> list[Change]:
        return [(f"{fix}, and {other}", {**changed, **more}) for other, more in others]

    for excess in range(1, math.ceil(residency.device_class.memory_gb or 0.0)):
        if _first(with_offload(_smaller_fractions(residency, phase, parts, excess)), fits):
            return _first(with_offload(_fractions(residency, phase, parts, excess)), fits)
    return ""
