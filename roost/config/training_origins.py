"""Resolving the settings of a training run for people: name, value, and the keys or the default that decide it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from roost.config.errors import Where
from roost.config.job import Notation
from roost.config.origins import Origin, ResolvedSetting, origin_of
from roost.config.section import Section, Unresolved
from roost.config.training import TrainSettings
from roost.config.training_dialects import MADE_OF
from roost.config.training_keys import DRAWING, KEPT, KEYS, LOSS, MODEL, OPTIMIZER, RUN

GROUPS = {RUN: "", DRAWING: "draw", OPTIMIZER: "learner.optimizer", LOSS: "learner.loss", MODEL: "learner", KEPT: ""}
# The field of TrainSettings that holds a setting, where it is not the setting's own name in the part of its group.
ELSEWHERE = {
    **{name: f"collect.{name}" for name in ("group_fraction", "dynamic_sampling", "episode_timeout_s")},
    **{name: f"advantage.{name}" for name in ("normalize_by_std", "positive_advantages_only", "gamma", "gae_lambda")},
    "max_steps": "steps",
    "prompts_per_step": "collect.groups",
    "num_generations": "collect.group_size",
    "ppo_epochs": "epochs",
    "max_new_tokens": "draw.max_tokens",
    "extra_generations": "collect.redundancy",
    "rollout_fraction": "collect.fraction",
    "episode_attempts": "collect.attempts",
    "max_concurrent_episodes": "collect.concurrency",
    "adam_epsilon": "learner.optimizer.epsilon",
    "lr_scheduler_type": "learner.optimizer.schedule",
    "advantage_estimator": "advantage.estimator",
    "whiten_advantages": "advantage.whitening",
    "min_abs_advantage": "advantage.least",
    "advantage_clip": "advantage.clip",
    "minibatch_size": "minibatches",  # as many as there are of that size
    "critic_learning_rate": "critic_learning_rate",
    "max_skipped_steps": "max_skipped_steps",
    "adam_beta1": "learner.optimizer.betas.0",
    "adam_beta2": "learner.optimizer.betas.1",
    "lora_rank": "learner.adapter.rank",
    "lora_alpha": "learner.adapter.alpha",
    "lora_target_modules": "learner.adapter.targets",
    "engine": "engine",
    "engine_options": "engine_options",
    "eval_every": "evaluation.every",
    "eval_tasks": "evaluation.tasks",
    "eval_samples": "evaluation.samples",
    "eval_temperature": "evaluation.temperature",
    "checkpoint_every": "checkpoint.every",
    "keep_checkpoints": "checkpoint.keep",
}
FIELDS = {
    key.name: ELSEWHERE.get(key.name, f"{part}.{key.name}".lstrip(".")) for keys, part in GROUPS.items() for key in keys
}


def kept(settings: TrainSettings, name: str) -> Any:
    """The value of a setting by its name; None where there is nothing to look into (an adapter that is not trained)."""
    at: Any = settings
    for part in FIELDS[name].split("."):
        at = None if at is None else at[int(part)] if part.isdecimal() else getattr(at, part)
    return at


def resolve_settings(
    settings: TrainSettings,
    root: Section,
    notation: Notation,
    written: Mapping[str, Where],
    defaulted: Collection[str],
) -> tuple[ResolvedSetting, ...]:
    """Every setting with its origin.

    `written` has the place of each setting that one key gives, `defaulted` the settings that have the notation's
    default. The other settings follow from several keys of the notation (`MADE_OF`), or have Roost's default.
    """
    resolved = []
    for key in KEYS:
        keys = (written[key.name],) if key.name in written else deciding_keys(root, notation, key.name)
        field = "minibatches" if key.name == "minibatch_size" else key.name
        default = Origin.NOTATION if {field, key.name} & {*defaulted} else Origin.ROOST
        value = _plain(_value(settings, key.name))
        resolved.append(ResolvedSetting(key.name, value, origin_of(keys) if keys else default, keys))
    return tuple(resolved)


def deciding_keys(root: Section, notation: Notation, name: str) -> tuple[Where, ...]:
    """The keys of the config that a setting follows from; keys without a value decide nothing."""
    found = []
    for path in MADE_OF[notation].get(name, ()):
        *above, last = path.split(".")
        section = root.below(*above)
        if section.values.get(last) is not None:
            found.append(section.where(last))
    return tuple(found)


def _value(settings: TrainSettings, name: str) -> Any:
    if name == "minibatch_size":
        return settings.collect.groups * settings.collect.group_size // settings.minibatches
    return kept(settings, name)


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Unresolved):
        return value.text
    return str(value) if isinstance(value, str) else value
