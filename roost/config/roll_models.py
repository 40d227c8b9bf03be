"""What a ROLL role says of its model: folder, precision, memory, adapter, and whether anything uses it."""

from __future__ import annotations

from roost.config.job import ModelUse, Sharding
from roost.config.model_files import (
    DEFAULT_ADAPTER_RANK,
    OFFLOADED_PARTS,
    bytes_of,
    first_number,
    first_text,
    fraction_of_device,
    read_model_config,
)
from roost.config.section import Section


def model_of_role(root: Section, section: Section, name: str, strategy: str | None) -> ModelUse:
    """The role's model: its own, or the job's; learners are always offloaded between their phases."""
    arguments = section.below("model_args")
    shared = "reward_pretrain" if name.startswith("reward") else "pretrain"
    path = first_text((arguments, "model_name_or_path"), (root, shared))
    engine = section.below("strategy_args", "strategy_config")
    lengths = [first_number((root, key)) for key in ("prompt_length", "response_length")]
    length = first_number((root, "sequence_length")) or sum(part for part in lengths if part)
    batch = first_number((section.below("training_args"), "per_device_train_batch_size")) or 1
    return ModelUse(
        path=path,
        config=read_model_config(path),
        weight_bytes=bytes_of(first_text((arguments, "dtype"))),
        memory_fraction=fraction_of_device(engine, "gpu_memory_utilization", "mem_fraction_static"),
        tokens=int(length * batch) or None,
        sequence=int(length) or None,
        lora_rank=_adapter_rank(arguments),
        strategy=strategy,
        sharding=_sharding(strategy),
        offloads=OFFLOADED_PARTS,
        can_sleep=engine.values.get("enable_sleep_mode") is not False,
        unused_because=_why_unused(root, name),
    )


def _sharding(strategy: str | None) -> Sharding:
    if str(strategy).startswith("megatron"):
        return Sharding.OPTIMIZER
    return Sharding.NONE if strategy == "hf_infer" else Sharding.FULL


def _adapter_rank(arguments: Section) -> int | None:
    if not any(key in arguments for key in ("lora_rank", "lora_target")):
        return None
    return int(first_number((arguments, "lora_rank")) or DEFAULT_ADAPTER_RANK)


def _why_unused(root: Section, name: str) -> str:
    """Why ROLL would never create the role: a critic without generalised advantages, a reference without KL."""
    estimator = root.values.get("adv_estimator")
    if name == "critic" and isinstance(estimator, str) and estimator != "gae":
        return f"adv_estimator is {estimator}, and only gae uses a critic"
    if (
        name == "reference"
        and root.values.get("enable_reference") is False
        and root.values.get("use_kl_loss") is not True
    ):
        return "enable_reference is false"
    return ""
