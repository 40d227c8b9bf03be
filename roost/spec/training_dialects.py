"""Settings that a notation spells otherwise than by one key: clip ranges, names of algorithms, the lag."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from roost.spec.job import Job, Notation
from roost.spec.section import Section
from roost.spec.training import Behaviour, Estimator, Mean, RatioLevel

ESTIMATORS = {
    "grpo": Estimator.GRPO,
    "gae": Estimator.GAE,
    "reinforce": Estimator.REINFORCE,
    "reinforce++": Estimator.REINFORCE,
    "reinforce_pp": Estimator.REINFORCE,
    "rloo": Estimator.LEAVE_ONE_OUT,
    "leave_one_out": Estimator.LEAVE_ONE_OUT,
    "leave_none_out": Estimator.GROUP_MEAN,
}
MEANS = {
    "token-mean": Mean.TOKENS,
    "seq-mean-token-mean": Mean.SEQUENCES,
    "seq-mean-token-sum": Mean.CONSTANT,
}
LOOP_LEVELS = {
    "pg_per_token": RatioLevel.TOKEN,
    "pg_per_turn": RatioLevel.TURN,
    "pg_per_trajectory": RatioLevel.TRAJECTORY,
}
LOOP_EPSILON = 0.1


def derived(root: Section, job: Job) -> dict[str, Any]:
    """What the notation's own keys amount to, in Roost's names; what is not given is left out."""
    read = {Notation.RLINF: _rlinf, Notation.ROLL: _roll, Notation.LOOP: _loop}[job.notation]
    return {name: value for name, value in read(root, job).items() if value is not None}


def _rlinf(root: Section, job: Job) -> dict[str, Any]:
    algorithm = root.below("algorithm")
    epsilon = algorithm.number("ratio_clip_eps")
    low, high = algorithm.number("clip_ratio_low"), algorithm.number("clip_ratio_high")
    recomputes = algorithm.values.get("recompute_logprobs")
    return {
        "estimator": _named(algorithm, "adv_type", ESTIMATORS.get),
        "mean": _named(algorithm, "loss_agg_func", MEANS.get),
        **_bounds(low if low is not None else epsilon, high if high is not None else epsilon),
        "behaviour": {True: Behaviour.RECOMPUTED, False: Behaviour.ENGINE}.get(recomputes)
        if isinstance(recomputes, bool)
        else None,
    }


def _roll(root: Section, job: Job) -> dict[str, Any]:
    epsilon = root.number("pg_clip")
    low, high = root.number("pg_clip_low"), root.number("pg_clip_high")
    ratio = job.settings.get("async_generation_ratio")
    return {
        "estimator": _named(root, "adv_estimator", ESTIMATORS.get),
        "mean": _named(root, "loss_agg_mode", MEANS.get),
        **_bounds(low if low is not None else epsilon, high if high is not None else epsilon),
        "max_policy_lag": math.ceil(ratio) if isinstance(ratio, int | float) else None,
        "adapter_rank": _adapter_rank(job),
    }


def _loop(root: Section, job: Job) -> dict[str, Any]:
    rl = root.below("rl")
    epsilon = rl.number("ppo_epsilon")
    clips = rl.values.get("do_ppo_clipping") is not False
    recomputes = rl.values.get("recompute_rollout_probs")
    is_async = job.settings.get("async_rollouts") is True
    return {
        "estimator": Estimator.GRPO
        if rl.values.get("adv_normalization") is True
        else _named(rl, "baseline", ESTIMATORS.get),
        "ratio": (_named(rl, "loss_type", LOOP_LEVELS.get) if clips else RatioLevel.NONE),
        **({} if epsilon is None else _loop_clip(epsilon)),
        "behaviour": Behaviour.ENGINE if recomputes is False and not is_async else None,
        "max_policy_lag": 1 if is_async else None,
        "adapter_rank": _adapter_rank(job),
    }


def defaults(notation: Notation) -> dict[str, Any]:
    """What a notation does where a config says nothing, and Roost would do otherwise."""
    return _loop_clip(LOOP_EPSILON) if notation is Notation.LOOP else {}


def _loop_clip(epsilon: float) -> dict[str, float]:
    """The clip of ml-loop is symmetric in the logarithm."""
    return {"clip_low": 1 / (1 + epsilon), "clip_high": 1 + epsilon}


def _bounds(below: float | None, above: float | None) -> dict[str, float]:
    """The bounds of the ratio, from how far it may be from 1."""
    return ({} if below is None else {"clip_low": 1 - below}) | ({} if above is None else {"clip_high": 1 + above})


def _named(section: Section, key: str, meaning: Callable[[str], Any]) -> Any:
    """What another program's word means here; a word that Roost has no match for is a finding."""
    word = section.text(key) if key in section else None
    if word is None:
        return None
    found = meaning(word)
    if found is None:
        section.error(key, f"{word} is nothing Roost has", fix="remove it, and say what you want in the section train")
    return found


def _adapter_rank(job: Job) -> int | None:
    ranks = [part.model.adapter_rank for part in job.components if part.name == "actor"]
    return ranks[0] if ranks else None
