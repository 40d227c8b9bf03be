"""Log-probs of the distribution that was sampled from: by hand, and as the built-in engine says them."""

import dataclasses
import queue

import numpy as np
import pytest
import torch

from roost.engines.protocol import Sampling
from roost.engines.tiny_model import VOCABULARY
from roost.learner.forward import History, LogitProcessors, masked_logsumexp, seen_tokens
from roost.learner.parallel.context import ContextGroup
from roost.learner.sample import NOT_GENERATED, Sample, pack
from roost.torch_engine.engine import EngineSettings, Request, TorchEngine
from roost.trainer.metrics import mask_metrics, mismatch
from tests.learner.random_samples import random_samples, totals_of
from tests.limits import HANG_S

TRUNCATED = {
    "top-p": Sampling(top_p=0.9),
    "top-k": Sampling(top_k=9),
    "min-p": Sampling(min_p=0.05),
    "all, hot": Sampling(temperature=1.5, top_p=0.95, top_k=60, min_p=0.01),
}


def masked(sample, masks):
    """The sample with masks of its generated tokens, in order."""
    of_tokens = iter(masks)
    each = [next(of_tokens) if is_generated else () for is_generated in sample.is_generated]
    ids = np.array([token_id for mask in each for token_id in mask], np.int32)
    return dataclasses.replace(sample, mask_ids=ids, mask_sizes=np.array([len(mask) for mask in each], np.int32))


def test_masks_are_packed_row_by_row():
    one, other, third = random_samples(6, 5, 6)
    one = masked(one, [(int(one.token_ids[3]), 7, 9), (), (int(one.token_ids[5]),)])
    third = masked(third, [()] * 3)
    packed = pack([one, other, third])
    assert packed.masks is not None and packed.masks.shape == (len(packed.rows), 3)
    assert packed.masks.tolist() == [[int(one.token_ids[3]), 7, 9], [-1] * 3, [int(one.token_ids[5]), -1, -1]] + [
        [-1] * 3
    ] * (len(packed.rows) - 3)
    assert pack([other]).masks is None
    assert pack([third]).masks.shape == (3, 1)  # too large for the engine to return, all of them


def test_the_gradient_is_that_of_the_kept_tokens_alone():
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0], [2.0, 1.0, 0.5, -1.0]], requires_grad=True)
    masks = torch.tensor([[0, 2, -1], [-1, -1, -1]], dtype=torch.int32)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs[:, 2] - masked_logsumexp(logprobs, masks)
    pair = np.exp([2.0, 0.5]) / np.exp([2.0, 0.5]).sum()
    assert chosen.detach().tolist() == pytest.approx([np.log(pair[1]), float(logprobs[1, 2].detach())], abs=1e-6)
    (chosen[0] + 0 * chosen[1]).backward()
    assert logits.grad[0].tolist() == pytest.approx([-pair[0], 0.0, 1 - pair[1], 0.0], abs=1e-6)
    assert logits.grad[1].tolist() == [0.0] * 4  # not NaN


def test_learner_scores_over_the_masks_and_learns_without_nan(learner):
    sample = random_samples(6)[0]
    kept = [(int(token), (int(token) + 1) % 256, (int(token) + 9) % 256) for token in sample.token_ids[3:]]
    own = learner()
    with_masks = masked(sample, [kept[0], (), kept[2]])
    (found,) = own.distributions([sample], 0, VOCABULARY)
    for row, ids in enumerate([list(kept[0]), slice(None), list(kept[2])]):
        logits, token = found.logits[row].astype(np.float64), sample.token_ids[3 + row]
        expected = logits[token] - np.log(np.exp(logits[ids]).sum())
        assert own.score([with_masks])[0][3 + row] == pytest.approx(expected, abs=1e-5)
    metrics = own.learn([with_masks], totals_of([with_masks]))
    assert metrics["skipped"] == 0 and np.isfinite(metrics["grad/norm"])


def generated(model, sampling, count):
    """Samples of the built-in engine, with the masks that it returned."""
    engine = TorchEngine(EngineSettings(model=model, device="cpu", dtype="float32", seed=0))
    try:
        prompts = [tuple(np.random.default_rng(seed).integers(0, 256, 4).tolist()) for seed in range(count)]
        answers = [queue.SimpleQueue() for _ in prompts]
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ignores_eos = not sampling.min_tokens
            asked = dataclasses.replace(sampling, max_tokens=12, ignore_eos=ignores_eos, seed=number)
            engine.submit(Request(str(number), prompt, asked, streams=False), answer.put)
        found = [answer.get(timeout=HANG_S) for answer in answers]
    finally:
        engine.close()
    samples = []
    for prompt, progress in zip(prompts, found, strict=True):
        tokens = np.array((*prompt, *progress.token_ids))
        turns = np.array([NOT_GENERATED] * len(prompt) + [0] * len(progress.token_ids))
        logprobs = np.array([0.0] * len(prompt) + list(progress.logprobs), np.float32)
        sample = Sample(tokens, turns, logprobs, np.zeros(len(tokens), np.float32))
        samples.append(masked(sample, progress.masks.lists()) if progress.masks else sample)
    return samples


