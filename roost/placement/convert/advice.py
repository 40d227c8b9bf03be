"""Reasons and fixes for what a converted job loses, and notes on the keys that it still needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from roost.config.findings import Findings, Where
from roost.config.job import TRAINED, Notation
from roost.config.notations.algorithm import (
    AGENT,
    ESTIMATOR,
    ESTIMATORS,
    JOB_NAME,
    KL_COEF,
    KL_IN,
    PROMPT,
    RESPONSE,
    REWARD,
)
from roost.placement.diff import AHEAD, NOTHING, Change
from roost.placement.plan import Plan

Advice = tuple[str, str]  # why, and a fix
CHANGE_PRINTED = "edit what is printed where other values are wanted"
CHECK_MEMORY = "check the memory of what is printed with roost plan"
SAME_ON_EQUAL = "do nothing on equal machines; else list the nodes in this order"
# Notations that can have the KL in the loss, and in the rewards.
_KL_PLACES: Mapping[str, Sequence[Notation]] = {
    "loss": tuple(one for one in ESTIMATORS if one is not Notation.AREAL),
    "reward": (Notation.VERL, Notation.OPENRLHF, Notation.SLIME, Notation.SKYRL, Notation.ROLL, Notation.AREAL),
}
# Notations that set how many iterations rollouts are ahead: also in fractions, and in whole numbers.
_ANY_RATIO = (Notation.ROLL, Notation.VERL)
_WHOLE_RATIO = (*_ANY_RATIO, Notation.NEMO, Notation.OPENRLHF, Notation.SKYRL, Notation.PRIME, Notation.AREAL)
_ESTIMATOR_KEYS: Mapping[Notation, str] = {
    Notation.RLINF: "algorithm.adv_type",
    Notation.ROLL: "adv_estimator",
    Notation.LOOP: "rl.params.baseline",
    Notation.VERL: "algorithm.adv_estimator",
    Notation.SLIME: "--advantage-estimator",
    Notation.NEMO: "grpo.adv_estimator.name",
    Notation.OPENRLHF: "--algo.advantage.estimator",
    Notation.SKYRL: "trainer.algorithm.advantage_estimator",
    Notation.PRIME: "[orchestrator.algo]",
    Notation.AREAL: "actor.reward_norm and actor.adv_norm",
}
_REWARD_KEYS: Mapping[Notation, str] = {
    Notation.RLINF: "section reward",
    Notation.ROLL: "section rewards",
    Notation.LOOP: "the environment",
    Notation.VERL: "custom_reward_function.path",
    Notation.SLIME: "--custom-rm-path, or --rm-url for a server",
    Notation.NEMO: "section env",
    Notation.OPENRLHF: "--reward.remote_url",
    Notation.SKYRL: "environment.env_class",
    Notation.PRIME: "[[orchestrator.train.source]]",
    Notation.AREAL: "reward_fn of the training script",
}


def _or_convert(able: Iterable[Notation], *left_out: Notation) -> str:
    """Advice to convert to one of the `able` notations, without the target and the job's own (`left_out`)."""
    others = [one.value for one in able if one not in left_out]
    return f", or convert to {', '.join(others)}" if others else ""


def rewards_at(notation: Notation) -> str:
    return f"set the reward in {_REWARD_KEYS[notation]}"


def advise(change: Change, notation: Notation, source: Notation) -> Advice:
    """Advice on a difference other than of placement or model."""
    program = notation.program
    if change.subject == "settings":
        return _on_setting(str(change.component), change.before, change.after, notation, source)
    if change.subject == "residency":
        is_kept = change.after == "keep"
        return "", CHECK_MEMORY if is_kept else "expect a longer switch between generation and training"
    if change.subject == "role":
        if change.before == "engine":
            return f"{program} starts no engine for it", "start the engine in the component's own code"
        return f"the section of {program} for it names no model", f"name the model where {program} has it"
    if change.subject == "machines":
        return "no component uses the others", f"reserve {change.after}"
    return "", f"check that {program} may have {change.after}"


def _on_setting(key: str, before: str, after: str, notation: Notation, source: Notation) -> Advice:
    program, has_none = notation.program, after == NOTHING
    if key == KL_IN:
        return _on_kl(before, after, notation, source)
    if key == KL_COEF and has_none:
        return f"{program} has no KL penalty", "set the coefficient to 0 in the job, or choose another --to"
    if key == ESTIMATOR:
        return _on_estimator(before, notation, source)
    if key == AHEAD:
        others = _or_convert(_ANY_RATIO if "." in before else _WHOLE_RATIO, notation, source)
        why = f"{program} counts whole iterations" if notation in _WHOLE_RATIO and "." in before else ""
        return why, f"train with {after}{others}"
    if key == PROMPT:
        return "", "drop longer prompts from the data" if has_none else "change both lengths in what is printed"
    if key == RESPONSE:
        return "", f"limit completions in {program}'s sampling settings"
    if key in (REWARD, AGENT):
        return "", rewards_at(notation) if key == REWARD else f"write the agent as {program} has them"
    if key == JOB_NAME:
        return f"{program} has no name for a job", "name it where the job is submitted"
    return (
        "",
        f"train without it, or set it in {program}'s code" if has_none else f"train with {after}, or keep the job",
    )


