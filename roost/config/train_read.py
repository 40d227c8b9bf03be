"""Read the section `train`: the settings of a run, and the key or default that decides each."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from roost.config.data import (
    AGENTS,
    QUESTIONS,
    SCENARIO,
    merged_teachers,
    read_data,
    read_distillation,
    read_teachers,
)
from roost.config.findings import Where, did_you_mean, shown
from roost.config.job import COMMAND_LINE, Job, Notation, Origin, ResolvedSetting, origin_of
from roost.config.learning import read_rejection
from roost.config.notations.dialects import DERIVED_FROM, defaults, derived, refuse_expert_tensor_parallel, warn_unlike
from roost.config.notations.switches import idle_keys, note_idle_keys, note_idle_teacher_keys
from roost.config.notations.words import NO_FLAGS
from roost.config.source import Section, Unresolved
from roost.config.train import (
    NOT_IN_SFT,
    SETTINGS,
    SETTINGS_OF,
    AdapterSettings,
    AdvantageEstimator,
    AdvantageLevel,
    AdvantageSettings,
    CheckpointSettings,
    EvaluationSettings,
    ImportanceSamplingLevel,
    LearnerSettings,
    LossAggregation,
    LossSettings,
    Objective,
    OldLogprobs,
    OptimizerSettings,
    RewardScope,
    RolloutSettings,
    SamplingSettings,
    Setting,
    TrainSettings,
    Whitening,
    default_of,
    value_of,
)
from roost.config.train_choices import OF_WHOLE_SAMPLES, level_of_samples, other_name


def resolve_settings(
    settings: TrainSettings,
    root: Section,
    notation: Notation,
    written: Mapping[str, Where],
    defaulted: Collection[str],
) -> tuple[ResolvedSetting, ...]:
    """Every setting with its origin.

    `written` has the places of settings that one key gives; `defaulted` has the settings with the notation's default.
    Other settings are derived from several keys of the notation (`DERIVED_FROM`), or have Roost's default.
    """
    resolved = []
    for name in SETTINGS:
        by_epochs = name == "max_steps" and value_of(settings, name) is None
        decided = "max_epochs" if by_epochs else name
        keys = (written[decided],) if decided in written else deciding_keys(root, notation, decided)
        if not keys and decided not in defaulted:
            keys = _keys_of_default(settings, decided, root, notation, written)
        is_default = decided in defaulted or (name == "minibatch_size" and "minibatches" in defaulted)
        origin = origin_of(keys) if keys else Origin.NOTATION if is_default else Origin.ROOST
        value = value_of(settings, name)
        value = _default_from_others(settings, name) if value is None else value
        resolved.append(ResolvedSetting(name, _plain(value), origin, keys))
    return tuple(resolved)


FOLLOWED = {
    "clip_range_high": "clip_range",
    "rollout_is": "old_logprobs",
    "value_loss_aggregation": "loss_aggregation",
}


def _keys_of_default(
    settings: TrainSettings, name: str, root: Section, notation: Notation, written: Mapping[str, Where]
) -> tuple[Where, ...]:
    """The keys that decide a default: those of another setting, or a null that switches the notation's default off."""
    if name == "dual_clip":
        above, key = root.below("algorithm"), "clip_ratio_c"
        is_off = notation is Notation.RLINF and key in above and settings.learner.loss.dual_clip is None
        return (above.where(key),) if is_off else ()
    other, has_weights = FOLLOWED.get(name), settings.learner.loss.weight_level is not ImportanceSamplingLevel.NONE
    if other is None or (name == "rollout_is" and not has_weights):
        return ()
    return (written[other],) if other in written else deciding_keys(root, notation, other)


def _default_from_others(settings: TrainSettings, name: str) -> str | None:
    """The default of a setting that depends on other settings, if it is known before the run."""
    loss = settings.learner.loss
    match name:
        case "rollout_is":
            return loss.weight_level
        case "value_loss_aggregation":
            return loss.loss_aggregation
        case "in_flight" if settings.objective is Objective.RL:
            return settings.in_flight_mode
    return None


