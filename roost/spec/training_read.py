"""Reading how a job trains: the section `train`, and the notation's own keys for the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from enum import EnumType
from typing import Any

from roost.spec.errors import Where, did_you_mean, shown
from roost.spec.job import Job, Notation, Role
from roost.spec.section import Section
from roost.spec.training import (
    DEFAULT_STEPS,
    AdapterSettings,
    AdvantageSettings,
    Behaviour,
    CheckpointSettings,
    CollectSettings,
    DrawSettings,
    EvaluationSettings,
    LearnerSettings,
    LossSettings,
    OptimizerSettings,
    TrainSettings,
)
from roost.spec.training_dialects import defaults, derived
from roost.spec.training_keys import FLAG, KEYS, MAPPING, NUMBER, WHOLE, Key

Values = dict[str, Any]


def read_training(root: Section, job: Job) -> TrainSettings | None:
    """The settings of a job that has a section `train`; None for a config that only places."""
    if "train" not in root:
        return None
    train = root.mapping("train") or root.below("train")
    train.refuse_unknown_keys([key.name for key in KEYS])
    values: Values = dict(derived(root, job))
    for key in KEYS:
        value, place = _found(key, root, train, job.notation)
        if value is not None:
            _note(key.name, value, place, values, train)
    values = {**defaults(job.notation), **values}
    if not values.get("task"):
        train.error("task", "is missing", fix="write task: {_target_: roost.rollout.arithmetic.Arithmetic}")
    elif not isinstance(values["task"].get("_target_"), str):
        train.error("task", "has no _target_", fix="name the class of the scenario: _target_: package.module.Class")
    values["model"] = values.get("model") or _model_of(job)
    if not values["model"]:
        train.error("model", "is missing", fix="name the folder of a Hugging Face checkpoint")
        return None
    return _settings(values, job, train)


def setting_place(name: str, job: Job) -> Where:
    """Where a setting stands in the config: under the notation's own key, if that has it, else in `train`."""
    native = next((key.native(job.notation) for key in KEYS if key.name == name), ())
    values: Any = job.source.values
    for key in native:
        values = values.get(key) if isinstance(values, Mapping) else None
    return job.source.where(native if native and values is not None else ("train", name))


def _found(key: Key, root: Section, train: Section, notation: Notation) -> tuple[Any, Where]:
    """The value of a setting and where it stands; the two places must agree where both have it."""
    native = key.native(notation)
    section = root.below(*native[:-1]) if native else train
    theirs = _value(key, section, native[-1]) if native and native[-1] in section else None
    ours = _value(key, train, key.name) if key.name in train else None
    if ours is not None and theirs is not None and ours != theirs:
        train.error(
            key.name,
            f"is {shown(ours)}, but {'.'.join(native)} is {shown(theirs)}",
            "both mean the same setting",
            "keep one of the two",
        )
    return (ours, train.where(key.name)) if ours is not None else (theirs, section.where(*native[-1:]))


def _value(key: Key, section: Section, name: str) -> Any:
    value = section.get(name)
    if value is None or (value == -1 and key.kind == WHOLE):  # other programs write -1 for: not given
        return None
    if key.kind == WHOLE:
        return section.whole_number(name, key.least, maximum=int(key.most) if key.most else None)
    if key.kind == NUMBER:
        number = section.number(name)
        if number is not None and key.most is not None and number > key.most:
            section.error(name, f"is {number:g}; it must be at most {key.most:g}", fix=f"write {name}: {key.most:g}")
        return number
    if key.kind == FLAG:
        return section.flag(name)
    if key.kind == MAPPING:
        return dict(value) if isinstance(value, Mapping) else section.mapping(name)
    if isinstance(key.kind, str):
        return section.text(name)
    return _choice(key, section, name)


