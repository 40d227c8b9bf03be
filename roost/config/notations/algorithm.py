"""Settings that `convert` carries over beside the placement: advantage estimator, KL, lengths and some names.

They are in a job's `settings`, in words that all notations share: mostly verl's.
"""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.job import Notation
from roost.config.train_choices import RewardScope

ESTIMATOR = "advantage_estimator"
WHITEN = "whiten_advantages"  # after the estimator, over all tokens
MEAN_ALONE = "batch/none"  # a value of WHITEN: without a division by the standard deviation
BASELINE, STD = "reward_baseline", "reward_std"  # scopes of reward statistics that the estimator does not imply
LEAVES_OUT = "baseline_leaves_one_out"  # the baseline is the mean of the other rewards
BY_TURN = "discount_by_turn"
STEPS = "step_rewards"  # each step of an episode has its own return
KL_COEF = "kl_coef"
KL_IN = "kl_in"  # loss or reward
PROMPT = "max_prompt_length"
RESPONSE = "max_new_tokens"  # unless it is what the longest prompt leaves of a sequence
REWARD = "reward_function"  # a URL, or a file with Python
AGENT = "agent_function"
JOB_NAME = "job_name"
WEIGHT_UPDATE = "weight_update_mode"
# Estimators in words that all notations share, by the scopes of the mean and the standard deviation of rewards.
Scopes = tuple[RewardScope, RewardScope]
NORMALISED: Mapping[Scopes, str] = {
    (RewardScope.NONE, RewardScope.NONE): "reinforce",
    (RewardScope.GROUP, RewardScope.NONE): "dr_grpo",
    (RewardScope.GROUP, RewardScope.GROUP): "grpo",
    (RewardScope.BATCH, RewardScope.BATCH): "reinforce_plus_plus",
}
# Each program's word for an estimator; "with" adds a second key that it needs. The shared words are verl's.
ESTIMATORS: Mapping[Notation, Mapping[str, str]] = {
    Notation.VERL: {
        name: name
        for name in (
            *("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg"),
            *("grpo_passk", "grpo_vectorized", "rloo_vectorized"),
        )
    }
    | {"gspo": "grpo with policy_loss.loss_mode=gspo"},
    Notation.OPENRLHF: {
        "gae": "gae",
        "grpo": "group_norm",
        "rloo": "rloo",
        "dr_grpo": "dr_grpo",
        "reinforce_plus_plus": "reinforce",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
    },
    Notation.SLIME: {
        "gae": "ppo",
        "grpo": "grpo",
        "gspo": "gspo",
        "reinforce": "reinforce_plus_plus",  # without --normalize-advantages
        "dr_grpo": "reinforce_plus_plus_baseline",
        "reinforce_plus_plus": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    },
    Notation.SKYRL: {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce++"},
    Notation.NEMO: {"gae": "gae", "grpo": "grpo", "gdpo": "gdpo", "reinforce_plus_plus": "reinforce_plus_plus"},
    Notation.RLINF: {
        "gae": "gae",
        "grpo": "grpo",
        "reinforce": "raw",
        "reinforce_plus_plus": "reinpp",
        "reinforce_plus_plus_baseline": "reinpp with use_reinpp_baseline",
    },
    Notation.AREAL: {
        name: name
        for name in (
            *("gae", "grpo", "rloo", "dr_grpo", "reinforce"),
            *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        )
    },
    Notation.ROLL: {"gae": "gae", "grpo": "grpo", "reinforce": "reinforce"},
}


def algorithm_of(
    notation: Notation,
    estimator: object = None,
    in_loss: object = None,
    in_reward: object = None,
    prompt: float | None = None,
    whitens: bool | None = None,
) -> dict[str, object]:
    """Settings for the algorithm of a job; `in_loss` and `in_reward` are KL coefficients, None for no KL.

    A coefficient of 0 counts: the job has a reference, though it does not affect training. `whitens` is a switch for
    whitened advantages; None if the estimator alone decides.

    >>> algorithm_of(Notation.OPENRLHF, "group_norm", in_reward=0.01)
    {'advantage_estimator': 'grpo', 'kl_coef': 0.01, 'kl_in': 'reward'}
    >>> algorithm_of(Notation.SLIME, "reinforce_plus_plus", whitens=False)
    {'advantage_estimator': 'reinforce'}
    """
    words = ESTIMATORS[Notation.SLIME if notation is Notation.MILES else notation] if notation in _WITH_WORDS else {}
    shared = {word: name for name, word in words.items()}
    found: dict[str, object] = {}
    if isinstance(estimator, str):
        name = shared.get(estimator, estimator)
        found[ESTIMATOR] = NOT_WHITENED.get(name, name) if whitens is False else name
    if whitens and found.get(ESTIMATOR) not in NOT_WHITENED:
        found[WHITEN] = True
    for place, value in (("loss", in_loss), ("reward", in_reward)):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and KL_COEF not in found:
            found |= {KL_COEF: value, KL_IN: place}
    return found | ({PROMPT: int(prompt)} if prompt else {})


def completion_of(prompt: float | None, response: float | None, sequence: float | None) -> dict[str, object]:
    """The setting for the longest completion; none if it is what the longest prompt leaves of a sequence.

    >>> completion_of(1024, 512, 4096), completion_of(1024, 512, 1536)
    ({'max_new_tokens': 512}, {})
    """
    is_implied = prompt is not None and sequence is not None and response == sequence - prompt
    is_limit = response and not is_implied and (sequence is None or response < sequence)
    return {RESPONSE: int(response)} if response and is_limit else {}


def shared_estimator(settings: Mapping[str, object]) -> object:
    """The job's estimator; one whose advantages are whitened is REINFORCE++ in other programs.

    >>> shared_estimator({ESTIMATOR: "reinforce", WHITEN: True}), shared_estimator({ESTIMATOR: "reinforce"})
    ('reinforce_plus_plus', 'reinforce')
    """
    said = settings.get(ESTIMATOR)
    return _WHITENED.get(str(said), said) if settings.get(WHITEN) in (True, MEAN_ALONE) else said


def with_shared_estimator(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with the estimator that `shared_estimator` names, without the whitening that its name includes.

    >>> with_shared_estimator({ESTIMATOR: "reinforce", WHITEN: True}), with_shared_estimator({ESTIMATOR: "grpo"})
    ({'advantage_estimator': 'reinforce_plus_plus'}, {'advantage_estimator': 'grpo'})
    """
    if ESTIMATOR not in settings:
        return dict(settings)
    name = shared_estimator(settings)
    is_included = name != settings[ESTIMATOR] and settings[WHITEN] is True
    return {key: value for key, value in settings.items() if not (is_included and key == WHITEN)} | {ESTIMATOR: name}


def estimator_of_train(shared: object) -> object:
    """The value of train.advantage_estimator for a word that all notations share.

    >>> estimator_of_train("reinforce_plus_plus"), estimator_of_train("reinforce")
    ('reinforce++', 'reward')
    """
    return _OF_TRAIN.get(str(shared), shared)


_WITH_WORDS = (*ESTIMATORS, Notation.MILES)
_WHITENED = {"reinforce": "reinforce_plus_plus", "dr_grpo": "reinforce_plus_plus_baseline"}
NOT_WHITENED: Mapping[str, str] = {whitened: plain for plain, whitened in _WHITENED.items()}
_OF_TRAIN = {
    "rloo": "leave_one_out",
    "dr_grpo": "group_mean",
    "reinforce": "reward",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
