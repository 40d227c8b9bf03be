"""Distillation on given completions: divergences as NumPy has them, and a learner with a teacher's logits."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from roost.config.data import Distillation
from roost.config.train import ImportanceSamplingLevel, LossAggregation, LossSettings, OldLogprobs
from roost.config.train_choices import Divergence
from roost.learner import forward
from roost.learner.learner import Learner
from roost.learner.losses import distillation_losses
from tests.learner.random_samples import CPU, assert_equal, random_samples, settings_of, totals_of, trained
from tests.learner.ranks import on_ranks


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def kl(one, other):
    return (one * np.log(one / other)).sum(-1)


def adaptive(policy, teacher, alpha):
    """Token by token: unlikely tokens are those whose probabilities, from the lowest up, add up to at most alpha."""
    found = []
    for own, other in zip(policy, teacher, strict=True):
        total, tail, head = 0.0, 0.0, 0.0
        for token in np.argsort(other):
            total += other[token]
            apart = abs(other[token] - own[token])
            tail, head = (tail + apart, head) if total <= alpha else (tail, head + apart)
        found.append((head * kl(other, own) + tail * kl(own, other)) / (head + tail))
    return np.array(found)


def expected(logits, teacher_logits, settings):
    policy = softmax(logits / settings.temperature)
    teacher = softmax(teacher_logits / settings.temperature / settings.teacher_temperature)
    skew, middle = settings.skew, (policy + teacher) / 2
    return {
        Divergence.FORWARD_KL: lambda: kl(teacher, policy),
        Divergence.REVERSE_KL: lambda: kl(policy, teacher),
        Divergence.ADAPTIVE_KL: lambda: adaptive(policy, teacher, settings.adaptive_alpha),
        Divergence.SKEWED_FORWARD_KL: lambda: kl(teacher, skew * teacher + (1 - skew) * policy),
        Divergence.SKEWED_REVERSE_KL: lambda: kl(policy, (1 - skew) * teacher + skew * policy),
        Divergence.JS: lambda: (kl(teacher, middle) + kl(policy, middle)) / 2,
    }[settings.divergence]()


@pytest.mark.parametrize("divergence", list(Divergence))
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"temperature": 2.0, "teacher_temperature": 0.5},
        {"adaptive_alpha": 0.2, "skew": 0.4},
    ],
    ids=["defaults", "temperatures", "other weights"],
)
def test_divergences_are_those_of_numpy(divergence, keys):
    random = np.random.default_rng(0)
    logits, teacher = (3 * random.normal(size=(20, 11)) for _ in range(2))
    settings = Distillation(divergence=divergence, **keys)
    found = distillation_losses(torch.from_numpy(logits), torch.from_numpy(teacher), settings)
    np.testing.assert_allclose(found.numpy(), expected(logits, teacher, settings), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("divergence", list(Divergence))
def test_divergences_are_0_at_the_teacher_and_finite_far_from_it(divergence):
    settings = Distillation(divergence=divergence)
    same = torch.tensor([[1.0, 2.0, -300.0]])
    assert distillation_losses(same, same, settings).item() == pytest.approx(0, abs=1e-6)
    own = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    loss = distillation_losses(own, torch.tensor([[-300.0, 0.0, 300.0]]), settings).sum()
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(own.grad).all()


SUPERVISED = LossSettings(
    importance_sampling_level=ImportanceSamplingLevel.NONE,
    old_logprobs=OldLogprobs.ROLLOUT,
    loss_aggregation=LossAggregation.TOKEN_MEAN,
)


def logits_of(model, sample):
    """Logits at the predicted tokens, by transformers' own attention."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = reference(torch.from_numpy(sample.token_ids)[None]).logits[0, :-1]
    return logits[torch.from_numpy(sample.is_generated[1:])].numpy()


