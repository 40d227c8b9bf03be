"""Resolving the settings of a training run for people: name, value, and the keys or the default that decide it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import EnumType
from typing import Any

from roost.config.findings import Where, did_you_mean, shown
from roost.config.job import COMMAND_LINE, Job, Notation, Origin, ResolvedSetting, origin_of
from roost.config.notations.dialects import MADE_OF, defaults, derived, warn_unlike
from roost.config.section import EXPONENT, MAX_NUMBER, Section, Unresolved
from roost.config.train import (
    DEFAULT_STEPS,
    AdapterSettings,
    AdvantageEstimator,
    AdvantageSettings,
    CheckpointSettings,
    EvaluationSettings,
    LearnerSettings,
    LossSettings,
    OldLogprobs,
    OptimizerSettings,
    RolloutSettings,
    SamplingSettings,
    TrainSettings,
    Whitening,
)
from roost.config.train_keys import (
    DRAWING,
    FLAG,
    KEPT,
    KEYS,
    LOSS,
    MAPPING,
    MODEL,
    NUMBER,
    OPTIMIZER,
    RUN,
    WHOLE,
    WORDS,
    Key,
)

GROUPS = {
    RUN: "",
    DRAWING: "sampling",
    OPTIMIZER: "learner.optimizer",
    LOSS: "learner.loss",
    MODEL: "learner",
    KEPT: "evaluation",
}
# The part of TrainSettings that holds a setting, where it is not that of its group.
PARTS = {
    "rollout": (
        "prompts_per_step",
        "num_generations",
        "extra_generations",
        "rollout_fraction",
        "group_fraction",
        "dynamic_sampling",
        "episode_attempts",
        "max_concurrent_episodes",
        "episode_timeout_s",
    ),
    "advantage": (
        "advantage_estimator",
        "normalize_by_std",
        "whiten_advantages",
        "advantage_clip",
        "min_abs_advantage",
        "positive_advantages_only",
        "gamma",
        "gae_lambda",
    ),
    "learner.adapter": ("lora_rank", "lora_alpha", "lora_target_modules"),
    "checkpoint": ("checkpoint_every", "keep_checkpoints"),
    "": ("critic_learning_rate", "max_skipped_steps", "engine", "engine_options"),
}
ELSEWHERE = {
    "minibatch_size": "minibatches",  # as many as there are of that size
    **{name: f"{part}.{name}".lstrip(".") for part, names in PARTS.items() for name in names},
}
FIELDS = {
    key.name: ELSEWHERE.get(key.name, f"{part}.{key.name}".lstrip(".")) for keys, part in GROUPS.items() for key in keys
}


def kept(settings: TrainSettings, name: str) -> Any:
    """The value of a setting by its name; None where there is nothing to look into (an adapter that is not trained)."""
    at: Any = settings
    for part in FIELDS[name].split("."):
        at = None if at is None else getattr(at, part)
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
        value = _plain(_resolved_value(settings, key.name))
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


def _resolved_value(settings: TrainSettings, name: str) -> Any:
    if name == "minibatch_size":
        return settings.rollout.prompts_per_step * settings.rollout.num_generations // settings.minibatches
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


Values = dict[str, Any]
NOT_GIVEN = -1  # as other programs write it


def read_training(root: Section, job: Job) -> tuple[TrainSettings | None, tuple[ResolvedSetting, ...]]:
    """The settings of a job that has a section `train`, and their origins; None for a config that only places."""
    if "train" not in root:
        return None, ()
    train = root.mapping("train") or root.below("train")
    train.refuse_unknown_keys([key.name for key in KEYS])
    values: Values = dict(derived(root, job))
    written: dict[str, Where] = {}
    for key in KEYS:
        value, place = _found(key, root, train, job.notation)
        if value is not None:
            _note(key.name, value, place, values, root, job.notation)
            written[key.name] = place
    warn_unlike(root, job.notation, values)
    usual = defaults(root, job.notation, values)
    if "engine_options" in usual and "engine_options" in values:
        values["engine_options"] = {**usual["engine_options"], **values["engine_options"]}
    values = {**usual, **values}
    if not values.get("task"):
        train.error("RST-T003", "task", "is missing", fix="write task: {_target_: roost.rollout.arithmetic.Arithmetic}")
    elif not isinstance(values["task"].get("_target_"), str):
        train.error(
            "RST-T003", "task", "has no _target_", fix="name the class of the scenario: _target_: package.module.Class"
        )
    if not values.get("model"):
        values["model"], written["model"] = _model_of(job, root)
    if not values["model"]:
        train.error("RST-T004", "model", "is missing", fix="name the folder of a Hugging Face checkpoint")
        return None, ()
    settings = _settings(values, job, root)
    return settings, resolve_settings(settings, root, job.notation, written, values)


def setting_place(name: str, job: Job) -> Where:
    """Where a setting stands in the config: in `train`, or under the notation's own key if only that has it.

    A name that is no setting's is a component's, which stands where it is placed.
    """
    source = job.source
    if all(key.name != name for key in KEYS):
        return next((part.where for part in job.components if part.name == name), source.where())
    own = source.values.get("train")
    if isinstance(own, Mapping) and own.get(name) is not None:
        return source.where(("train", name))
    native = next((key.native(job.notation) for key in KEYS if key.name == name), ())
    made_of = (tuple(path.split(".")) for path in MADE_OF[job.notation].get(name, ()))
    for path in (*native, *made_of):
        values: Any = source.values
        for key in path:
            values = values.get(key) if isinstance(values, Mapping) else None
        if values is not None and values != NOT_GIVEN:
            return source.where(path)
    return source.where(("train", name))


def _found(key: Key, root: Section, train: Section, notation: Notation) -> tuple[Any, Where]:
    """The value of a setting and where it stands; the two places must agree where both have it."""
    ours = _value(key, train, key.name) if key.name in train else None
    for *above, name in key.native(notation):
        section = root.below(*above)
        theirs = _value(key, section, name) if name in section else None
        if theirs is None:
            continue
        if ours is not None and ours != theirs:
            train.error(
                "RST-T008",
                key.name,
                f"is {shown(ours)}, but {'.'.join((*above, name))} is {shown(theirs)}",
                "both mean the same setting",
                "keep one of the two",
            )
        if ours is None:
            return theirs, section.where(name)
        break
    return ours, _place(train, key)


def _place(train: Section, key: Key) -> Where:
    """Where a setting stands; a mapping that overrides wrote key by key stands where they do."""
    inner = train.values.get(key.name)
    keys = inner if isinstance(inner, Mapping) else ()
    places = [train.where(key.name), *(train.where(key.name).under(str(each)) for each in keys)]
    return next((place for place in places if place.file == COMMAND_LINE), places[0])


def _value(key: Key, section: Section, name: str) -> Any:
    value = section.get(name)
    if value is None or (value == NOT_GIVEN and key.kind == WHOLE):
        return key.null
    if key.kind == WHOLE:
        return section.whole_number(name, key.least, maximum=int(key.most) if key.most else None)
    if key.kind == NUMBER:
        return _number(key, section, name)
    if key.kind == FLAG:
        return section.flag(name)
    if key.kind == MAPPING:
        inner = section.mapping(name)
        return None if inner is None else _resolved(inner)
    if key.kind == WORDS:
        return _words(section, name)
    if isinstance(key.kind, str):
        return section.text(name)
    return _choice(key, section, name)


def _words(section: Section, name: str) -> tuple[str, ...] | None:
    written = section.get(name)
    if isinstance(written, list | tuple) and written and all(isinstance(word, str) for word in written):
        return tuple(written)
    section.error(
        "RST-T005", name, f"is {shown(written)}; it must be a list of words", fix=f"write {name}: [q_proj, v_proj]"
    )
    return None


def _number(key: Key, section: Section, name: str) -> float | None:
    written = section.values[name]
    is_word = isinstance(written, str) and EXPONENT.fullmatch(written.strip())
    number = float(written) if is_word and float(written) <= MAX_NUMBER else section.number(name)
    if number is not None and key.most is not None and number > key.most:
        section.error(
            "RST-T007", name, f"is {number:g}; it must be at most {key.most:g}", fix=f"write {name}: {key.most:g}"
        )
    return number


def _resolved(section: Section) -> Values:
    """A mapping as it is, with what cannot be resolved in it reported."""
    found = {key: section.get(key) for key in section.values}
    for key, value in found.items():
        if isinstance(value, Mapping):
            inner = section.mapping(key)
            found[key] = None if inner is None else _resolved(inner)
    return found


def _choice(key: Key, section: Section, name: str) -> Any:
    text = section.text(name)
    choices = [str(choice) for choice in key.kind]
    if text is None or text in choices:
        return key.kind(text) if text is not None and isinstance(key.kind, EnumType) else text
    section.error(
        "RST-T006", name, f"is {shown(text)}", did_you_mean(text, choices), f"write one of {', '.join(choices)}"
    )
    return None


def _note(name: str, value: Any, place: Where, values: Values, root: Section, notation: Notation) -> None:
    """A setting as written; what the notation's other keys amount to must not contradict it."""
    if name in values and not _same(values[name], value):
        root.findings.error(
            "RST-T008",
            place,
            f"is {shown(value)}, but {_makers(name, root, notation)} it {shown(values[name])}",
            fix="keep one of the two",
        )
    values[name] = value