def _on_kl(before: str, after: str, notation: Notation, source: Notation) -> Advice:
    others = _or_convert(_KL_PLACES[before], notation, source)
    if after == NOTHING:
        return f"{notation.program} has no KL penalty", f"set the coefficient to 0 in the job{others}"
    place = {"loss": "in the loss", "reward": "in the rewards"}
    why = f"{notation.program} has KL {place[after]} only"
    if notation is Notation.RLINF:
        why = "RLinf has KL in the rewards for REINFORCE++ only, else in the loss"
    return why, f"tune the coefficient for KL {place[after]}{others}"


def _on_estimator(before: str, notation: Notation, source: Notation) -> Advice:
    words, key = ESTIMATORS.get(notation), _ESTIMATOR_KEYS[notation]
    if not words:
        return f"{notation.program} has no name for estimators", f"set {key}, by which it computes advantages"
    instead = _or_convert((one for one, known in ESTIMATORS.items() if before in known), notation, source)
    return f"{notation.program} has {', '.join(dict.fromkeys(words.values()))}", f"choose one of them in {key}{instead}"


def advise_model(fields: Sequence[tuple[str, str, str]], notation: Notation) -> str:
    """A fix for fields of a model (name, value before, value after) that are lost or changed."""
    fixes = dict.fromkeys(_on_field(name, old, new, notation) for name, old, new in fields)
    return "; ".join(fixes)


def _on_field(name: str, old: str, new: str, notation: Notation) -> str:
    if name == "strategy":
        return f"replace options of {old}, which {notation.program} does not run here"
    if name == "path":
        return "name the engine's model in its own options, or quantize it there"
    if name == "sequence":
        return f"limit lengths in {notation.program}'s data and sampling settings"
    if name == "lora_rank":
        return "train all weights, or choose another --to"
    return CHECK_MEMORY


Values = Mapping[str, Any]
Need = tuple[str, str, Callable[[Plan, Values], bool]]  # a key, what it is for, and whether it is needed


def _always(plan: Plan, values: Values) -> bool:
    return True


def _generates(plan: Plan, values: Values) -> bool:
    return any(part.name.startswith("rollout") for part in plan.components)


def _has_no_model(plan: Plan, values: Values) -> bool:
    return not any(part.model.path for part in plan.components if part.name in ("actor", "rollout"))


def _has_no_reward_model(plan: Plan, values: Values) -> bool:
    return "--reward.num_nodes" in values and "--reward.model_name_or_path" not in values


def _has_no_micro_batch(plan: Plan, values: Values) -> bool:
    return "use_dynamic_bsz" not in values["actor_rollout_ref"]["actor"]


def _has_reference(plan: Plan, values: Values) -> bool:
    return "--use-kl-loss" in values or "--kl-coef" in values


_NEEDS: Mapping[Notation, Sequence[Need]] = {
    Notation.VERL: (
        ("data.train_files", "the prompts, and data.val_files", _always),
        ("actor_rollout_ref.model.path", "the model", _has_no_model),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "samples of a pass, with log_prob_micro_batch_size_per_gpu of rollout and ref, or use_dynamic_bsz",
            _has_no_micro_batch,
        ),
    ),
    Notation.SLIME: (
        ("--prompt-data", "the prompts, with --rollout-batch-size", _always),
        ("--rm-type", "the reward, or --custom-rm-path", _always),
        ("--hf-checkpoint", "the model", _has_no_model),
        ("--num-layers", "the model's sizes, as slime's scripts/models have them", _always),
        ("--ref-load", "the checkpoint of the reference", _has_reference),
    ),
    Notation.NEMO: (
        ("data", "the prompts, with env for the rewards; else those of the file of `defaults` are used", _always),
        ("policy.model_name", "the model; else that of the file of `defaults` is trained", _has_no_model),
    ),
    Notation.OPENRLHF: (
        ("--data.prompt_dataset", "the prompts", _always),
        ("--actor.model_name_or_path", "the model", _has_no_model),
        ("--reward.model_name_or_path", "the reward model", _has_no_reward_model),
    ),
    Notation.SKYRL: (
        ("data.train_data", "the prompts, and data.val_data", _always),
        ("environment.env_class", "the environment with the reward", _always),
    ),
    Notation.PRIME: (
        ("orchestrator.train.source", "the environment with data and reward", _always),
        ("model.name", "the model", _has_no_model),
    ),
    Notation.AREAL: (
        ("train_dataset.path", "the prompts, with type and batch_size", _always),
        ("experiment_name", "the run, with trial_name", _always),
        ("actor.path", "the model, and tokenizer_path", _has_no_model),
    ),
    Notation.RLINF: (
        ("data.train_data_paths", "the prompts", _always),
        ("actor.model.model_path", "the model", _has_no_model),
        ("reward", "the reward", _generates),
    ),
    Notation.ROLL: (
        ("actor_train.data_args.file_name", "the prompts", _always),
        ("pretrain", "the model", _has_no_model),
        ("rewards", "the rewards", _generates),
    ),
}


def note_needs(plan: Plan, notation: Notation, values: Values, findings: Findings) -> None:
    """Note keys that the other program needs and that no plan has.

    Notations that Roost trains from may have data and rewards in section `train`; between them nothing is missing.
    """
    if {plan.notation, notation} <= {*TRAINED} or not any(part.name == "actor" for part in plan.components):
        return
    for key, what, is_needed in _NEEDS.get(notation, ()):
        if is_needed(plan, values):
            why = f"{notation.program} takes it for {what}"
            findings.note("RST-N084", Where(path=(key,)), "not converted", why, "add it before the job is started")