def _choice(key: Key, section: Section, name: str) -> Any:
    text = section.text(name)
    choices = [str(choice) for choice in key.kind]
    if text is None or text in choices:
        return key.kind(text) if text is not None and isinstance(key.kind, EnumType) else text
    section.error(name, f"is {shown(text)}", did_you_mean(text, choices), f"write one of {', '.join(choices)}")
    return None


def _note(name: str, value: Any, place: Where, values: Values, train: Section) -> None:
    """A setting as written; what the notation's other keys amount to must not contradict it."""
    if name in values and values[name] != value:
        train.findings.error(
            place,
            f"is {shown(value)}, but the config's other settings make it {shown(values[name])}",
            fix="keep one of the two",
        )
    values[name] = value


def _model_of(job: Job) -> str | None:
    paths = [part.model.path for part in job.components if part.role is Role.LEARNER and part.model.path]
    return paths[0] if paths else None


def _settings(values: Values, job: Job, train: Section) -> TrainSettings:
    def chosen(**names: str) -> Values:
        return {field: values[name] for field, name in names.items() if values.get(name) is not None}

    def same(*names: str) -> Values:
        return chosen(**{name: name for name in names})

    collect = CollectSettings(
        **same("groups", "group_size", "redundancy", "fraction", "group_fraction", "drops_equal_groups"),
        **same("attempts", "concurrency", "episode_limit_s"),
    )
    draw = DrawSettings(**same("max_tokens", "temperature", "top_p", "top_k", "min_p"))
    lag = values.get("max_policy_lag", 0)
    loss = LossSettings(
        **same("ratio", "clip_low", "clip_high", "dual_clip", "mean", "importance_cap"),
        **same("kl_coefficient", "kl_estimator", "entropy_coefficient"),
        behaviour=values.get("behaviour") or (Behaviour.PROXIMAL if lag else Behaviour.RECOMPUTED),
    )
    epochs, minibatches = values.get("epochs", 1), _minibatches(values, collect, train)
    optimizer = OptimizerSettings(
        **same("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "schedule"),
        total_steps=values.get("steps", DEFAULT_STEPS) * epochs * minibatches,
    )
    actor = next((part for part in job.components if part.name == "actor"), None)
    learner = LearnerSettings(
        values["model"],
        **same("weight_type", "compute_type", "micro_batch_tokens", "checkpoints_activations", "seed"),
        adapter=_adapter(values),
        temperature=draw.temperature,
        offloads=actor.model.offloads if actor is not None else (),
        optimizer=optimizer,
        loss=loss,
    )
    return TrainSettings(
        learner,
        **same("task", "name", "steps", "in_flight", "seed", "engine", "engine_options"),
        epochs=epochs,
        minibatches=minibatches,
        max_policy_lag=lag,
        advantage=AdvantageSettings(
            **same("estimator", "discount", "gae_lambda", "positive_only"), **chosen(least="least_advantage")
        ),
        draw=draw,
        collect=collect,
        evaluation=EvaluationSettings(
            **chosen(every="evaluate_every", tasks="evaluation_tasks", samples="evaluation_samples"),
            **chosen(temperature="evaluation_temperature"),
        ),
        checkpoint=CheckpointSettings(**chosen(every="checkpoint_every", keep="keep_checkpoints")),
    )


def _adapter(values: Values) -> AdapterSettings | None:
    rank = values.get("adapter_rank")
    return None if rank is None else AdapterSettings(rank, values.get("adapter_alpha") or 2.0 * rank)


def _minibatches(values: Values, collect: CollectSettings, train: Section) -> int:
    """How many optimizer steps a step's samples are cut into."""
    size = values.get("minibatch_size")
    samples = collect.groups * collect.group_size
    if size is None:
        return 1
    if samples % size:
        train.error(
            "minibatch_size",
            f"is {size}, which does not divide the {samples} samples of a step",
            f"{collect.groups} groups of {collect.group_size} = {samples}; {samples} % {size} = {samples % size}",
            f"write a number that divides {samples}",
        )
        return 1
    return int(samples // size)
