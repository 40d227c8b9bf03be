"""The loss of a minibatch does not depend on how it is cut, and without a ratio's pull it is plain policy gradient."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, strategies as st

from roost.config.train import (
    ImportanceSamplingLevel,
    KlEstimator,
    LossAggregation,
    LossSettings,
    OldLogprobs,
    PolicyLoss,
)
from roost.learner.losses import PolicyBatch, Totals, ValueBatch, correction, policy_loss, value_loss

SHAPES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=6)  # turns of sequences
LOSSES = st.builds(
    LossSettings,
    loss_type=st.sampled_from(PolicyLoss),
    importance_sampling_level=st.sampled_from(ImportanceSamplingLevel),
    rollout_is=st.sampled_from([None, *ImportanceSamplingLevel]),
    rollout_rejection=st.sampled_from([{}, {"token": [0.5, 2.0]}, {"turn_mean": [0.8, None], "sequence": [None, 1.1]}]),
    cispo_mask=st.booleans(),
    loss_aggregation=st.sampled_from(LossAggregation),
    old_logprobs=st.sampled_from(OldLogprobs),
    dual_clip=st.sampled_from([None, 1.5]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(KlEstimator),
    kl_importance_sampling=st.booleans(),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    max_mean_ratio=st.sampled_from([0.0, 1.0]),
    early_stop_kl=st.sampled_from([0.0, 1.0]),
)


def numbered(lengths):
    return torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)


def drawn(shape, seed):
    """A minibatch with turns of these lengths, and numbers by chance: ratios on both sides of each clip."""
    sequence, turn = numbered(map(sum, shape)), numbered(length for turns in shape for length in turns)
    generator = torch.Generator().manual_seed(seed)
    some = torch.randn(6, len(turn), generator=generator, dtype=torch.float64) * 0.5
    rewards = (sequence % 2).double()
    others = {"entropy": some[4].abs(), "reference_logprobs": some[5] - 2, "rewards": rewards}
    return PolicyBatch(some[0] - 2, some[1] - 2, some[2] - 2, some[3], sequence, turn, **others)


def part(whole, sequences):
    """Some of its sequences as a batch of their own, numbered anew."""
    return tokens_of(whole, torch.isin(whole.sequence, torch.tensor(sequences, dtype=torch.long)))


def tokens_of(whole, inside):
    """Some of its tokens as a batch of their own, numbered anew."""
    given = {field.name: getattr(whole, field.name) for field in fields(whole)}
    chosen = replace(whole, **{name: tensor[inside] for name, tensor in given.items() if tensor is not None})
    return replace(
        chosen,
        sequence=torch.unique(chosen.sequence, return_inverse=True)[1],
        turn=torch.unique(chosen.turn, return_inverse=True)[1],
    )


@given(SHAPES, LOSSES, st.integers(0, 1000), st.data())
def test_any_cut_along_sequences_gives_the_same(shape, kind, seed, data):
    part_of = torch.tensor([data.draw(st.integers(0, 3)) for _ in shape])  # a part may be empty
    whole = drawn(shape, seed)
    totals = Totals(sequences=len(shape), tokens=len(whole.turn), longest=20)

    whole.logprobs.requires_grad_()
    expected, described = policy_loss(whole, kind, totals)
    expected.backward()
    gradient, whole.logprobs.grad = whole.logprobs.grad, None

    parts = [policy_loss(part(whole, torch.nonzero(part_of == n)[:, 0].tolist()), kind, totals) for n in range(4)]
    loss = torch.stack([loss for loss, _ in parts]).sum()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole.logprobs.grad, gradient, rtol=1e-6, atol=1e-6)
    for name, value in described.items():
        values = torch.stack([of_part[name] for _, of_part in parts])
        together = values.max() if name.startswith("max/") else values.sum()
        torch.testing.assert_close(together, value, rtol=1e-6, atol=1e-6)


@given(SHAPES, st.sampled_from(LossAggregation), st.integers(0, 1000), st.integers(0, 6))
def test_any_cut_gives_the_same_to_a_critic(shape, mean, seed, cut):
    whole = drawn(shape, seed)
    totals = Totals(sequences=len(shape), tokens=len(whole.turn), longest=20)

    def of(some):
        values = ValueBatch(some.logprobs, some.old_logprobs, some.engine_logprobs, some.sequence)
        return value_loss(values, LossSettings(loss_aggregation=mean), totals)

    expected, described = of(whole)
    parts = [of(part(whole, list(sequences))) for sequences in (range(cut), range(cut, len(shape)))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), expected, rtol=1e-6, atol=1e-6)
    for name, value in described.items():
        torch.testing.assert_close(sum(of_part[name] for _, of_part in parts), value, rtol=1e-6, atol=1e-6)


def gradient_of(batch, kind, totals):
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    policy_loss(replace(batch, logprobs=logprobs), kind, totals)[0].backward()
    return logprobs.grad


@given(SHAPES, LOSSES, st.integers(0, 1000))
def test_rejected_tokens_are_as_if_they_were_not_there(shape, kind, seed):
    """At every level of the ratio; weights are those of whole units."""
    kind = replace(kind, rollout_is=ImportanceSamplingLevel.NONE, old_logprobs=OldLogprobs.RECOMPUTE)
    whole = drawn(shape, seed)
    kept = correction(whole.old_logprobs, whole.engine_logprobs, whole.sequence, whole.turn, kind).kept
    if kept is None or not kept.any():
        return
    left = tokens_of(whole, kept)
    counts = {"kept_sequences": len(left.sequence.unique()), "kept_tokens": len(left.turn)}
    found = gradient_of(whole, kind, Totals(len(shape), len(whole.turn), longest=20, **counts))
    alone = replace(kind, rollout_rejection={})
    expected = gradient_of(left, alone, Totals(counts["kept_sequences"], counts["kept_tokens"], longest=20))
    torch.testing.assert_close(found[kept], expected, rtol=1e-6, atol=1e-6)
    assert not found[~kept].any()


@given(SHAPES, st.sampled_from(LossAggregation), st.sampled_from([None, 1.5]), st.integers(0, 1000))
def test_before_the_first_step_a_ratio_of_tokens_is_plain_policy_gradient(shape, mean, dual_clip, seed):
    whole = drawn(shape, seed)
    unmoved = replace(whole, old_logprobs=whole.logprobs)
    totals = Totals(sequences=len(shape), tokens=len(whole.turn), longest=20)
    by_ratio = gradient_of(unmoved, LossSettings(loss_aggregation=mean, dual_clip=dual_clip), totals)
    torch.testing.assert_close(
        by_ratio,
        gradient_of(
            unmoved, LossSettings(importance_sampling_level=ImportanceSamplingLevel.NONE, loss_aggregation=mean), totals
        ),
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [(ImportanceSamplingLevel.TURN, [-1.0, -1.0, -1.0]), (ImportanceSamplingLevel.TOKEN, [-0.5] * 3)],
)
def test_a_turn_is_one_action(level, expected):
    """Before the first step, with advantage 2: the gradient of a turn is that of the sum of its log-probabilities."""
    logprobs, places = torch.tensor([-1.0, -2.0, -3.0, -1.0]), torch.tensor([0, 0, 0, 1])
    some = PolicyBatch(logprobs, logprobs, logprobs, torch.full((4,), 2.0), torch.zeros_like(places), places)
    found = gradient_of(some, LossSettings(importance_sampling_level=level), Totals(sequences=1, tokens=4, longest=4))
    assert found[:3].tolist() == pytest.approx(expected)
