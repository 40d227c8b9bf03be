"""Facts about a component's model that notations share, and the words each has for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.job import ModelUse, Notation, Role, Sharding
from roost.placement.component_plan import ComponentPlan

KEEP = "keep the notation it is written in"
NOTHING = "nothing"
# Engines of programs that have one kind only.
_ONLY_ENGINE = {Notation.LOOP: "vllm", Notation.SLIME: "sglang", Notation.MILES: "sglang"}
_SAME_ENGINE = {"huggingface": "hf", "hf_infer": "hf", "transformers": "hf"}
_SAME_LEARNER = {"fsdp2": "fsdp", "dtensor": "fsdp"}  # DTensor of NeMo-RL is FSDP2
# The fields of `ModelUse` that a component of the role uses.
_OF_ALL = ("path", "weight_bytes", "strategy", "unused_because")
_OF_ROLE = {
    Role.LEARNER: (*_OF_ALL, "sharding", "lora_rank", "offloads", "tokens", "sequence", "recomputes"),
    Role.SCORER: (*_OF_ALL, "sharding"),
    Role.ENGINE: (*_OF_ALL, "memory_fraction", "can_sleep", "sequence"),
    Role.HELPER: _OF_ALL,
}


def backend(part: ComponentPlan, notation: Notation) -> str | None:
    """Backend of a component's model, in one word for all notations; None if the job does not say it.

    >>> backend_word("megatron_train"), backend_word("fsdp2"), backend_word("huggingface")
    ('megatron', 'fsdp', 'hf')
    """
    if part.role is Role.ENGINE and part.model.strategy is None:
        return _ONLY_ENGINE.get(notation)
    if part.model.strategy is None and part.role is Role.LEARNER:
        return learner_backend(part)
    return backend_word(part.model.strategy)


def learner_backend(part: ComponentPlan, known: Collection[str] = ("fsdp", "megatron")) -> str:
    """Training backend of a component for a framework that has the `known` ones; FSDP in place of others."""
    if part.model.strategy is None:
        return "megatron" if part.model.sharding is Sharding.OPTIMIZER else "fsdp"
    word = backend_word(part.model.strategy)
    return word if word is not None and word in known else "fsdp"


def backend_word(strategy: str | None) -> str | None:
    if strategy is None or strategy in _SAME_ENGINE:
        return _SAME_ENGINE.get(strategy or "")
    name = strategy.removesuffix("_train").removesuffix("_infer")
    return _SAME_LEARNER.get(name, name)


def precision(model: ModelUse) -> str:
    """The word for the bytes of a weight that all notations read."""
    return {4: "fp32", 1: "fp8"}.get(model.weight_bytes, "bf16")


def has_devices(part: ComponentPlan) -> bool:
    return len(part.table.device_ranks) > 0


def is_dealt(part: ComponentPlan) -> bool:
    """Return True for workers without devices that nothing placed: they are dealt out over the nodes."""
    return part.strategy == "SpreadPlacementStrategy"


def refuse_without(parts: Mapping[str, ComponentPlan], names: Sequence[str], findings: Findings) -> bool:
    """Return False, with a finding, where a component that the program cannot do without has no devices."""
    missing = [name for name in names if name not in parts]
    for name in missing:
        findings.error("RST-N048", Where(path=(name,)), "needs devices, and the plan gives it none", fix=KEEP)
    return not missing


def size_of_all(part: ComponentPlan, program: str, findings: Findings) -> int:
    """The devices of each engine; engines of several sizes are a finding."""
    sizes = np.unique(np.diff(part.table.offsets)).tolist()
    if len(sizes) > 1:
        why = f"its processes hold {', '.join(map(str, sizes))}"
        findings.error("RST-N049", Where(path=(part.name,)), f"{program} has engines of one size", why, KEEP)
    return int(sizes[-1])


def uses_model(part: ComponentPlan) -> bool:
    """Return True if a component runs a model on accelerators; helpers may, where one is named for them."""
    return part.role is not Role.HELPER or (part.model.path is not None and has_devices(part))


def model_changes(
    before: ComponentPlan, after: ComponentPlan, notation: Notation, other: Notation
) -> Iterator[tuple[str, str, str]]:
    """Fields of a component's model that are not what they were: name, old and new value."""
    if not uses_model(before):
        return
    for field in fields(ModelUse):
        old, new = getattr(before.model, field.name), getattr(after.model, field.name)
        if field.name not in _OF_ROLE[before.role] or old == new:
            continue
        if field.name == "path" and old is None:
            continue  # the other notation has one path for all that use the model
        if field.name == "strategy":
            old, new = backend(before, notation), backend(after, other)
            if old is None or old == new:
                continue
        yield field.name, _word(old), _word(new)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(value) or NOTHING
    return NOTHING if value in (None, "") else str(value)