def deciding_keys(root: Section, notation: Notation, name: str) -> tuple[Where, ...]:
    """The keys of the config that a setting is derived from, without keys that have no value or no effect."""
    idle = {found.where.path for found in root.findings.warnings if found.code == "RST-T014"}
    idle |= {tuple(switched.path.split(".")) for switched in idle_keys(root, notation)}
    found = []
    for path in DERIVED_FROM[notation].get(name, ()):
        *above, last = path.split(".")
        section = root.below(*above)
        where = section.where(last)
        if section.values.get(last) is not None and where.path not in idle:
            found.append(where)
    return tuple(found)


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
# Keys of other programs where settings that are not written stand by default.
_USUAL_KEYS: Mapping[Notation, Mapping[str, str]] = {
    Notation.VERL: {
        "model": "actor_rollout_ref.model.path",
        "engine": "actor_rollout_ref.rollout.name",
        "num_generations": "actor_rollout_ref.rollout.n",
    }
}
NOT_GIVEN = -1  # what other programs write for a setting that is not given


def read_training(
    root: Section, job: Job, trains: bool = False
) -> tuple[TrainSettings | None, tuple[ResolvedSetting, ...]]:
    """The settings of a job, and their origins; None for a config that only places.

    A config trains if it has a section `train`, or if the command trains it (`trains`).
    """
    if "train" not in root and not trains:
        return None, ()
    train = root.mapping("train") or root.below("train")
    train.refuse_unknown_keys((*SETTINGS, *_refuse_sizes(train, job.notation)))
    values: Values = dict(derived(root, job))
    written: dict[str, Where] = {}
    for name, setting in SETTINGS.items():
        if (found := _found(setting, root, train, job.notation)) is not None:
            value, written[name] = found
            _set_written(name, value, written[name], values, root, job.notation)
    warn_unlike(root, job.notation, values)
    if values.get("objective") is not Objective.SFT:
        note_idle_keys(root, job.notation)
    refuse_expert_tensor_parallel(root, job)
    usual = defaults(root, job.notation, values)
    for name in ("engine_options", "data"):
        if name in usual and name in values:
            values[name] = {**usual[name], **values[name]}
    if "teacher" in usual and "teacher" in values:
        values["teacher"] = merged_teachers(usual["teacher"], values["teacher"])
    values = {**usual, **values}
    read_teachers(values.get("teacher", {}), setting_location("teacher", job), root.findings)
    note_idle_teacher_keys(values, setting_location("teacher", job), root)
    read_rejection(values.get("rollout_rejection", {}), setting_location("rollout_rejection", job), root.findings)
    if values.get("objective") is Objective.SFT:
        values = _supervised(values, written, usual, root, job.notation)
    if values.get("data"):
        values["task"] = _task_of_data(values, job, root)
    if not values.get("task") and "train" not in root:
        place, what = root.where(), "has no section train, which names the task"
        fix = "write train: {data: {path: data/train.jsonl}}, or train: {task: {_target_: package.module.Class}}"
        if job.notation is Notation.VERL:
            place, what = root.below("data").where("train_files"), "is missing"
            fix = "write data.train_files=data/train.parquet, the prompts to train on"
        elif job.notation is Notation.TRL:
            key = "dataset_name" if root.source.launch is None else "--dataset_name"
            place, what = root.where(key), "is missing"
            fix = f"write {root.spell(key, 'data/train.jsonl')}, the prompts to train on"
            if NO_FLAGS in root.values:
                place, fix = root.where("train", "data", "path"), "write train.data.path=data/train.jsonl, the prompts"
        if all(found.where.path != place.path for found in root.findings.errors):  # such as one not resolved
            root.findings.error("RST-T001", place, what, fix=fix)
        return None, ()
    if not values.get("task"):
        fix = "write data: {path: data/train.jsonl}, or task: {_target_: package.module.Class}"
        train.error("RST-T003", "task", "is missing", fix=fix)
    elif not isinstance(values["task"].get("_target_"), str):
        train.error(
            "RST-T003", "task", "has no _target_", fix="name the class of the scenario: _target_: package.module.Class"
        )
    if not values.get("model"):
        values["model"], written["model"] = _model_of(job, root)
    if not values["model"]:
        place, fix = setting_location("model", job), "name the folder of a Hugging Face checkpoint"
        if place.path[:1] != ("train",):
            fix = f"write {place.key_path}=FOLDER, that of a Hugging Face checkpoint"
        elif root.source.launch is not None:
            fix = "write train.model=FOLDER, that of a Hugging Face checkpoint"
        root.findings.error("RST-T004", place, "is missing", fix=fix)
        return None, ()
    settings = _settings(values, job, root)
    return settings, resolve_settings(settings, root, job.notation, written, values)