def _makers(name: str, root: Section, notation: Notation) -> str:
    """The other keys that a setting follows from, with their verb."""
    keys = [key.key_path for key in deciding_keys(root, notation, name)]
    return f"{' and '.join(keys)} make{'s' if len(keys) == 1 else ''}" if keys else "the config's other settings make"


def _same(one: Any, other: Any) -> bool:
    both_numbers = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other) if both_numbers else bool(one == other)


def _model_of(job: Job, root: Section) -> tuple[str | None, Where]:
    """The actor's model, or the engine's, and its place; other learners may start from models of their own."""
    found = {part.name: part for part in job.components if part.model.path}
    part = found.get("actor") or found.get("rollout")
    if part is None:
        return None, root.where()
    keys = deciding_keys(root, job.notation, "model")
    return part.model.path, keys[0] if keys else part.where


def _settings(values: Values, job: Job, root: Section) -> TrainSettings:
    def chosen(**names: str) -> Values:
        return {field: values[name] for field, name in names.items() if values.get(name) is not None}

    def same(*names: str) -> Values:
        return chosen(**{name: name for name in names})

    rollout = RolloutSettings(**same(*PARTS["rollout"]))
    sampling = SamplingSettings(**same("max_new_tokens", "temperature", "top_p", "top_k", "min_p"))
    lag = values.get("max_staleness", 0)
    loss = LossSettings(
        **same("importance_sampling_level", "clip_range", "dual_clip", "loss_aggregation", "importance_weight_cap"),
        **chosen(clip_range_high="clip_range_high" if "clip_range_high" in values else "clip_range"),
        **same("kl_coef", "kl_estimator", "entropy_coef", "value_clip"),
        old_logprobs=values.get("old_logprobs") or (OldLogprobs.DECOUPLED if lag else OldLogprobs.RECOMPUTE),
    )
    epochs, minibatches = values.get("ppo_epochs", 1), _minibatches(values, rollout, job, root)
    steps = values.get("max_steps", None if "max_epochs" in values else DEFAULT_STEPS)
    optimizer = OptimizerSettings(
        **same("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        **same("warmup_steps", "lr_scheduler_type"),
        total_steps=(steps or 0) * epochs * minibatches,
    )
    actor = next((part for part in job.components if part.name == "actor"), None)
    learner = LearnerSettings(
        values["model"],
        **same("weight_dtype", "compute_dtype", "micro_batch_tokens", "activation_checkpointing", "seed"),
        adapter=_adapter(values),
        temperature=sampling.temperature,
        offloads=actor.model.offloads if actor is not None else (),
        optimizer=optimizer,
        loss=loss,
    )
    usual_whitening = (
        Whitening.TOKENS_BIASED if values.get("advantage_estimator") is AdvantageEstimator.GAE else Whitening.NONE
    )
    return TrainSettings(
        learner,
        name=values.get("name", ""),
        max_steps=steps,
        **same("task", "max_epochs", "in_flight", "seed", "critic_learning_rate", "engine", "engine_options"),
        **same("rewards", "max_skipped_steps"),
        ppo_epochs=epochs,
        minibatches=minibatches,
        max_staleness=lag,
        advantage=AdvantageSettings(
            **same(*(name for name in PARTS["advantage"] if name != "whiten_advantages")),
            whiten_advantages=values.get("whiten_advantages", usual_whitening),
        ),
        sampling=sampling,
        rollout=rollout,
        evaluation=EvaluationSettings(**same("eval_every", "eval_tasks", "eval_samples", "eval_temperature")),
        checkpoint=CheckpointSettings(**same(*PARTS["checkpoint"])),
    )


def _adapter(values: Values) -> AdapterSettings | None:
    rank = values.get("lora_rank")
    if rank is None:
        return None
    return AdapterSettings(rank, values.get("lora_alpha") or 2.0 * rank, values.get("lora_target_modules", ()))


def _minibatches(values: Values, rollout: RolloutSettings, job: Job, root: Section) -> int:
    """How many optimizer steps a step's samples are cut into."""
    size, count = values.get("minibatch_size"), values.get("minibatches")
    samples = rollout.prompts_per_step * rollout.num_generations
    place = setting_place("minibatch_size", job)
    if size is None:
        return int(count or 1)
    if count is not None and math.ceil(samples / size) != count:
        root.findings.error(
            "RST-T008",
            place,
            f"is {size}, but {_makers('minibatch_size', root, job.notation)} it {samples / count:g}",
            f"{samples} samples in {count} minibatches",
            "keep one of the two",
        )
    why = f"{rollout.prompts_per_step} groups of {rollout.num_generations} = {samples}"
    if size > samples:
        root.findings.error(
            "RST-T009", place, f"makes minibatches of {size}, but a step has {samples} samples", why, "lower it"
        )
        return 1
    parts: int = math.ceil(samples / size)
    if samples % size:
        root.findings.warn(
            "RST-T010",
            place,
            f"makes minibatches of {size}, which do not divide the {samples} samples of a step",
            f"{why}; they are cut evenly into {parts}, of {samples / parts:g} samples on average",
            f"write a number that divides {samples}",
        )
    return parts
