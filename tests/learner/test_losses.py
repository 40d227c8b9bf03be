"""The loss of a policy and its gradients, against numbers worked by hand."""

import math

import pytest
import torch

from roost.config.train import (
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LossSettings,
    OldLogprobs,
    PolicyLoss,
)
from roost.learner.losses import PolicyBatch, Totals, correction, policy_loss
from tests.grid import grid


def logs(probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def batch(new, old, advantages, sequence, turn, **others):
    others.setdefault("engine_logprobs", logs([0.123] * len(new)))  # the ratio must not depend on it by default
    return PolicyBatch(
        logprobs=logs(new).requires_grad_(),
        old_logprobs=None if old is None else logs(old),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence=torch.tensor(sequence),
        turn=torch.tensor(turn),
        **others,
    )


def totals_of(some, longest=4):
    return Totals(sequences=len(set(some.sequence.tolist())), tokens=len(some.sequence), longest=longest)


def check(some, settings, loss, gradient, longest=4):
    found, described = policy_loss(some, settings, totals_of(some, longest))
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert described["loss"].item() == pytest.approx(loss, rel=1e-6)
    found.backward()
    assert some.logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def S(x):
    """The sigmoid."""
    return 1 / (1 + math.exp(-x))


def two_sequences(**others):
    """Ratios 1.5 and 0.5 with advantage 2, and ratio 2 with advantage -1; the second sample has no reward."""
    others.setdefault("rewards", torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    places = [0, 0, 1], [0, 0, 1]
    return batch([0.6, 0.2, 0.8], [0.4, 0.4, 0.4], [2.0, 2.0, -1.0], *places, **others)


@pytest.mark.parametrize(
    ("settings", "loss", "gradient"),
    [
        # losses -1.28 * 2, -0.5 * 2 and 2, of which the first is clipped; weights 1/4, 1/4, 1/2
        pytest.param({}, -0.64 - 0.25 + 1.0, [0.0, -0.25, 1.0], id="mean of sequences"),
        pytest.param(
            {"loss_aggregation": LossAggregation.TOKEN_MEAN},
            (-2.56 - 1.0 + 2.0) / 3,
            [0.0, -1 / 3, 2 / 3],
            id="mean of tokens",
        ),
        pytest.param(
            {"loss_aggregation": LossAggregation.SEQ_SUM_NORM},
            (-2.56 - 1.0 + 2.0) / 8,
            [0.0, -1 / 8, 2 / 8],
            id="constant",
        ),
        pytest.param({"clip_range_high": 0.25}, -0.625 - 0.25 + 1.0, [0.0, -0.25, 1.0], id="clip of 1/(1+e) to 1+e"),
        pytest.param({"clip_range_high": 0.6}, -0.75 - 0.25 + 1.0, [-0.75, -0.25, 1.0], id="within the clip"),
        pytest.param({"dual_clip": 1.5}, -0.64 - 0.25 + 0.75, [0.0, -0.25, 0.0], id="dual clip"),
        pytest.param({"dual_clip": 3.0}, -0.64 - 0.25 + 1.0, [0.0, -0.25, 1.0], id="within the dual clip"),
        # -clip(r) A log p: 1.28, 0.8 and 1.28 times 2 log(5/3), 2 log 5 and -log(5/4)
        pytest.param(
            {"loss_type": PolicyLoss.CISPO},
            1.28 * 2 * math.log(5 / 3) / 4 + 0.8 * 2 * math.log(5) / 4 - 1.28 * math.log(5 / 4) / 2,
            [-1.28 / 2, -0.8 / 2, 1.28 / 2],
            id="cispo",
        ),
        # of these PPO would clip the first alone
        pytest.param(
            {"loss_type": PolicyLoss.CISPO, "cispo_mask": True},
            0.8 * 2 * math.log(5) / 4 - 1.28 * math.log(5 / 4) / 2,
            [0.0, -0.8 / 2, 1.28 / 2],
            id="cispo with a mask",
        ),
        # 4/t / (1 + exp(-t (r - 1))) with t = 1 and 2; its slope is 4 s (1 - s), times r
        pytest.param(
            {"loss_type": PolicyLoss.SAPO, "sapo_temperature_neg": 2.0},
            -2 * 4 * (S(0.5) + S(-0.5)) / 4 + 2 * S(2.0) / 2,
            [-4 * S(0.5) * S(-0.5) * 2 * 1.5 / 4, -4 * S(0.5) * S(-0.5) * 2 * 0.5 / 4, 4 * S(2.0) * S(-2.0) * 2 / 2],
            id="sapo",
        ),
        pytest.param(
            {"loss_type": PolicyLoss.TOPR, "topr_positive_weight": 0.5, "topr_negative_weight": 2.0},
            0.5 * 2 * math.log(5 / 3) / 4 + 0.5 * 2 * math.log(5) / 4 - 2.0 * math.log(5 / 4) / 2,
            [-0.25, -0.25, 1.0],  # the ratio of 2 is tapered to 1
            id="topr",
        ),
        pytest.param(
            {"loss_type": PolicyLoss.KIMI15, "kimi15_tau": 0.2},
            (2 * math.log(5 / 3) + 0.1 * math.log(1.5) ** 2) / 4
            + (2 * math.log(5) + 0.1 * math.log(0.5) ** 2) / 4
            + (-math.log(5 / 4) + 0.1 * math.log(2) ** 2) / 2,
            [
                (-2 + 0.2 * math.log(1.5)) / 4,
                (-2 + 0.2 * math.log(0.5)) / 4,
                (1 + 0.2 * math.log(2)) / 2,
            ],
            id="kimi15",
        ),
        # -A log p: 2 log(5/3), 2 log 5, -log(5/4)
        pytest.param(
            {"importance_sampling_level": ImportanceSamplingLevel.NONE},
            2 * math.log(5 / 3) / 4 + 2 * math.log(5) / 4 - math.log(5 / 4) / 2,
            [-0.5, -0.5, 0.5],
            id="no ratio",
        ),
    ],
)
def test_losses_of_tokens(settings, loss, gradient):
    check(two_sequences(), LossSettings(**{"clip_range": 0.2, "clip_range_high": 0.28, **settings}), loss, gradient)


@pytest.mark.parametrize(
    ("clip_range", "loss", "gradient"),
    [pytest.param(0.4, 0.6, 0.0, id="clipped"), pytest.param(0.6, 0.5, 0.5, id="within the clip")],
)
def test_the_lower_bound_is_its_own(clip_range, loss, gradient):
    check(
        batch([0.2], [0.4], [-1.0], [0], [0]),
        LossSettings(clip_range=clip_range, clip_range_high=0.2),
        loss,
        [gradient],
    )


@pytest.mark.parametrize(
    ("advantage", "level", "mean", "loss", "gradient"),
    [
        # ratios of tokens 2, 3/4, 1/2: of turns 3/2 and 1/2, of the trajectory 3/4; clipped to 0.8 and 1.2
        pytest.param(
            1.0,
            ImportanceSamplingLevel.TURN,
            LossAggregation.SEQ_MEAN,
            -(1.2 + 0.5) / 2,
            [0.0, 0.0, -0.25],
            id="turn, better",
        ),
        pytest.param(
            -1.0,
            ImportanceSamplingLevel.TURN,
            LossAggregation.SEQ_MEAN,
            (1.5 + 0.8) / 2,
            [0.75, 0.75, 0.0],
            id="turn, worse",
        ),
        pytest.param(
            1.0,
            ImportanceSamplingLevel.TURN,
            LossAggregation.TOKEN_MEAN,
            -(2 * 1.2 + 0.5) / 3,
            [0.0, 0.0, -1 / 6],
            id="turn, tokens",
        ),
        # both tokens of the turn hold its ratio, and each moves both
        pytest.param(
            -1.0,
            ImportanceSamplingLevel.TURN,
            LossAggregation.TOKEN_MEAN,
            (2 * 1.5 + 0.8) / 3,
            [1.0, 1.0, 0.0],
            id="long turn counts",
        ),
        pytest.param(
            1.0,
            ImportanceSamplingLevel.TRAJECTORY,
            LossAggregation.SEQ_MEAN,
            -0.75,
            [-0.75] * 3,
            id="trajectory, better",
        ),
        pytest.param(
            -1.0, ImportanceSamplingLevel.TRAJECTORY, LossAggregation.SEQ_MEAN, 0.8, [0.0] * 3, id="trajectory, worse"
        ),
    ],
)
def test_losses_of_turns_and_trajectories(advantage, level, mean, loss, gradient):
    some = batch([0.8, 0.3, 0.2], [0.4, 0.4, 0.4], [advantage] * 3, [0, 0, 0], [0, 0, 1])
    check(some, LossSettings(importance_sampling_level=level, loss_aggregation=mean), loss, gradient)


@pytest.mark.parametrize(
    ("settings", "loss", "gradient"),
    [
        # old to engine 3, 1/2 and 1: weights 2 (the cap), 1/2 and 1; new is old
        pytest.param({}, -(2.0 + 0.5 + 1.0) / 3, [-2 / 3, -0.5 / 3, -1 / 3], id="token"),
        pytest.param(
            {"importance_weight_cap": 5.0}, -(3.0 + 0.5 + 1.0) / 3, [-1.0, -0.5 / 3, -1 / 3], id="below the cap"
        ),
        pytest.param(
            {"importance_sampling_level": ImportanceSamplingLevel.TURN},
            -(1.5 + 1.0) / 2,
            [-0.75, -0.75, -0.5],
            id="turn: 3/2 and 1",
        ),
        pytest.param(
            {"importance_sampling_level": ImportanceSamplingLevel.TRAJECTORY}, -1.5, [-1.5] * 3, id="trajectory"
        ),
        pytest.param(
            {"importance_sampling_level": ImportanceSamplingLevel.NONE},
            -(2.0 * math.log(0.6) + 0.5 * math.log(0.2) + math.log(0.4)) / 3,
            [-2 / 3, -0.5 / 3, -1 / 3],
            id="no ratio",
        ),
    ],
)
def test_proximal_losses_are_weighted(settings, loss, gradient):
    probabilities = [0.6, 0.2, 0.4]
    engine = logs([0.2, 0.4, 0.4]).requires_grad_()
    some = batch(probabilities, probabilities, [1.0] * 3, [0, 0, 0], [0, 0, 1], engine_logprobs=engine)
    check(some, LossSettings(**{"old_logprobs": OldLogprobs.DECOUPLED, **settings}), loss, gradient)
    assert engine.grad is None


GEOMETRIC = math.sqrt(2 * 0.75)  # of the ratios 2 and 3/4


@pytest.mark.parametrize(
    ("advantages", "level", "loss", "gradient"),
    [
        # ratios of tokens 2, 3/4, 1/2; geometric means of the turns 1.2247 and 1/2, of the sequence (3/4)^(1/3)
        pytest.param(
            [-1.0, -1.0, -1.0],
            ImportanceSamplingLevel.TURN_MEAN,
            (2 * GEOMETRIC + 0.8) / 3,
            [GEOMETRIC / 3, GEOMETRIC / 3, 0.0],
            id="turn_mean",
        ),
        pytest.param(
            [1.0, 1.0, 1.0],
            ImportanceSamplingLevel.SEQUENCE,
            -(0.75 ** (1 / 3)),
            [-(0.75 ** (1 / 3)) / 3] * 3,
            id="sequence (GSPO)",
        ),
        # each token learns from its own advantage, not from the mean of its unit
        pytest.param(
            [-2.0, -1.0, 1.0],
            ImportanceSamplingLevel.TURN_MEAN,
            (2 * GEOMETRIC + GEOMETRIC - 0.5) / 3,
            [2 * GEOMETRIC / 3, GEOMETRIC / 3, -0.5 / 3],
            id="turn_mean, advantages of tokens",
        ),
        pytest.param(
            [2.0, 0.5, -1.0],
            ImportanceSamplingLevel.SEQUENCE,
            -(0.75 ** (1 / 3)) * 1.5 / 3,
            [-(0.75 ** (1 / 3)) * each / 3 for each in (2.0, 0.5, -1.0)],
            id="sequence, advantages of tokens (GSPO-token)",
        ),
    ],
)
def test_geometric_means(advantages, level, loss, gradient):
    some = batch([0.8, 0.3, 0.2], [0.4, 0.4, 0.4], advantages, [0, 0, 0], [0, 0, 1])
    check(some, LossSettings(importance_sampling_level=level), loss, gradient)


@pytest.mark.parametrize("old_logprobs", [OldLogprobs.RECOMPUTE, OldLogprobs.DECOUPLED])
@pytest.mark.parametrize(
    ("settings", "totals", "loss", "gradient"),
    [
        # learner to engine 3, 1/2 and 1; of the first sequence the geometric mean is 1.2247
        pytest.param(
            {"rollout_is": "none", "rollout_rejection": {"token": [0.6, 2.0]}}, {}, -1.0, [0, 0, -1], id="mask"
        ),
        pytest.param(
            {"rollout_is": "none", "rollout_rejection": {"token": [0.6, 2.0]}},
            {"kept_sequences": None, "kept_tokens": None},
            -0.5,
            [0, 0, -0.5],
            id="divided by all sequences, where the rest is not known",
        ),
        pytest.param(
            {"rollout_is": "none", "rollout_rejection": {"token": [None, 2.0]}},
            {"kept_sequences": 2, "kept_tokens": 2},
            -1.0,
            [0, -0.5, -0.5],
            id="half of a sequence",
        ),
        pytest.param(
            {"rollout_is": "none", "rollout_rejection": {"sequence": [0.9, 1.2]}}, {}, -1.0, [0, 0, -1], id="sequence"
        ),
        pytest.param(
            {"rollout_is": "none", "rollout_rejection": {"token": {"difference": [-0.3, 0.3]}}},
            {"kept_sequences": 2, "kept_tokens": 2},
            -1.0,
            [0, -0.5, -0.5],
            id="difference of probabilities",
        ),
        pytest.param(
            {"rollout_is": "sequence", "importance_weight_cap": 0.0},
            {"kept_sequences": None, "kept_tokens": None},
            -(GEOMETRIC + 1) / 2,
            [-GEOMETRIC / 4, -GEOMETRIC / 4, -0.5],
            id="geometric weights without a cap",
        ),
        pytest.param(
            {"rollout_is": "token", "importance_weight_cap": 2.0, "rollout_is_batch_normalize": True},
            {"kept_sequences": None, "kept_tokens": None, "mean_weight": 3.5 / 3},
            -(2.5 / 2 + 1) / 2 * 3 / 3.5,
            [-2 / 4 * 3 / 3.5, -0.5 / 4 * 3 / 3.5, -0.5 * 3 / 3.5],
            id="normalised weights",
        ),
    ],
)
def test_corrections_for_the_engine(old_logprobs, settings, totals, loss, gradient):
    """New is old: each token's loss is -1, whatever the ratio."""
    probabilities = [0.6, 0.2, 0.4]
    engine = logs([0.2, 0.4, 0.4])
    some = batch(probabilities, probabilities, [1.0] * 3, [0, 0, 1], [0, 0, 1], engine_logprobs=engine)
    level = ImportanceSamplingLevel(settings["rollout_is"])
    kind = LossSettings(**{**settings, "rollout_is": level, "old_logprobs": old_logprobs})
    whole = {"kept_sequences": 1, "kept_tokens": 1, **totals}
    found, described = policy_loss(some, kind, Totals(sequences=2, tokens=3, longest=4, **whole))
    assert found.item() == pytest.approx(loss, rel=1e-6)
    found.backward()
    assert some.logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    if kind.rollout_rejection:
        lost = [slope == 0 for slope in gradient]
        assert described["rejected"].item() == pytest.approx(lost[0] / 4 + lost[1] / 4 + lost[2] / 2)
        assert described["rejected_sequences"].item() == (lost[0] and lost[1]) / 2


def test_sequences_without_tokens_are_not_rejected():
    some = batch([0.6, 0.4], [0.6, 0.4], [1.0, 1.0], [0, 2], [0, 2], engine_logprobs=logs([0.2, 0.4]))
    kind = LossSettings(rollout_rejection={"token": [None, 2.0]})
    totals = Totals(sequences=2, tokens=2, longest=4, kept_sequences=1, kept_tokens=1)
    assert policy_loss(some, kind, totals)[1]["rejected_sequences"].item() == 0.5


def test_without_recomputed_log_probs_the_current_ones_are_compared_with_the_engine():
    some = batch([0.6, 0.2], None, [1.0, 1.0], [0, 0], [0, 0], engine_logprobs=logs([0.2, 0.4]))
    level, rule = ImportanceSamplingLevel.NONE, {"token": [None, 2.0]}
    kind = LossSettings(
        old_logprobs=OldLogprobs.ROLLOUT,
        importance_sampling_level=level,
        rollout_is=ImportanceSamplingLevel.TOKEN,
        rollout_rejection=rule,
    )
    check(some, kind, -0.5 * math.log(0.2), [0.0, -0.5])


def test_the_ratio_may_be_taken_against_the_engine():
    some = batch([0.6], None, [2.0], [0], [0], engine_logprobs=logs([0.5]))
    check(some, LossSettings(old_logprobs=OldLogprobs.ROLLOUT, clip_range_high=0.5), -2.4, [-2.4])


@pytest.mark.parametrize(
    ("estimator", "kl", "slopes"),
    [
        # policy to reference 2 and 1/2
        pytest.param(KlEstimator.K1, [math.log(2), -math.log(2)], [1.0, 1.0], id="k1"),
        pytest.param(KlEstimator.K2, [math.log(2) ** 2 / 2] * 2, [math.log(2), -math.log(2)], id="k2"),
        pytest.param(KlEstimator.K3, [math.log(2) - 0.5, 1 - math.log(2)], [0.5, -1.0], id="k3"),
    ],
)
def test_reference_and_entropy_are_weighted_as_the_loss(estimator, kl, slopes):
    """One turn of two tokens without advantage, and one of one token: weights 1/4, 1/4 and 1/2."""
    entropy = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64, requires_grad=True)
    reference = logs([0.25, 0.8, 0.4])
    places = [0, 0, 0], [0, 0, 1]
    some = batch([0.5, 0.4, 0.4], [0.5, 0.4, 0.4], [0.0] * 3, *places, entropy=entropy, reference_logprobs=reference)
    settings = LossSettings(
        importance_sampling_level=ImportanceSamplingLevel.TURN, kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01
    )
    bonus = 0.01 * (1.0 / 4 + 3.0 / 4 + 2.0 / 2)
    last_slope = 1.0 if estimator is KlEstimator.K1 else 0.0
    gradient = [0.1 * slopes[0] / 4, 0.1 * slopes[1] / 4, 0.1 * last_slope / 2]
    check(some, settings, 0.1 * sum(kl) / 4 - bonus, gradient)
    assert entropy.grad.tolist() == pytest.approx([-0.0025, -0.0025, -0.005])


def test_what_is_told():
    others = {"entropy": torch.tensor([1.0, 2.0, 3.0]), "reference_logprobs": logs([0.6, 0.2, 0.4])}
    some = two_sequences(engine_logprobs=logs([0.1, 0.4, 0.4]), **others)
    settings = LossSettings(
        old_logprobs=OldLogprobs.DECOUPLED, loss_aggregation=LossAggregation.TOKEN_MEAN, dual_clip=1.5
    )
    _, described = policy_loss(some, settings, totals_of(some))
    losses = [-1.2 * 2 * 2.0, -0.5 * 2, 1.5]  # the first weighted by the cap
    assert {name: value.item() for name, value in described.items()} == pytest.approx(
        {
            "loss": sum(losses) / 3,
            "policy_loss": sum(losses) / 3,
            "ratio": 4.0 / 3,
            "max/ratio": 2.0,
            "kl": -math.log(1.5 * 0.5 * 2.0) / 3,
            "clipped_low": 0.0,
            "clipped_high": 1 / 3,
            "clipped_dual": 1 / 3,
            "importance": (2.0 + 1.0 + 1.0) / 3,
            "importance_capped": 1 / 3,
            "entropy": 2.0,
            "reference_kl": (math.log(2) - 0.5) / 3,
        },
        rel=1e-6,
    )
    assert not any(value.requires_grad for value in described.values())


@pytest.mark.parametrize(
    ("advantage", "low", "high"),
    [
        pytest.param(1.0, 0.0, 0.5, id="better: only the high ratio is clipped"),
        pytest.param(-1.0, 0.5, 0.0, id="worse: only the low one"),
        pytest.param(0.0, 0.0, 0.0, id="neither"),
    ],
)
def test_clipped_is_what_lost_its_gradient(advantage, low, high):
    some = batch([0.6, 0.2], [0.4, 0.4], [advantage] * 2, [0, 0], [0, 0])
    _, described = policy_loss(some, LossSettings(), totals_of(some))
    assert (described["clipped_low"].item(), described["clipped_high"].item()) == (low, high)


@grid(
    "masks, expected",
    [
        (False, {"bounded_low": 0.5, "bounded_high": 0.5}),
        (True, {"clipped_low": 0.0, "clipped_high": 0.5, "bounded_low": 0.5, "bounded_high": 0.0}),
    ],
)
def test_a_bounded_ratio_of_cispo_is_clipped_only_where_the_mask_leaves_it_out(masks, expected):
    some = batch([0.6, 0.2], [0.4, 0.4], [1.0, 1.0], [0, 0], [0, 0])
    _, described = policy_loss(some, LossSettings(loss_type=PolicyLoss.CISPO, cispo_mask=masks), totals_of(some))
    found = {name: value.item() for name, value in described.items() if name.startswith(("clipped", "bounded"))}
    assert found == expected


@grid("old_logprobs", list(OldLogprobs))
@grid("loss_type", list(PolicyLoss))
@grid("unknown", [math.nan, -math.inf])
def test_a_log_prob_that_is_no_number_does_not_count_where_its_token_is_rejected(old_logprobs, loss_type, unknown):
    def learnt(first, level=ImportanceSamplingLevel.TOKEN):
        logprobs = logs([0.5, 0.4, 0.4]).requires_grad_()
        engine, places = torch.cat([torch.tensor([first]), logprobs.detach()[1:]]), torch.tensor([0, 0, 1])
        rules = {"old_logprobs": old_logprobs, "rollout_rejection": {"token": [0.5, 2.0]}, "loss_type": loss_type}
        some = PolicyBatch(logprobs, logprobs.detach(), engine, torch.ones(3), places, places, rewards=torch.ones(3))
        settings = LossSettings(rollout_is=level, rollout_is_batch_normalize=True, **rules)
        loss, described = policy_loss(some, settings, totals_of(some))
        loss.backward()
        assert all(torch.isfinite(value) for value in described.values())
        return [loss.item(), *logprobs.grad.tolist()]

    assert learnt(unknown) == learnt(-9.0), "another that is rejected"
    for level in (ImportanceSamplingLevel.TURN, ImportanceSamplingLevel.SEQUENCE):
        assert learnt(unknown, level) == learnt(unknown), "the other tokens agree with the engine"


@grid("level", [ImportanceSamplingLevel.SEQUENCE, ImportanceSamplingLevel.TURN_MEAN])
@grid("unknown", [0.0, math.nan])
def test_the_mean_weight_of_a_unit_is_that_of_the_tokens_with_a_ratio(level, unknown):
    places = torch.tensor([0, 0, 0])
    settings = LossSettings(rollout_is=level, rollout_rejection={"token": [0.5, 3.0]})
    found = correction(logs([0.5] * 3), logs([unknown, 0.25, 0.5]), places, places, settings)
    assert found.kept.tolist() == [False, True, True]
    assert found.weights.tolist() == pytest.approx([2**0.5] * 3)


@grid("level", list(ImportanceSamplingLevel))
@grid("old_logprobs", list(OldLogprobs))
@grid("far", [1e4, -1e4])
@grid("advantage", [1.0, 0.0, -1.0])
def test_huge_log_ratios_stay_finite(level, old_logprobs, far, advantage):
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    away = logprobs.detach() - far
    places = torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])
    some = PolicyBatch(logprobs, away, away - far, torch.full((3,), advantage), *places)
    loss, described = policy_loss(
        some, LossSettings(importance_sampling_level=level, old_logprobs=old_logprobs), totals_of(some)
    )
    loss.backward()
    assert all(torch.isfinite(value) for value in (loss, *described.values()))
    assert torch.isfinite(logprobs.grad).all()