_SIZE = re.compile(
    r"(tensor|pipeline|context|expert|sequence)(_model)?_parallel(_size)?|fsdp_size|(tp|pp|cp|ep)(_size)?"
)
_ROLE = "strategy_args.strategy_config"
# Sections with the parallel sizes of the learner and of engines.
_SIZES: Mapping[Notation, tuple[str, str]] = {
    Notation.RLINF: ("actor.model", "rollout"),
    Notation.ROLL: (f"actor_train.{_ROLE}", f"actor_infer.{_ROLE}"),
}
# Keys of sizes there, by the first two letters of a key that `_SIZE` matches.
_NAMES = {
    **dict.fromkeys(("te", "tp"), "tensor_model_parallel_size"),
    **dict.fromkeys(("pi", "pp"), "pipeline_model_parallel_size"),
    **dict.fromkeys(("co", "se", "cp"), "context_parallel_size"),
    **dict.fromkeys(("ex", "ep"), "expert_model_parallel_size"),
    "fs": "fsdp_size",
}


def _refuse_sizes(train: Section, notation: Notation) -> list[str]:
    """Parallel sizes in the section `train`, which belong to the components; each is reported as an error."""
    sizes = [key for key in map(str, train.values) if key not in SETTINGS and _SIZE.fullmatch(key)]
    for key in sizes:
        fix = "write it where the job places its processes"
        if notation in _SIZES:
            (learner, engine), name = _SIZES[notation], _NAMES[key[:2]]
            learner = "actor.fsdp_config" if (notation, name) == (Notation.RLINF, "fsdp_size") else learner
            fix = f"write {learner}.{name} for the learner"
            fix += f", {engine}.tensor_parallel_size for engines" if name.startswith("tensor") else ""
        why = "parallel sizes belong to the components, not to train"
        train.findings.error("RST-C023", train.where(key), "is not a key Roost knows", why, fix)
    return sizes


# The loss is the negative log-likelihood: a policy gradient with advantage 1 and no ratio, at temperature 1.
SFT_VALUES: Mapping[str, Any] = {
    "num_generations": 1,
    "temperature": 1.0,
    "advantage_estimator": AdvantageEstimator.REWARD,
    "importance_sampling_level": ImportanceSamplingLevel.NONE,
    "old_logprobs": OldLogprobs.ROLLOUT,
    "loss_aggregation": LossAggregation.TOKEN_MEAN,
}


def _supervised(
    values: Values, written: Mapping[str, Where], usual: Values, root: Section, notation: Notation
) -> Values:
    """The values that supervised training uses; note the keys that it does not use."""
    idle = NOT_IN_SFT.union(*({each.name for each in SETTINGS_OF[part]} for part in ("sampling", "advantage")))
    idle |= {each.name for each in SETTINGS_OF["learner.loss"]} - {"loss_aggregation"}
    given = {name: value for name, value in values.items() if name not in usual or name in written}
    keys = [
        where.key_path
        for name in given
        if name in idle and name not in SFT_VALUES
        for where in ((written[name],) if name in written else deciding_keys(root, notation, name))
    ]
    if keys:
        what = f"{', '.join(dict.fromkeys(keys))} {'is' if len(keys) == 1 else 'are'} not used by supervised training"
        why = "there are no engines, rewards and advantages"
        root.findings.note("RST-T043", root.where("train"), what, why, "remove what is not for another command")
    kept = {name: value for name, value in values.items() if name not in idle and name != "minibatches"}
    if "prompts_per_step" not in given and "minibatch_size" in kept:
        kept["prompts_per_step"] = kept.pop("minibatch_size")
    aggregation = {"loss_aggregation": kept["loss_aggregation"]} if "loss_aggregation" in given else {}
    return {**kept, **SFT_VALUES, **aggregation}


