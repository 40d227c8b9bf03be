"""Choices of settings of the section `train`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class AdvantageEstimator(StrEnum):
    """Advantage of a sample over its baseline."""

    LEAVE_ONE_OUT = "leave_one_out"  # its return less the mean of the others of its group (LOOP, RLOO)
    GROUP_MEAN = "group_mean"  # less the mean of its group
    GRPO = "grpo"  # that, divided by the group's standard deviation (of a sample: n - 1)
    REINFORCE = "reinforce++"  # its return, normalised over the whole batch
    REINFORCE_BASELINE = "reinforce++_baseline"  # less the mean of its group, whitened over the tokens of the batch
    REWARD = "reward"  # its return as it is
    GIGPO = "gigpo"  # episode return plus step return, each normalised in its group (GiGPO)
    GAE = "gae"  # from a critic's values
    TEACHER = "teacher"  # 0: only the KL from a teacher trains the policy (on-policy distillation)


class Objective(StrEnum):
    """Reinforcement learning, or supervised training on given completions."""

    RL = "rl"
    SFT = "sft"


class PolicyLoss(StrEnum):
    """Loss of a token, from its importance ratio and advantage."""

    PPO = "ppo"  # the clipped surrogate of PPO, GRPO, DAPO and GSPO
    CISPO = "cispo"  # -A log p, weighted by the clipped ratio, which has no gradient
    SAPO = "sapo"  # a sigmoid of the ratio instead of a clip
    TOPR = "topr"  # -A log p, weighted by the ratio up to 1 where the reward is 0 or less
    KIMI15 = "kimi15"  # -A log p, and the squared log-ratio


class ImportanceSamplingLevel(StrEnum):
    """Unit over which the importance ratio is computed and clipped."""

    TOKEN = "token"
    TURN = "turn"  # the product over the tokens of a turn
    TURN_MEAN = "turn_mean"  # their geometric mean
    TRAJECTORY = "trajectory"  # the product over all tokens of a sample (LOOP)
    SEQUENCE = "sequence"  # their geometric mean (GSPO)
    NONE = "none"  # no ratio: plain policy gradient


class LossAggregation(StrEnum):
    """Reduction of token losses to one number."""

    SEQ_MEAN = "seq-mean-token-mean"  # mean per sequence, then over sequences
    TOKEN_MEAN = "token-mean"  # mean over all tokens of the minibatch
    SEQ_SUM = "seq-mean-token-sum"  # sum per sequence, then the mean over sequences
    SEQ_SUM_NORM = "seq-mean-token-sum-norm"  # sum, divided by sequences times max_new_tokens


class RewardScope(StrEnum):
    """Samples over which a mean or a standard deviation of rewards is taken."""

    NONE = "none"
    GROUP = "group"
    TAG = "tag"  # the samples of a step whose tasks have the same tag
    BATCH = "batch"  # all samples of a step


class AdvantageLevel(StrEnum):
    """Unit of reward statistics where an episode has several samples."""

    EPISODE = "episode"
    SAMPLE = "sample"


class DiscountLevel(StrEnum):
    """Unit over which rewards are discounted."""

    TOKEN = "token"
    TURN = "turn"


class Whitening(StrEnum):
    """Advantages with mean 0 and standard deviation 1 over all generated tokens of a step."""

    NONE = "none"
    TOKENS = "tokens"  # divided by sqrt(variance + 1e-8), the variance of a sample (n - 1): ROLL's
    TOKENS_BIASED = "tokens_biased"  # divided by (standard deviation + 1e-5), that of n: RLinf's
    TOKENS_UNBIASED = "tokens_unbiased"  # the same with n - 1: RLinf's gae without a critic
    TOKENS_CLAMPED = "tokens_clamped"  # divided by sqrt(max(variance, 1e-8)), that of n: RLinf's reinpp


class KlEstimator(StrEnum):
    """Estimator of the KL divergence from the log-probs of single tokens."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"  # the absolute value of k1


class Divergence(StrEnum):
    """Divergence of the policy's distribution from a teacher's, in supervised training."""

    FORWARD_KL = "forward_kl"  # KL(teacher || policy)
    REVERSE_KL = "reverse_kl"  # KL(policy || teacher)
    ADAPTIVE_KL = "adaptive_kl"  # both, weighted by the difference at likely and at unlikely tokens
    SKEWED_FORWARD_KL = "skewed_forward_kl"  # KL(teacher || mixture of both)
    SKEWED_REVERSE_KL = "skewed_reverse_kl"  # KL(policy || mixture of both)
    JS = "js_divergence"  # mean KL of both to their mean


class OldLogprobs(StrEnum):
    """The log-probs in the denominator of the importance ratio."""

    RECOMPUTE = "recompute"  # the learner's, before the first optimizer step on the samples
    ROLLOUT = "rollout"  # those that the engine reported
    DECOUPLED = "decoupled"  # the learner's, weighted by their ratio to the engine's (decoupled PPO, for stale samples)


class RolloutLogprobs(StrEnum):
    """Samples whose log-probs are requested from the engine."""

    AUTO = "auto"  # all, unless vLLM or SGLang generates single turns and the loss does not use them: then some
    ALL = "all"
    SOME = "some"  # those of a few groups per step, for the mismatch of engine and learner


