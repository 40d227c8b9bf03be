"""Facts about a component's model in words that all notations share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from roost.config.job import Notation, Role, Sharding
from roost.config.notations.algorithm import ESTIMATOR, KL_COEF
from roost.placement.component_plan import ComponentPlan
from roost.placement.plan import Plan

# Engines of programs that have one kind only.
_ONLY_ENGINE = {Notation.LOOP: "vllm", Notation.SLIME: "sglang", Notation.MILES: "sglang"}
_SAME_ENGINE = {"huggingface": "hf", "hf_infer": "hf", "transformers": "hf"}
_SAME_LEARNER = {"fsdp2": "fsdp", "dtensor": "fsdp"}  # DTensor of NeMo-RL is FSDP2

_WHITEN_GAE = (Notation.VERL, Notation.OPENRLHF)  # always; elsewhere it is a switch


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


def has_devices(part: ComponentPlan) -> bool:
    return len(part.table.device_ranks) > 0


def uses_model(part: ComponentPlan) -> bool:
    """Return True if a component runs a model on accelerators; helpers may, where one is named for them."""
    return part.role is not Role.HELPER or (part.model.path is not None and has_devices(part))


def whitens_gae(plan: Plan) -> bool:
    """Return True if generalised advantages are whitened without a key that says it."""
    return plan.notation in _WHITEN_GAE and plan.settings.get(ESTIMATOR) == "gae"


def with_reference(plan: Plan) -> list[ComponentPlan]:
    """The components, and a reference beside the actor where the job's learner computes KL by itself."""
    parts = list(plan.components)
    names = {part.name: part for part in parts}
    if KL_COEF not in plan.settings or "reference" in names or "actor" not in names:
        return parts
    actor = names["actor"]
    frozen = replace(actor.model, lora_rank=None, offloads=(), tokens=None, memory_fraction=None)
    return [*parts, replace(actor, name="reference", written_name="reference", role=Role.SCORER, model=frozen)]