def _task_of_data(values: Values, job: Job, root: Section) -> Values:
    """The task of a config with data: a scenario over the data, or the config's own task with the data as its tasks."""
    data, place, task = dict(values["data"]), setting_location("data", job), values.get("task")
    by_teacher = values.get("advantage_estimator") is AdvantageEstimator.TEACHER
    is_taught = by_teacher or values.get("objective") is Objective.SFT
    data.setdefault("batch_size", values.get("prompts_per_step", default_of("prompts_per_step")))
    if read_data(data, place, root.findings) is None:
        return task or {"_target_": SCENARIO}
    has_own_reward = task and not _is_scored_by_rewards(task)
    if not (has_own_reward or values.get("rewards") or is_taught):
        what, why = "has no reward", "the answers to their prompts would not be scored"
        reward = "roost.rollout.rewards.math_answer.ExactAnswer"
        fix = f"write rewards in train: {{exact: {{_target_: {reward}}}}}; for roost sft, objective: sft"
        if root.source.launch is not None:
            fix = f"write {'+' * (job.notation is Notation.VERL)}train.rewards.exact._target_={reward}"
        root.findings.error("RST-T061", place, what, why, fix)
    if not task:
        return {"_target_": SCENARIO, **data}
    if task.get("_target_") != AGENTS or "tasks" in task:
        what, why = "are not used", "the class of train.task makes its own tasks"
        fix = "remove train.task, or remove the data"
        root.findings.warn("RST-T062", place, what, why, fix)
        return dict(task)
    tokenizer = {"tokenizer": values.get("model") or _model_of(job, root)[0]} if "max_prompt_tokens" in data else {}
    return {**task, "tasks": {"_target_": SCENARIO, **tokenizer, **data}}


def _is_scored_by_rewards(task: Mapping[str, Any]) -> bool:
    """Return True if the task's environment gives no reward, so that train.rewards must."""
    environment = task.get("environment")
    return isinstance(environment, Mapping) and environment.get("_target_") == QUESTIONS


def task_place(settings: TrainSettings, job: Job) -> Where:
    """Location of the task in the config: `task`, or `data` if it is made of that."""
    return setting_location("data" if settings.task.get("_target_") == SCENARIO and settings.data else "task", job)


def settings_in_train(job: Job) -> frozenset[str]:
    """Names of the settings that the section `train` has."""
    own = job.source.values.get("train")
    return frozenset(name for name in SETTINGS if isinstance(own, Mapping) and own.get(name) is not None)


def setting_location(name: str, job: Job) -> Where:
    """Location of a setting in the config: in `train`, or the notation's own key if only that is written or usual.

    `name` may also be a component's, which is located at its placement.
    """
    source = job.source
    if name not in SETTINGS:
        return next((part.where for part in job.components if part.name == name), source.where())
    own = source.values.get("train")
    if isinstance(own, Mapping) and own.get(name) is not None:
        return source.where(("train", name))
    derived_from = (tuple(path.split(".")) for path in DERIVED_FROM[job.notation].get(name, ()))
    for path in (*SETTINGS[name].native(job.notation), *derived_from):
        values: Any = source.values
        for key in path:
            values = values.get(key) if isinstance(values, Mapping) else None
        if values is not None and values != NOT_GIVEN:
            return source.where(path)
    usual = _USUAL_KEYS.get(job.notation, {}).get(name)
    return source.where(("train", name) if usual is None else tuple(usual.split(".")))


def _found(setting: Setting, root: Section, train: Section, notation: Notation) -> tuple[Any, Where] | None:
    """Value and place of a written setting; `train` and the notation's own key must agree."""
    ours = _value(setting, train, setting.name) if setting.name in train else None
    for *above, name in setting.native(notation):
        section = root.below(*above)
        theirs = _value(setting, section, name) if name in section else None
        if theirs is None:
            continue
        if ours is not None and ours != theirs:
            train.error(
                "RST-T008",
                setting.name,
                f"is {shown(ours)}, but {'.'.join((*above, name))} is {shown(theirs)}",
                "both mean the same setting",
                "keep one of the two",
            )
        if ours is None:
            return theirs, section.where(name)
        break
    return None if ours is None else (ours, _place(train, setting.name))


