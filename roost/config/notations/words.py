"""Words of other programs and their meaning in Roost, and readers of values that several notations share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from roost.config.findings import shown
from roost.config.job import Component, Job
from roost.config.source import Section
from roost.config.train import (
    AdvantageEstimator,
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LrSchedulerType,
    OptimizerType,
    WsdDecayStyle,
)

ESTIMATORS = {
    "grpo": AdvantageEstimator.GRPO,
    "gae": AdvantageEstimator.GAE,
    "reinforce++": AdvantageEstimator.REINFORCE,
    "reinforce_pp": AdvantageEstimator.REINFORCE,
    "rloo": AdvantageEstimator.LEAVE_ONE_OUT,
    "leave_one_out": AdvantageEstimator.LEAVE_ONE_OUT,
    "leave_none_out": AdvantageEstimator.GROUP_MEAN,
}
AGGREGATIONS = {each.value: each for each in LossAggregation}
DIVERGENCES = {
    "kl": KlEstimator.K1,
    "k1": KlEstimator.K1,
    "mse": KlEstimator.K2,
    "k2": KlEstimator.K2,
    "low_var_kl": KlEstimator.K3,
    "k3": KlEstimator.K3,
    "abs": KlEstimator.ABS,
}
# Levels of rollout correction in verl and TRL: their weight of a sequence is the product of its tokens' weights.
IS_LEVELS = {"token": ImportanceSamplingLevel.TOKEN, "sequence": ImportanceSamplingLevel.TRAJECTORY}
OPTIMIZERS = {
    "adam": OptimizerType.ADAMW,
    "adamw": OptimizerType.ADAMW,
    "muon": OptimizerType.MUON,
    "adamw8bit": OptimizerType.ADAMW_8BIT,
    "adamw_8bit": OptimizerType.ADAMW_8BIT,
    "adamw_bnb_8bit": OptimizerType.ADAMW_8BIT,
    "adamw_torch": OptimizerType.ADAMW,
    "adamw_torch_fused": OptimizerType.ADAMW,
    "adamw_torch_8bit": OptimizerType.ADAMW_8BIT,
}
OPTIMIZER_CLASSES = {  # of torch.optim and torchao.optim
    "AdamW": OptimizerType.ADAMW,
    "Muon": OptimizerType.MUON,
    "AdamW8bit": OptimizerType.ADAMW_8BIT,
}
DECAY_STYLES = {each.value: each for each in WsdDecayStyle}
SCHEDULES = {
    "constant": LrSchedulerType.CONSTANT,
    "constant_with_warmup": LrSchedulerType.CONSTANT,
    "torch_constant": LrSchedulerType.CONSTANT,
    "linear": LrSchedulerType.LINEAR,
    "cosine": LrSchedulerType.COSINE,
    "cosine_with_min_lr": LrSchedulerType.COSINE,
    "WSD": LrSchedulerType.WSD,
}
# Schedules of transformers, and the forms of its WSD decay.
TRANSFORMERS_SCHEDULES = {**SCHEDULES, "warmup_stable_decay": LrSchedulerType.WSD}
TRANSFORMERS_DECAYS = {
    "linear": WsdDecayStyle.LINEAR,
    "cosine": WsdDecayStyle.COSINE,
    "1-sqrt": WsdDecayStyle.MINUS_SQRT,
}
# Scheduler arguments that Roost follows: of transformers, for WSD and for other schedules, and of Megatron.
WSD_ARGUMENTS, OTHER_ARGUMENTS = ("num_decay_steps", "decay_type", "min_lr_ratio"), ("min_lr", "min_lr_rate")
MEGATRON_ARGUMENTS, MEGATRON_WSD_ARGUMENTS = ("min_lr", "lr_decay_steps"), ("wsd_decay_steps", "lr_wsd_decay_style")
# Values of other scheduler arguments that change nothing.
HARMLESS = {"warmup_type": "linear", "num_cycles": 0.5}
# Without float16, which needs loss scaling: `dialects.warn_unlike` warns of it.
COMPUTE_TYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "32": "float32"}
NO_FLAGS = "no_flags"  # the key that says that the script of a TRL job has no parser of arguments
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "torch", "hf": "torch", "huggingface": "torch"}


def named(section: Section, key: str, meanings: Mapping[str, Any], setting: str | None = None) -> Any:
    """The meaning of another program's word; a word that Roost has no match for is an error.

    `setting` is the setting of train that the error suggests instead, with the word itself where Roost has it.
    """
    word = section.text(key) if key in section else None
    if word is None:
        return None
    found = meanings.get(word)
    if found is None:
        why = f"of these words Roost knows {', '.join(meanings)}"
        kind = type(next(iter(meanings.values())))
        own = word if setting is not None and issubclass(kind, StrEnum) and word in set(kind) else ""
        instead = "write the settings you want in the section train" if setting is None else f"write train.{setting}"
        instead += f": {own}" if own else ""
        fix = f"remove it, and {instead}"
        if section.source.launch is not None:  # a script has no section train, but overrides
            prefix = "" if key.startswith("-") else "+"
            fix = f"use one of them, or remove it and write {prefix}train.{setting or 'SETTING'}={own or 'VALUE'}"
        section.error("RST-T013", key, f"{word} is not supported", why, fix)
    return found


def transformers_schedule(schedule: LrSchedulerType | None, limits: Section, rate: float) -> dict[str, Any]:
    """Settings from transformers' `lr_scheduler_kwargs`, with a warning for arguments that are not followed.

    The last learning rate is given itself, or as a fraction of `rate`.
    """
    is_wsd = schedule is LrSchedulerType.WSD
    own = _arguments(limits, WSD_ARGUMENTS if is_wsd else OTHER_ARGUMENTS)
    share = own.number("min_lr_ratio" if is_wsd else "min_lr_rate")
    usual = WsdDecayStyle.COSINE if is_wsd else None
    return {
        "lr_scheduler_type": schedule,
        "min_learning_rate": own.number("min_lr") if share is None else share * rate,
        "wsd_decay_steps": own.whole_number("num_decay_steps", 1),
        "wsd_decay_style": named(own, "decay_type", TRANSFORMERS_DECAYS, "wsd_decay_style") or usual,
    }


def megatron_schedule(schedule: LrSchedulerType | None, limits: Section) -> dict[str, Any]:
    """Settings from ROLL's `lr_scheduler_kwargs` for Megatron, whose scheduler has other names for them."""
    is_wsd = schedule is LrSchedulerType.WSD
    own = _arguments(limits, (*MEGATRON_ARGUMENTS, *(MEGATRON_WSD_ARGUMENTS if is_wsd else ())), "on Megatron")
    usual = WsdDecayStyle.EXPONENTIAL if is_wsd else None
    return {
        "lr_scheduler_type": schedule,
        "min_learning_rate": own.number("min_lr"),
        "decay_steps": own.whole_number("lr_decay_steps", 1),
        "wsd_decay_steps": own.whole_number("wsd_decay_steps", 1),
        "wsd_decay_style": named(own, "lr_wsd_decay_style", DECAY_STYLES, "wsd_decay_style") or usual,
    }


