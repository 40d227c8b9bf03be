"""Settings of a job that `convert` carries beside the placement: advantage estimator, KL, and some names.

They stand in a job's settings, in words that all notations share, so that a converted job has its source's own values.
"""

from __future__ import annotations

from collections.abc import Mapping

from roost.config.job import Notation

ESTIMATOR = "advantage_estimator"
WHITEN = "whiten_advantages"  # after the estimator, over all tokens
BASELINE, STD = "reward_baseline", "reward_std"  # scopes of statistics of rewards that the estimator does not say
STEPS = "step_rewards"  # each step of an episode has its own return
KL_COEF = "kl_coef"
KL_IN = "kl_in"  # loss or reward
PROMPT = "max_prompt_length"
RESPONSE = "max_response_length"  # of a job that does not say how long sequences are in all
REWARD = "reward_function"  # a URL, or a file with Python
AGENT = "agent_function"
JOB_NAME = "job_name"
WEIGHT_UPDATE = "weight_update_mode"
CARRIED = (ESTIMATOR, KL_COEF, KL_IN, PROMPT, RESPONSE, REWARD, AGENT, JOB_NAME, WEIGHT_UPDATE)
# The word of each program for an estimator; the words of verl are those that all share.
ESTIMATORS: Mapping[Notation, Mapping[str, str]] = {
    Notation.VERL: {
        name: name
        for name in (
            *("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg"),
            *("grpo_passk", "grpo_vectorized", "rloo_vectorized"),
        )
    },
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
        "reinforce_plus_plus": "reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    },
    Notation.SKYRL: {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce++"},
    Notation.NEMO: {"gae": "gae", "grpo": "grpo", "gdpo": "gdpo", "reinforce_plus_plus": "reinforce_plus_plus"},
    Notation.RLINF: {"gae": "gae", "grpo": "grpo", "reinforce_plus_plus": "reinpp"},
    Notation.ROLL: {"gae": "gae", "grpo": "grpo", "reinforce": "reinforce"},
}


def algorithm_of(
    notation: Notation,
    estimator: object = None,
    in_loss: object = None,
    in_reward: object = None,
    prompt: float | None = None,
) -> dict[str, object]:
    """Settings for the algorithm of a job; `in_loss` and `in_reward` are coefficients of KL, None where there is none.

    >>> algorithm_of(Notation.OPENRLHF, "group_norm", in_reward=0.01)
    {'advantage_estimator': 'grpo', 'kl_coef': 0.01, 'kl_in': 'reward'}
    """
    words = ESTIMATORS[Notation.SLIME if notation is Notation.MILES else notation] if notation in _SAY else {}
    shared = {word: name for name, word in words.items()}
    found: dict[str, object] = {}
    if isinstance(estimator, str):
        found[ESTIMATOR] = shared.get(estimator, estimator)
    for place, value in (("loss", in_loss), ("reward", in_reward)):
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and KL_COEF not in found:
            found |= {KL_COEF: value, KL_IN: place}
    return found | ({PROMPT: int(prompt)} if prompt else {})


def shared_estimator(settings: Mapping[str, object]) -> object:
    """The job's estimator; rewards that are whitened over the batch are what other programs call REINFORCE++.

    >>> shared_estimator({ESTIMATOR: "reinforce", WHITEN: True}), shared_estimator({ESTIMATOR: "reinforce"})
    ('reinforce_plus_plus', 'reinforce')
    """
    said = settings.get(ESTIMATOR)
    return "reinforce_plus_plus" if said == "reinforce" and settings.get(WHITEN) is True else said


def estimator_of_train(shared: object) -> object:
    """The value of train.advantage_estimator that stands for a word that all notations share.

    >>> estimator_of_train("reinforce_plus_plus"), estimator_of_train("reinforce")
    ('reinforce++', 'reward')
    """
    return _OF_TRAIN.get(str(shared), shared)


_SAY = (*ESTIMATORS, Notation.MILES)
_OF_TRAIN = {
    "rloo": "leave_one_out",
    "dr_grpo": "group_mean",
    "reinforce": "reward",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
