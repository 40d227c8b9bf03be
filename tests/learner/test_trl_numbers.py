"""Losses agree with those of TRL 1.16 (`GRPOTrainer._compute_loss`) on the same log-probs.

The numbers were made by calling that method in float64 on the CPU, with the log-probs below instead of a model's, once
for each case; TRL itself is not needed here.
"""

import pytest
import torch

from roost.config.train import ImportanceSamplingLevel, KlEstimator, LossAggregation, LossSettings, PolicyLoss
from roost.learner.losses import PolicyBatch, Totals, policy_loss

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]) > 0
NEW = torch.tensor(
    [[-1.573, -1.107, -1.027, -2.057], [-0.655, -1.947, -1.678, -0.884], [-1.431, -2.341, -1.341, -1.434]],
    dtype=torch.float64,
)
OLD = torch.tensor(
    [[-1.532, -1.035, -0.608, -1.653], [0.076, -1.886, -0.943, -0.276], [-0.897, -2.616, -1.478, -1.651]],
    dtype=torch.float64,
)
REFERENCE = torch.tensor(
    [[-1.189, -1.405, -0.483, -2.238], [-0.171, -1.368, -1.805, -0.909], [-1.726, -2.716, -1.397, -1.349]],
    dtype=torch.float64,
)
ENGINE = torch.tensor(
    [[-1.493, -0.936, -0.631, -1.93], [-0.492, -1.584, -1.151, -0.004], [-0.865, -2.432, -1.379, -1.914]],
    dtype=torch.float64,
)
ADVANTAGES = torch.tensor([1.2, -0.7, -0.5], dtype=torch.float64)

CASES = {
    "grpo": (
        {"loss_aggregation": LossAggregation.SEQ_MEAN},
        0.06282292,
        [-0.09598291, -0.09305309, -0.06577042, -0.06676441, 0.0, 0.10976271, 0.0, 0.07314059, 0.06371267],
    ),
    "bnpo": (
        {"loss_aggregation": LossAggregation.TOKEN_MEAN},
        -0.11206604,
        [-0.12797722, -0.12407079, -0.08769389, -0.08901922, 0.0, 0.07317514, 0.0, 0.07314059, 0.06371267],
    ),
    "dapo": (
        {"loss_aggregation": LossAggregation.TOKEN_MEAN},
        -0.11206604,
        [-0.12797722, -0.12407079, -0.08769389, -0.08901922, 0.0, 0.07317514, 0.0, 0.07314059, 0.06371267],
    ),
    "dr_grpo": (
        {"loss_aggregation": LossAggregation.SEQ_SUM_NORM},
        -0.04202476,
        [-0.04799146, -0.04652654, -0.03288521, -0.03338221, 0.0, 0.02744068, 0.0, 0.02742772, 0.02389225],
    ),
    "delta": (
        {"dual_clip": 1.3},
        0.06190455,
        [-0.09598291, -0.09305309, -0.06577042, -0.06676441, 0.0, 0.10976271, 0.0, 0.0, 0.06371267],
    ),
    "gspo": (
        {"importance_sampling_level": ImportanceSamplingLevel.SEQUENCE, "clip_range": 0.03, "clip_range_high": 0.04},
        0.07145527,
        [-0.07913618, -0.07913618, -0.07913618, -0.07913618, 0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    "luspo": (
        {
            "importance_sampling_level": ImportanceSamplingLevel.SEQUENCE,
            "clip_range": 0.03,
            "clip_range_high": 0.04,
            "loss_aggregation": LossAggregation.SEQ_SUM,
        },
        -0.32851224,
        [-0.31654473, -0.31654473, -0.31654473, -0.31654473, 0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    "cispo": (
        {
            "loss_type": PolicyLoss.CISPO,
            "clip_range": 1.0,
            "clip_range_high": 0.1,
            "loss_aggregation": LossAggregation.TOKEN_MEAN,
        },
        0.17321223,
        [
            -0.12797722,
            -0.12407079,
            -0.08769389,
            -0.08901922,
            0.03744435,
            0.07317514,
            0.03256974,
            0.06111111,
            0.06111111,
        ],
    ),
    "sapo": (
        {"loss_type": PolicyLoss.SAPO},
        -0.02331755,
        [-0.0959442, -0.09294091, -0.0638809, -0.06495412, 0.05220083, 0.10965684, 0.03108008, 0.0711574, 0.06333558],
    ),
    "kl": (
        {"kl_coef": 0.1, "kl_estimator": KlEstimator.K3},
        0.07235784,
        [-0.09988413, -0.0909056, -0.07179446, -0.06538471, -0.01037586, 0.09669182, 0.00283854, 0.07661516, 0.0643178],
    ),
    "kl with use_bias_correction_kl": (
        {"kl_coef": 0.1, "kl_estimator": KlEstimator.K3, "kl_importance_sampling": True},
        0.07039326,
        [
            -0.09905437,
            -0.09074227,
            -0.06875201,
            -0.06575738,
            -0.00388351,
            0.10068377,
            0.00192161,
            0.07862614,
            0.06442626,
        ],
    ),
    "token_truncate": (
        {"rollout_is": ImportanceSamplingLevel.TOKEN, "importance_weight_cap": 1.1},
        0.02808341,
        [-0.09231163, -0.08428216, -0.06730067, -0.07344085, 0.0, 0.08115175, 0.0, 0.06084828, 0.05770729],
    ),
    "sequence_truncate": (
        {"rollout_is": ImportanceSamplingLevel.TRAJECTORY, "importance_weight_cap": 1.1},
        0.00198678,
        [-0.1055812, -0.1023584, -0.07234746, -0.07344085, 0.0, 0.12073898, 0.0, 0.05337719, 0.0464968],
    ),
    "token_mask": (
        {
            "loss_aggregation": LossAggregation.TOKEN_MEAN,
            "rollout_is": ImportanceSamplingLevel.TOKEN,
            "importance_weight_cap": 0.0,
            "rollout_rejection": {"token": [0.7, 1.3]},
        },
        -0.10949114,
        [-0.12308218, -0.11237621, -0.08973423, 0.0, 0.0, 0.05410117, 0.0, 0.06084828, 0.05770729],
    ),
    "sequence_mask": (
        {
            "loss_aggregation": LossAggregation.TOKEN_MEAN,
            "rollout_is": ImportanceSamplingLevel.TRAJECTORY,
            "importance_weight_cap": 0.0,
            "rollout_rejection": {"trajectory": [0.7, 1.3]},
        },
        -0.37185409,
        [-0.15048332, -0.1458899, -0.10311576, -0.10467416, 0.0, 0.0, 0.0, 0.05337719, 0.0464968],
    ),
}


@pytest.mark.parametrize(("settings", "loss", "gradient"), CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_trl(settings, loss, gradient):
    """TRL divides by all tokens, rejected ones included; so does Roost where it does not count them beforehand."""
    sequence = torch.nonzero(MASK)[:, 0]
    logprobs = NEW[MASK].requires_grad_()
    batch = PolicyBatch(
        logprobs,
        OLD[MASK],
        ENGINE[MASK],
        ADVANTAGES[sequence],
        sequence,
        sequence,
        reference_logprobs=REFERENCE[MASK],
    )
    totals = Totals(sequences=3, tokens=int(MASK.sum()), longest=8)
    found, _ = policy_loss(batch, LossSettings(**{"clip_range": 0.2, "clip_range_high": 0.28, **settings}), totals)
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)