def test_a_rank_may_have_no_tokens():
    floats, places = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.long)
    nothing = PolicyBatch(floats, floats.detach(), floats.detach(), floats.detach(), places, places)
    loss, described = policy_loss(
        nothing,
        LossSettings(importance_sampling_level=ImportanceSamplingLevel.TURN),
        Totals(sequences=2, tokens=9, longest=9),
    )
    loss.backward()
    assert {name: value.item() for name, value in described.items()} == dict.fromkeys(described, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({}, "old_logprobs recompute needs the learner's own", id="old"),
        pytest.param(
            {"old_logprobs": OldLogprobs.DECOUPLED}, "old_logprobs decoupled needs the learner's own", id="proximal"
        ),
        pytest.param(
            {"old_logprobs": OldLogprobs.ROLLOUT, "kl_coef": 0.1},
            "kl_coef needs the reference_logprobs",
            id="reference",
        ),
        pytest.param(
            {"old_logprobs": OldLogprobs.ROLLOUT, "entropy_coef": 0.1}, "entropy_coef needs the entropy", id="entropy"
        ),
    ],
)
def test_what_is_missing_is_told(settings, message):
    some = batch([0.5], None, [1.0], [0], [0])
    with pytest.raises(ValueError, match=message):
        policy_loss(some, LossSettings(**settings), totals_of(some))


@pytest.mark.parametrize("new", [[0.5], [0.5, 0.5, 0.5]], ids=["shorter", "longer"])
def test_uneven_tensors_are_refused(new):
    with pytest.raises(ValueError, match="one entry for each token"):
        PolicyBatch(logs(new), *(torch.zeros(2) for _ in range(3)), *(torch.tensor([0, 0]) for _ in range(2)))