def _arguments(limits: Section, followed: Sequence[str], on: str = "") -> Section:
    """The arguments of a schedule that are followed; warn of others unless they change nothing."""
    for name, value in limits.values.items():
        if name not in followed and value != HARMLESS.get(name):
            why = f"with this schedule {f'{on} ' if on else ''}Roost has {', '.join(followed)}"
            limits.findings.warn("RST-T014", limits.where(), f"{name} is not followed", why, "remove it")
    return replace(limits, values={name: limits.values[name] for name in followed if name in limits})


def note_padding(section: Section, key: str, program: str) -> None:
    """Note that ROLL and RLinf run GAE over padded rows, and Roost does not."""
    section.findings.note(
        "RST-T048",
        section.where(key),
        "is gae, which runs over the generated tokens of a sample and ends with its reward",
        f"{program} also counts the critic's values of the padding after the last token and of tokens in between",
        "advantages differ where samples differ in length; there is nothing to do",
    )


def warn_resume(section: Section, key: str, root: Section) -> None:
    """Warn of a checkpoint of the other program to resume from, and name Roost's command to resume a run."""
    written = section.get(key)
    if not written:
        return
    step = re.search(r"(?:global_step_|checkpoint-)(\d+)/*$", str(written))
    command = f"roost train {root.source.file or 'CONFIG'} --resume{f' {step[1]}' if step else ''}"
    section.findings.warn(
        "RST-T014",
        section.where(key),
        f"is {shown(written)}, which Roost does not follow",
        "a run goes on from a checkpoint of its own, in runs/NAME",
        f"remove it, and run: {command}",
    )


def clip_ranges(below: float | None, above: float | None) -> dict[str, float]:
    """The clip ranges below and above 1 that a config gives."""
    return ({} if below is None else {"clip_range": below}) | ({} if above is None else {"clip_range_high": above})


def interval(section: Section, key: str) -> int | None:
    """A number for which 0 and negative numbers mean: off, such as steps between checkpoints."""
    written = section.get(key)
    if isinstance(written, int) and not isinstance(written, bool) and written < 0:
        return 0
    return section.whole_number(key, 0)


def whole_number(section: Section, key: str, least: int) -> int | None:
    """A whole number; -1 means: not given, as other programs write it."""
    return None if section.get(key) == -1 else section.whole_number(key, least)


def fraction(section: Section, key: str) -> float | None:
    """A number from 0 to 1."""
    value = section.number(key)
    if value is not None and value > 1:
        section.error("RST-T007", key, f"is {value:g}; it must be at most 1", fix=f"write {key}: 1")
    return value


def compute_dtype(precision: Any) -> str | None:
    return COMPUTE_TYPES.get(str(precision).lower().removeprefix("torch."))


def actor_of(job: Job) -> Component | None:
    return next((part for part in job.components if part.name == "actor"), None)


def lora_rank(job: Job) -> int | None:
    actor = actor_of(job)
    return None if actor is None else actor.model.lora_rank


def engine_of(section: Section, key: str) -> dict[str, Any]:
    """The setting `engine` for the engine that a key names; empty if Roost does not have it."""
    word = section.values.get(key)
    engine = ENGINES.get(word) if isinstance(word, str) else None
    return {} if engine is None else {"engine": engine}
