"""The learner sees the images of its samples: packed or alone, on one rank or two, as transformers does."""

import dataclasses

import numpy as np
import pytest
import torch

from roost.config.train import AdapterSettings
from roost.learner.forward import Head
from roost.learner.learner import Learner
from roost.learner.sample import predicted
from roost.vision.processor import FAMILIES, Processor
from tests.learner.random_samples import CPU, assert_equal, settings_of, totals_of, trained
from tests.learner.ranks import on_ranks, weights
from tests.vision.shown import plain_logprobs, samples


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_are_those_of_transformers(folders, family):
    learner = Learner(settings_of(str(folders[family]), micro_batch_tokens=64), CPU)
    every = samples(Processor.of_model(str(folders[family])))
    for one, found in zip(every, learner.score(every), strict=True):
        with torch.no_grad():
            wanted = plain_logprobs(folders[family], one)
        where = predicted(one)[1:]
        np.testing.assert_allclose(found[1:][where], wanted.numpy()[where], rtol=0, atol=1e-4)


def test_other_images_give_other_log_probs(folders):
    folder = str(folders["qwen2_5_vl"])
    learner, (one, *_) = Learner(settings_of(folder), CPU), samples(Processor.of_model(folder))
    other = dataclasses.replace(one, images=(samples(Processor.of_model(folder))[3].images[0].at(one.images[0].start),))
    first, second = learner.score([one, other])
    assert np.abs(first - second).max() > 1e-3


def test_a_sequence_may_be_cut_within_an_image(folders):
    folder = str(folders["qwen2_5_vl"])
    learner, (_, one, *_) = Learner(settings_of(folder), CPU), samples(Processor.of_model(folder))
    cut = one.images[1].start + 2
    arrays = {
        name: getattr(one, name)[:cut] for name in ("token_ids", "turns", "logprobs", "advantages", "old_logprobs")
    }
    np.testing.assert_allclose(
        learner.score([dataclasses.replace(one, **arrays)])[0], learner.score([one])[0][:cut], atol=1e-5
    )


def test_the_vision_tower_learns(folders):
    folder = str(folders["qwen2_5_vl"])
    learner = Learner(settings_of(folder, activation_checkpointing=True), CPU)
    before = {name: weight.clone() for name, weight in learner.weights()}
    after, _ = trained(learner, samples(Processor.of_model(folder)))
    assert any("visual" in name and not torch.equal(before[name], after[name]) for name in before)


def test_two_ranks_learn_as_one(folders):
    """Of the two ranks one has no image in the first step, and none at all in the second."""
    folder = str(folders["qwen2_5_vl"])
    one, two, text, other = samples(Processor.of_model(folder))
    shares = [([one, two], [text]), ([other], [])]
    settings = settings_of(folder)
    alone, _ = trained(Learner(settings, CPU), *([*each, *others] for each, others in shares))
    totals = [totals_of([*each, *others]) for each, others in shares]
    first, _ = on_ranks(2, _learn, settings, shares, totals)
    assert_equal({name: torch.from_numpy(weight) for name, weight in first.items()}, alone, 1e-5)


def test_two_ranks_read_images_in_16_bits(folders):
    folder = str(folders["qwen2_5_vl"])
    every = samples(Processor.of_model(folder))
    settings = settings_of(folder, compute_dtype="bfloat16")
    alone = Learner(settings, CPU).learn(every, totals_of(every))["loss"]
    found = on_ranks(2, _losses, settings, every)
    assert [loss == pytest.approx(alone, rel=0.02, abs=0.01) for loss in found] == [True, True]


def _losses(rank, settings, every):
    return Learner(settings, CPU).learn(every[rank::2], totals_of(every))["loss"]


def _learn(rank, settings, shares, totals):
    learner = Learner(settings, CPU)
    for share, total in zip(shares, totals, strict=True):
        learner.learn(share[rank], total)
    return weights(learner)


def test_an_exported_policy_is_read_again(folders, tmp_path):
    folder = str(folders["qwen2_5_vl"])
    learner, every = Learner(settings_of(folder), CPU), samples(Processor.of_model(folder))
    trained(learner, every)
    learner.export_whole(tmp_path / "policy")
    again = Learner(settings_of(str(tmp_path / "policy")), CPU)
    for found, wanted in zip(again.score(every), learner.score(every), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_refusals(folders, models):
    folder = str(folders["qwen2_5_vl"])
    with pytest.raises(ValueError, match="a critic reads text alone"):
        Learner(settings_of(folder), CPU, Head.VALUE)
    with pytest.raises(ValueError, match="cannot be trained with an adapter"):
        Learner(settings_of(folder, adapter=AdapterSettings(lora_rank=2)), CPU)
    with pytest.raises(ValueError, match="reads text alone"):
        Learner(settings_of(models()), CPU).score(samples(Processor.of_model(folder)))