def _place(train: Section, name: str) -> Where:
    """Location of a setting in train; the command line if an override sets a key of its mapping."""
    inner = train.values.get(name)
    keys = inner if isinstance(inner, Mapping) else ()
    places = [train.where(name), *(train.where(name).under(str(each)) for each in keys)]
    return next((place for place in places if place.file == COMMAND_LINE), places[0])


def _value(setting: Setting, section: Section, name: str) -> Any:
    """The value that a key of `section` gives a setting, or None."""
    value = section.get(name)
    if value is None or (value == NOT_GIVEN and setting.type is int):
        return setting.null
    if setting.choices:
        return _choice(setting, section, name)
    if value in setting.words:
        return value
    if setting.type is int:
        return section.whole_number(name, setting.minimum, maximum=int(setting.maximum) if setting.maximum else None)
    if setting.type is float:
        return _number(setting, section, name)
    if setting.type is bool:
        return section.flag(name, words=setting.words)
    if setting.type is Mapping:
        inner = section.mapping(name)
        return None if inner is None else _resolved(inner)
    return _words(section, name) if setting.type is tuple else section.text(name)


def _words(section: Section, name: str) -> tuple[str, ...] | None:
    written = section.get(name)
    if isinstance(written, list | tuple) and written and all(isinstance(word, str) for word in written):
        return tuple(written)
    section.error(
        "RST-T005", name, f"is {shown(written)}; it must be a list of words", fix=f"write {name}: [q_proj, v_proj]"
    )
    return None


def _number(setting: Setting, section: Section, name: str) -> float | None:
    number = section.number(name)
    most = setting.maximum
    if number is not None and most is not None and number > most:
        usual = default_of(setting.name)
        fix = f"write {section.spell(name, f'{most if usual is None else usual:g}')}"
        section.error("RST-T007", name, f"is {number:g}; it must be at most {most:g}", fix=fix)
    return number


def _resolved(section: Section) -> Values:
    """The values of a mapping; report values that cannot be resolved."""
    found = {key: section.get(key) for key in section.values}
    for key, value in found.items():
        if isinstance(value, Mapping):
            inner = section.mapping(key)
            found[key] = None if inner is None else _resolved(inner)
    return found


def _choice(setting: Setting, section: Section, name: str) -> Any:
    text, choices = section.text(name), setting.choices
    if text is None or text in choices:
        return None if text is None else setting.type(text)
    known = other_name(setting.type, text)
    if setting.name == "rollout_is" and text.strip().lower() in OF_WHOLE_SAMPLES:
        known = level_of_samples(setting.name)
    why = "it is spelt otherwise here" if known else did_you_mean(text, choices)
    spelt = known if ":" in known else section.spell(name, known)
    fix = f"write {spelt}" if known else f"write one of {', '.join(choices)}"
    section.error("RST-T006", name, f"is {shown(text)}", why, fix)
    return None


def _set_written(name: str, value: Any, place: Where, values: Values, root: Section, notation: Notation) -> None:
    """Set a written setting; report an error if it contradicts the value derived from the notation's other keys.

    An override on the command line may contradict a framework's script, whose flags cannot be removed there.
    """
    if name in values and not _is_equal(values[name], value) and not _overrides(place, notation):
        root.findings.error(
            "RST-T008",
            place,
            f"is {shown(value)}, but {_deciding_keys_text(name, root, notation)} it {shown(values[name])}",
            fix="keep one of the two",
        )
    values[name] = value


def _overrides(place: Where, notation: Notation) -> bool:
    return place.file == COMMAND_LINE and notation in (Notation.VERL, Notation.TRL)


def _deciding_keys_text(name: str, root: Section, notation: Notation) -> str:
    """The keys that a setting is derived from, as the start of a sentence: `a and b make`."""
    keys = [key.key_path for key in deciding_keys(root, notation, name)]
    return f"{' and '.join(keys)} make{'s' if len(keys) == 1 else ''}" if keys else "the config's other settings make"


def _is_equal(one: Any, other: Any) -> bool:
    both_numbers = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other) if both_numbers else bool(one == other)


def _model_of(job: Job, root: Section) -> tuple[str | None, Where]:
    """The actor's model, else the engine's, and its place; a critic may start from another model."""
    found = {part.name: part for part in job.components if part.model.path}
    part = found.get("actor") or found.get("rollout") or found.get("sft_train")
    if part is None:
        return None, root.where()
    keys = deciding_keys(root, job.notation, "model")
    return part.model.path, keys[0] if keys else part.where


