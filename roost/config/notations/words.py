"""Words and numbers of other programs that several notations share, and what they mean here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
# Of corrections in verl and TRL: the weight of a sequence is the product of those of its tokens.
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
# Those of transformers, and the forms of its decay.
TRANSFORMERS_SCHEDULES = {**SCHEDULES, "warmup_stable_decay": LrSchedulerType.WSD}
TRANSFORMERS_DECAYS = {
    "linear": WsdDecayStyle.LINEAR,
    "cosine": WsdDecayStyle.COSINE,
    "1-sqrt": WsdDecayStyle.MINUS_SQRT,
}
# Arguments of its schedules and of Megatron's that are followed, and the values of others that change nothing.
OF_WSD, OF_OTHERS = ("num_decay_steps", "decay_type", "min_lr_ratio"), ("min_lr", "min_lr_rate")
OF_MEGATRON, OF_MEGATRON_WSD = ("min_lr", "lr_decay_steps"), ("wsd_decay_steps", "lr_wsd_decay_style")
HARMLESS = {"warmup_type": "linear", "num_cycles": 0.5}
# float16 needs loss scaling, which Roost does not do: `training_unlike` says so.
COMPUTE_TYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32", "32": "float32"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "torch", "hf": "torch", "huggingface": "torch"}


def named(section: Section, key: str, meanings: Mapping[str, Any], setting: str | None = None) -> Any:
    """The meaning of another program's word; a word that Roost has no match for is a finding.

    It says what to write instead: the section train, or one setting of it.
    """
    word = section.text(key) if key in section else None
    if word is None:
        return None
    found = meanings.get(word)
    if found is None:
        why = f"of these words Roost knows {', '.join(meanings)}"
        instead = "say what you want in the section train" if setting is None else f"write train.{setting}"
        fix = f"remove it, and {instead}"
        if section.source.launch is not None:  # a script has no section train, but overrides
            prefix = "" if key.startswith("-") else "+"
            fix = f"use one of them, or remove it and write {prefix}train.{setting or 'SETTING'}=VALUE"
        section.error("RST-T013", key, f"{word} is not supported", why, fix)
    return found


def transformers_schedule(schedule: LrSchedulerType | None, limits: Section, rate: float) -> dict[str, Any]:
    """Settings of transformers' `lr_scheduler_kwargs`; those that the schedule lacks here are named.

    The last rate is given as such, or as a share of the highest.
    """
    is_wsd = schedule is LrSchedulerType.WSD
    own = _arguments(limits, OF_WSD if is_wsd else OF_OTHERS)
    share = own.number("min_lr_ratio" if is_wsd else "min_lr_rate")
    usual = WsdDecayStyle.COSINE if is_wsd else None
    return {
        "lr_scheduler_type": schedule,
        "min_learning_rate": own.number("min_lr") if share is None else share * rate,
        "wsd_decay_steps": own.whole_number("num_decay_steps", 1),
        "wsd_decay_style": named(own, "decay_type", TRANSFORMERS_DECAYS, "wsd_decay_style") or usual,
    }


def megatron_schedule(schedule: LrSchedulerType | None, limits: Section) -> dict[str, Any]:
    """Settings of ROLL's `lr_scheduler_kwargs` for Megatron's scheduler, which has names of its own for them."""
    is_wsd = schedule is LrSchedulerType.WSD
    own = _arguments(limits, (*OF_MEGATRON, *(OF_MEGATRON_WSD if is_wsd else ())), "on Megatron")
    usual = WsdDecayStyle.EXPONENTIAL if is_wsd else None
    return {
        "lr_scheduler_type": schedule,
        "min_learning_rate": own.number("min_lr"),
        "decay_steps": own.whole_number("lr_decay_steps", 1),
        "wsd_decay_steps": own.whole_number("wsd_decay_steps", 1),
        "wsd_decay_style": named(own, "lr_wsd_decay_style", DECAY_STYLES, "wsd_decay_style") or usual,
    }


def _arguments(limits: Section, followed: Sequence[str], on: str = "") -> Section:
    """The arguments of a schedule that are followed; others are named unless they change nothing."""
    for name, value in limits.values.items():
        if name not in followed and value != HARMLESS.get(name):
            why = f"with this schedule {f'{on} ' if on else ''}Roost has {', '.join(followed)}"
            limits.findings.warn("RST-T014", limits.where(), f"{name} is not followed", why, "remove it")
    return replace(limits, values={name: limits.values[name] for name in followed if name in limits})


def note_padding(section: Section, key: str, program: str) -> None:
    """Both other programs run GAE over the columns of a padded matrix."""
    section.findings.note(
        "RST-T048",
        section.where(key),
        "is gae, which runs over the generated tokens of a sample and ends with its reward",
        f"{program} also counts the critic's values of the padding after the last token and of tokens in between",
        "advantages differ where samples differ in length; there is nothing to do",
    )


def warn_resume(section: Section, key: str, root: Section) -> None:
    """A checkpoint of the other program to go on from, which Roost does not read: name the command that goes on."""
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
    """The clip range below and above 1, as far as a config says."""
    return ({} if below is None else {"clip_range": below}) | ({} if above is None else {"clip_range_high": above})


def interval(section: Section, key: str) -> int | None:
    """Steps between two saves or evaluations: 0 and negative numbers switch them off."""
    written = section.get(key)
    if isinstance(written, int) and not isinstance(written, bool) and written < 0:
        return 0
    return section.whole_number(key, 0)


def whole_number(section: Section, key: str, least: int) -> int | None:
    """A whole number; other programs also write -1 for: not given."""
    return None if section.get(key) == -1 else section.whole_number(key, least)


def compute_dtype(precision: Any) -> str | None:
    return COMPUTE_TYPES.get(str(precision).lower().removeprefix("torch."))


def actor_of(job: Job) -> Component | None:
    return next((part for part in job.components if part.name == "actor"), None)


def lora_rank(job: Job) -> int | None:
    actor = actor_of(job)
    return None if actor is None else actor.model.lora_rank


def engine_of(section: Section, key: str) -> dict[str, Any]:
    """The engine that a key names; nothing where it names none that Roost has."""
    word = section.values.get(key)
    engine = ENGINES.get(word) if isinstance(word, str) else None
    return {} if engine is None else {"engine": engine}
