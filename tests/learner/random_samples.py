"""Samples as an engine would give them, and settings of tiny learners."""

import dataclasses

import numpy as np
import torch

from roost.config.train import LearnerSettings, OptimizerSettings
from roost.learner.losses import Totals
from roost.learner.sample import NOT_GENERATED, Sample

CPU = torch.device("cpu")


def random_sample(seed, length, prompt=3, **arrays):
    """A prompt, and two turns with an observation between them."""
    random = np.random.default_rng(seed)
    turns = np.full(length, NOT_GENERATED)
    turns[prompt:] = 0
    if length > prompt + 4:
        turns[prompt + 2] = NOT_GENERATED
        turns[prompt + 3 :] = 1
    logprobs = -5 - random.random(length).astype(np.float32)
    return Sample(
        token_ids=random.integers(0, 256, length),
        turns=turns,
        logprobs=logprobs,
        advantages=random.normal(size=length).astype(np.float32),
        old_logprobs=logprobs,
        **arrays,
    )


def random_samples(*lengths, seed=0):
    return [random_sample(seed * 100 + number, length) for number, length in enumerate(lengths)]


def totals_of(samples):
    return Totals(sequences=len(samples), tokens=sum(sample.num_generated for sample in samples), longest=64)


def settings_of(model, **changes):
    settings = LearnerSettings(
        model=model,
        micro_batch_tokens=32,
        logit_tokens=8,
        # With a larger epsilon than usual, rounding of gradients near zero does not turn into whole steps.
        optimizer=OptimizerSettings(learning_rate=1e-3, adam_epsilon=1e-4, warmup_steps=2, max_grad_norm=0.5),
    )
    return dataclasses.replace(settings, **changes)


def trained(learner, *batches):
    """The weights after a step on each batch, and what was told of the last."""
    for samples in batches:
        described = learner.learn(samples, totals_of(samples))
    return {name: weight.clone() for name, weight in learner.weights()}, described


def assert_equal(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).abs().max() <= tolerance, name