@pytest.fixture
def taught(models):
    """Gives samples with a teacher's distribution, and the teacher's model."""
    model = models("qwen2", hidden_size=48)

    def samples(top_k):
        plain = [dataclasses.replace(each, advantages=np.ones_like(each.advantages)) for each in random_samples(12, 9)]
        plain += random_samples(3, seed=7)  # a prompt alone: nothing is predicted
        found = Learner(settings_of(model), CPU, learns=False).distributions(plain, top_k, vocabulary=250)
        return [dataclasses.replace(each, distribution=one) for each, one in zip(plain, found, strict=True)]

    return samples, model


@pytest.mark.parametrize("divergence", list(Divergence))
@pytest.mark.parametrize("top_k", [0, 8])
def test_a_learner_learns_from_the_most_likely_tokens(models, taught, divergence, top_k):
    samples, teacher = taught
    distillation = Distillation(weight=0.7, divergence=divergence, top_k=top_k, temperature=1.5)
    loss = dataclasses.replace(SUPERVISED, distillation=distillation)
    learner, rows = Learner(settings_of(models(), loss=loss), CPU), samples(top_k)
    described = learner.learn(rows, totals_of(rows))
    apart, nll = [], []
    for sample in rows[:2]:
        own, other = (logits_of(model, sample) for model in (models(), teacher))
        made = sample.token_ids[1:][sample.is_generated[1:]]
        nll += [-np.log(softmax(own)[np.arange(len(made)), made])]
        tokens = np.argsort(-other[:, :250])[:, : top_k or 250]
        kept = (np.take_along_axis(each, tokens, -1) for each in (own, other))
        apart += [expected(*kept, distillation)]
    divergence, supervised = np.concatenate(apart).mean(), np.concatenate(nll).mean()
    assert described["distillation"] == pytest.approx(divergence, rel=1e-3)
    assert described["policy_loss"] == pytest.approx(supervised, rel=1e-4)
    assert described["loss"] == pytest.approx(0.3 * supervised + 0.7 * divergence, rel=1e-3)
    for _ in range(3):
        later = learner.learn(rows, totals_of(rows))
    assert later["loss"] < described["loss"]


def types_of_teachers_logits(rank, settings, samples):
    types = []
    with pytest.MonkeyPatch.context() as patch:
        losses = forward.distillation_losses
        patch.setattr(
            forward, "distillation_losses", lambda own, other, of: types.append(other.dtype) or losses(own, other, of)
        )
        Learner(settings, CPU).learn(samples[rank::2], totals_of(samples))
    return types


def test_ranks_do_not_round_the_logits_of_a_teacher(models, taught):
    """As a single process, which computes under autocast."""
    samples, _ = taught
    loss = dataclasses.replace(SUPERVISED, distillation=Distillation(top_k=8))
    settings = settings_of(models(), loss=loss, compute_dtype="bfloat16")
    for types in on_ranks(2, types_of_teachers_logits, settings, samples(8)):
        assert set(types) == {torch.float32}


@pytest.mark.parametrize("changes", [{"micro_batch_tokens": 1}, {"logit_tokens": 1000}], ids=str)
def test_how_the_work_is_cut_changes_nothing(models, taught, changes):
    samples, _ = taught
    rows = samples(8)
    loss = dataclasses.replace(SUPERVISED, distillation=Distillation())
    settings = settings_of(models(), loss=loss)
    whole, described = trained(Learner(settings, CPU), rows, rows)
    cut, told_too = trained(Learner(dataclasses.replace(settings, **changes), CPU), rows, rows)
    assert_equal(cut, whole, 1e-5)
    assert told_too == pytest.approx(described, rel=1e-4, abs=1e-5)


def test_distillation_needs_the_teachers_distribution(models):
    loss = dataclasses.replace(SUPERVISED, distillation=Distillation())
    rows = random_samples(9)
    with pytest.raises(ValueError, match="needs the distribution of a teacher"):
        Learner(settings_of(models(), loss=loss), CPU).learn(rows, totals_of(rows))