class OptimizerType(StrEnum):
    """The optimizer, and the precision of its state."""

    ADAMW = "adamw"
    MUON = "muon"  # for the matrices of layers; AdamW for embeddings, last layer, experts, routers and vectors
    ADAMW_8BIT = "adamw_8bit"  # AdamW whose moments have 8 bits (torchao)


class LrSchedulerType(StrEnum):
    """Learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"  # warm-up, stable, decay: constant, then a decay at the end


class WsdDecayStyle(StrEnum):
    """Decay at the end of a WSD schedule, as Megatron names them."""

    LINEAR = "linear"
    COSINE = "cosine"
    MINUS_SQRT = "minus_sqrt"  # 1 - sqrt(x)
    EXPONENTIAL = "exponential"  # 2 * 0.5^x - 1


_CLIPPED = "loss_type: ppo"
_GSPO = "importance_sampling_level: sequence, clip_range: 0.0003, clip_range_high: 0.0004"
_DAPO = "clip_range_high: 0.28, loss_aggregation: token-mean, dynamic_sampling: true"
_REINFORCE = "advantage_estimator: reward, whiten_advantages: tokens"  # the paper's; reinforce++ is ROLL's
_DR_GRPO = "advantage_estimator: group_mean, loss_aggregation: seq-mean-token-sum-norm"

# Names of algorithms and choices of other frameworks (in lower case, with underscores), and Roost's spelling.
OTHER_NAMES: Mapping[type[StrEnum], Mapping[str, str]] = {
    PolicyLoss: {
        "gspo": f"{_CLIPPED}, {_GSPO}",
        "gspo_token": f"{_CLIPPED}, {_GSPO}",
        "grpo": f"{_CLIPPED}, advantage_estimator: grpo",
        "bnpo": f"{_CLIPPED}, loss_aggregation: token-mean",
        "dapo": f"{_CLIPPED}, {_DAPO}",
        "dr_grpo": f"{_CLIPPED}, {_DR_GRPO}",
        "drgrpo": f"{_CLIPPED}, {_DR_GRPO}",
        "vanilla": _CLIPPED,
        "actor": _CLIPPED,
        "actor_critic": f"{_CLIPPED}, advantage_estimator: gae",
        "reinforce": f"{_CLIPPED}, importance_sampling_level: none",
        "reinforce++": f"{_CLIPPED}, advantage_estimator: reinforce++",
        "rloo": f"{_CLIPPED}, advantage_estimator: leave_one_out",
        "tis": "loss_type: cispo, clip_range: 1, clip_range_high: 0",
    },
    AdvantageEstimator: {
        "dr_grpo": _DR_GRPO,
        "drgrpo": _DR_GRPO,
        "dapo": f"advantage_estimator: grpo, {_DAPO}",
        "gspo": f"advantage_estimator: grpo, {_GSPO}",
        "rloo": "advantage_estimator: leave_one_out",
        "loop": "advantage_estimator: leave_one_out",
        "ppo": "advantage_estimator: gae",
        "reinforce": "advantage_estimator: reward",
        "reinforce_plus_plus": _REINFORCE,
        "reinforce_plus_plus_baseline": "advantage_estimator: reinforce++_baseline",
        "reinpp": _REINFORCE,
    },
    ImportanceSamplingLevel: {
        "seq": "sequence",
        "gspo": "sequence",
        "geometric": "sequence",
        "segment": "turn_mean",
        "grpo": "token",
    },
    KlEstimator: {
        "kl": "k1",
        "mse": "k2",
        "low_var_kl": "k3",
    },
    OptimizerType: {
        "adam": "optimizer: adamw",
        "adamw_torch": "optimizer: adamw",
        "adamw_torch_fused": "optimizer: adamw",
        "adamw8bit": "optimizer: adamw_8bit",
        "adamw_bnb_8bit": "optimizer: adamw_8bit",
    },
    LrSchedulerType: {
        "warmup_stable_decay": "lr_scheduler_type: wsd",
        "constant_with_warmup": "lr_scheduler_type: constant",
    },
}


# Levels that may mean either the product or the geometric mean over a sample: in verl and ROLL they are the product.
OF_WHOLE_SAMPLES = ("seq", "sequence_level")


def level_of_samples(setting: str) -> str:
    """Both levels of a whole sample, for a fix.

    >>> level_of_samples("rollout_is")
    "rollout_is: trajectory for the product over a sample (verl's and ROLL's sequence), sequence for its geometric mean"
    """
    product = "trajectory for the product over a sample (verl's and ROLL's sequence)"
    return f"{setting}: {product}, sequence for its geometric mean"


def other_name(choices: type[object], word: str) -> str:
    """Roost's spelling of another framework's choice; empty if there is none.

    It is a value of the same setting, or, if it has a colon, all settings to write.

    >>> other_name(PolicyLoss, "GSPO")
    'loss_type: ppo, importance_sampling_level: sequence, clip_range: 0.0003, clip_range_high: 0.0004'
    >>> other_name(PolicyLoss, "ppoo")
    ''
    """
    names = next((names for kind, names in OTHER_NAMES.items() if kind is choices), {})
    return names.get(word.strip().lower().replace("-", "_").replace(" ", "_"), "")