def _settings(values: Values, job: Job, root: Section) -> TrainSettings:
    def part(name: str) -> Values:
        """Written, derived and default values of the settings of one part."""
        return {each.name: values[each.name] for each in SETTINGS_OF[name] if values.get(each.name) is not None}

    rollout, sampling = RolloutSettings(**part("rollout")), SamplingSettings(**part("sampling"))
    minibatches = _minibatches(values, rollout, job, root)
    steps = values.get("max_steps", None if "max_epochs" in values else default_of("max_steps"))
    old_logprobs = OldLogprobs.DECOUPLED if values.get("max_staleness") else OldLogprobs.RECOMPUTE
    loss = {"old_logprobs": old_logprobs, **part("learner.loss")}
    if values.get("objective") is Objective.SFT:
        place = setting_location("teacher", job)
        loss["distillation"] = read_distillation(values.get("teacher", {}), place, root.findings)
    if "clip_range" in loss:
        loss.setdefault("clip_range_high", loss["clip_range"])
    actor = next((each for each in job.components if each.name == "actor"), None)
    learner = LearnerSettings(
        **part("learner"),
        adapter=_adapter(part("learner.adapter")),
        temperature=sampling.temperature,
        min_new_tokens=sampling.min_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        router_replay=sampling.router_replay,
        seed=values.get("seed", 0),
        offloads=actor.model.offloads if actor is not None else (),
        optimizer=OptimizerSettings(**part("learner.optimizer")),
        loss=LossSettings(**loss),
    )
    run = {name: value for name, value in part("").items() if name != "minibatch_size"}
    return TrainSettings(
        learner,
        **{"name": "", **run, "max_steps": steps},
        minibatches=minibatches,
        advantage=AdvantageSettings(
            **{"max_new_tokens": sampling.max_new_tokens, **_estimator_defaults(values), **part("advantage")}
        ),
        sampling=sampling,
        rollout=rollout,
        evaluation=EvaluationSettings(**part("evaluation")),
        checkpoint=CheckpointSettings(**part("checkpoint")),
    ).with_schedule()


STEP_GAMMA = 0.95  # ROLL's


def _estimator_defaults(values: Values) -> Values:
    """Defaults that depend on the advantage estimator; with step returns, rewards belong to samples."""
    match values.get("advantage_estimator"):
        case AdvantageEstimator.GAE:
            found: Values = {"whiten_advantages": Whitening.TOKENS_BIASED}
        case AdvantageEstimator.REINFORCE_BASELINE:
            found = {"whiten_advantages": Whitening.TOKENS}
        case AdvantageEstimator.GIGPO:
            found = {"step_gamma": STEP_GAMMA, "reward_baseline": RewardScope.GROUP, "reward_std": RewardScope.GROUP}
        case _:
            found = {}
    has_steps = "step_gamma" in found or values.get("step_gamma") is not None
    return found | ({"advantage_level": AdvantageLevel.SAMPLE} if has_steps else {})


def _adapter(values: Values) -> AdapterSettings | None:
    """The adapter of a config with a `lora_rank`; its default alpha is twice the rank."""
    if "lora_rank" not in values:
        return None
    return AdapterSettings(**{**values, "lora_alpha": values.get("lora_alpha") or 2.0 * values["lora_rank"]})


def _minibatches(values: Values, rollout: RolloutSettings, job: Job, root: Section) -> int:
    """Optimizer steps (minibatches) per training step."""
    size, count = values.get("minibatch_size"), values.get("minibatches")
    samples = rollout.prompts_per_step * rollout.num_generations
    place = setting_location("minibatch_size", job)
    if size is None:
        return int(count or 1)
    if count is not None and not _overrides(place, job.notation) and math.ceil(samples / size) != count:
        root.findings.error(
            "RST-T008",
            place,
            f"is {size}, but {_deciding_keys_text('minibatch_size', root, job.notation)} it {samples / count:g}",
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
            f"{why}; they are split evenly into {parts}, of {samples / parts:g} samples on average",
            f"write a number that divides {samples}",
        )
    return parts