def scored(own, samples):
    """Log-probs of the engine and of the learner."""
    learner = own.score(samples)
    where = [sample.is_generated for sample in samples]
    return (
        np.concatenate([sample.logprobs[each] for sample, each in zip(samples, where, strict=True)]),
        np.concatenate([logprobs[each] for logprobs, each in zip(learner, where, strict=True)]),
    )


@pytest.mark.parametrize("sampling", TRUNCATED.values(), ids=TRUNCATED)
def test_learner_and_engine_agree_on_truncated_sampling(learner, models, sampling):
    asked = dataclasses.replace(sampling, return_sampling_mask=True)
    own = learner(temperature=sampling.temperature)
    samples = generated(models(), asked, 8)
    engine, by_learner = scored(own, samples)
    assert np.abs(engine - by_learner).max() < 1e-5
    metrics = mask_metrics(samples)
    assert metrics["sampling_mask/missing"] == 0 and 1 < metrics["sampling_mask/size"] < 200


def test_the_mismatch_with_replay_is_that_of_plain_sampling(learner, models):
    own = learner()
    kl = {}
    for name, sampling in {
        "plain": Sampling(),
        "replayed": Sampling(top_p=0.9, return_sampling_mask=True),
        "not replayed": Sampling(top_p=0.9),
    }.items():
        kl[name] = mismatch(*scored(own, generated(models(), sampling, 16)))["kl_k3"]
    assert kl["plain"] < 1e-9 and kl["replayed"] < 1e-9
    assert kl["not replayed"] > 1e-3


def test_settings_of_a_step_do_not_matter(learner, models):
    """Micro-batches and chunks of logits cut the masks as they cut the rows."""
    samples = generated(models(), Sampling(top_p=0.9, return_sampling_mask=True), 6)
    alone = [learner().score([sample])[0] for sample in samples]
    together = learner(micro_batch_tokens=1000, logit_tokens=5).score(samples)
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one - other).max() < 1e-5


PROCESSED = {
    "repetition penalty": Sampling(repetition_penalty=1.5),
    "minimum": Sampling(min_tokens=12),
    "both, truncated": Sampling(
        temperature=1.5, repetition_penalty=0.7, min_tokens=8, top_p=0.9, return_sampling_mask=True
    ),
}


@pytest.mark.parametrize("sampling", PROCESSED.values(), ids=PROCESSED)
def test_learner_and_engine_agree_on_changed_logits(learner, models, sampling):
    """Micro-batches and chunks of several sequences; without the same settings they differ plainly."""
    sizes = {"micro_batch_tokens": 50, "logit_tokens": 17, "temperature": sampling.temperature}
    same = {"repetition_penalty": sampling.repetition_penalty, "min_new_tokens": sampling.min_tokens}
    samples = generated(models(), sampling, 8)
    engine, by_learner = scored(learner(**sizes, **same), samples)
    assert np.abs(engine - by_learner).max() < 1e-5
    assert np.abs(engine - scored(learner(**sizes), samples)[1]).max() > 1e-3
    assert min(sample.num_generated for sample in samples) >= sampling.min_tokens


def test_checks_of_weights_see_the_model_itself(learner):
    sample = random_samples(9)[0]
    changed, plain = (each.score([sample], temperature=1.0)[0] for each in (learner(repetition_penalty=3), learner()))
    assert np.array_equal(changed, plain)


def test_a_changed_policy_learns_without_nan(learner):
    own = learner(repetition_penalty=1.2, min_new_tokens=3)
    samples = random_samples(6, 9)
    metrics = own.learn(samples, totals_of(samples))
    assert metrics["skipped"] == 0 and np.isfinite(metrics["grad/norm"]) and np.isfinite(metrics["entropy"])


def test_logits_are_changed_as_by_hand():
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5], [1.0, -1.0, 2.0, 0.5]], requires_grad=True)
    token_ids, spans = torch.tensor([1, 2, 2]), torch.tensor([[0, 0, 0], [0, 2, 1]])
    processors = LogitProcessors(repetition_penalty=2.0, min_new_tokens=1, eos_ids=(3,))
    found = processors(logits, torch.tensor([0, 0]), token_ids, spans)
    assert found.tolist() == [[1.0, -2.0, 2.0, pytest.approx(-1e30)], [1.0, -2.0, 1.0, 0.5]]
    found.sum().backward()
    assert logits.grad.tolist() == [[1.0, 2.0, 1.0, 0.0], [1.0, 2.0, 0.5, 1.0]]  # token 2 occurs twice, and counts once
    # A target that ends its turn cannot be impossible.
    assert processors(logits, torch.tensor([3, 0]), token_ids, spans)[0, 3] == 0.5


def test_ranks_of_a_context_group_see_tokens_of_the_others():
    packed = pack(random_samples(7, 5, 8))
    whole = History.of(packed, slice(None), torch.device("cpu"))
    expected = seen_tokens(whole.token_ids, whole.spans, VOCABULARY)
    found = []
    for rank in range(2):
        _, own = ContextGroup(2, rank, None).cut(packed)
        part = History.of(packed, own, torch.device("cpu"))
        found.append(seen_tokens(part.token_ids, part.spans, VOCABULARY))
    assert torch.equal(torch.cat(found), expected)
    for row, seen in zip(whole.spans.tolist(), expected, strict=True):
        assert set(seen.nonzero().flatten().tolist()) == set(packed.token_ids[row[0] : row[1] + 1].tolist())
