"""Tokens come with the probabilities they should, and are reported with them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from roost.engines.protocol import Sampling
from roost.torch_engine.runner import (
    LARGEST_MASK,
    SampledTokens,
    SamplingBatch,
    sample,
    seed_keys,
    uniforms as keyed_uniforms,
)

VOCABULARY = 24
PARAMETERS = {
    "plain": Sampling(),
    "hot": Sampling(temperature=1.7),
    "cold": Sampling(temperature=0.4),
    "top-k": Sampling(top_k=5),
    "top-p": Sampling(top_p=0.7),
    "min-p": Sampling(min_p=0.1),
    "all": Sampling(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    "top-k beyond the vocabulary": Sampling(top_k=1000),
    "top-p of one token": Sampling(top_p=1e-6),
}


def uniforms(seeds: list[int], indices: list[int]) -> NDArray[np.float64]:
    return keyed_uniforms(seed_keys(seeds), indices)


def sampled_tokens(rows: torch.Tensor, samplings: list[Sampling], numbers: NDArray[np.float64]) -> SampledTokens:
    return sample(rows, SamplingBatch.of(samplings, rows.device), numbers)


def quantile(degrees: int) -> float:
    """The 0.9999 quantile of chi-square, by Wilson and Hilferty: a right sampler stays below it with a fixed seed."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * math.sqrt(part)) ** 3


def logits(seed: int = 3) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).normal(size=VOCABULARY) * 2).astype(np.float32)


def distribution(values: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """Sampling parameters, token by token: temperature, then min-p, then top-k, then top-p of what is left."""
    weights = np.exp(values.astype(np.float64) / sampling.temperature)
    weights /= weights.sum()
    weights[weights < sampling.min_p * weights.max()] = 0
    order = np.argsort(-weights)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    so_far = 0.0
    for token in order:
        if so_far >= sampling.top_p:
            weights[token] = 0
        so_far += weights[token]
    return weights / weights.sum()


@pytest.mark.parametrize("sampling", PARAMETERS.values(), ids=PARAMETERS)
def test_frequencies(sampling: Sampling) -> None:
    count = 20_000
    numbers = uniforms([11] * count, list(range(count)))
    sampled = sampled_tokens(torch.from_numpy(np.tile(logits(), (count, 1))), [sampling] * count, numbers)
    expected = distribution(logits(), sampling)
    observed = np.bincount(sampled.token_ids, minlength=VOCABULARY)
    assert not observed[expected == 0].any()
    possible = expected > 0
    degrees = int(possible.sum()) - 1
    if degrees:
        mean = expected[possible] * count
        assert ((observed[possible] - mean) ** 2 / mean).sum() < quantile(degrees)
    assert np.array(sampled.logprobs) == pytest.approx(np.log(expected[sampled.token_ids]), abs=1e-5)


def test_rows_of_a_batch_do_not_change_one_another() -> None:
    samplings = [*PARAMETERS.values(), Sampling(temperature=0.0)]
    numbers = uniforms([5] * len(samplings), list(range(len(samplings))))
    rows = torch.from_numpy(np.stack([logits(seed) for seed in range(len(samplings))]))
    together = sampled_tokens(rows, samplings, numbers)
    for row, sampling in enumerate(samplings):
        alone = sampled_tokens(rows[row : row + 1], [sampling], numbers[row : row + 1])
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.logprobs == pytest.approx([together.logprobs[row]], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name == "all" or name.startswith(("top", "min"))])
def test_masks_are_the_tokens_that_can_be_sampled(name: str) -> None:
    sampling = replace(PARAMETERS[name], return_sampling_mask=True)
    rows = torch.from_numpy(np.stack([logits(seed) for seed in (3, 4, 5)]))
    samplings = [sampling, PARAMETERS[name], sampling]
    sampled = sampled_tokens(rows, samplings, uniforms([5] * 3, [0, 1, 2]))
    kept = {row: np.flatnonzero(distribution(logits(seed), sampling)).tolist() for row, seed in ((0, 3), (2, 5))}
    assert {row: list(mask) for row, mask in sampled.masks.items()} == kept


def test_masks_that_are_too_large_are_empty() -> None:
    row = torch.zeros(2, 2 * LARGEST_MASK)
    row[1, :LARGEST_MASK] = 9.0
    asked = Sampling(top_p=0.9, return_sampling_mask=True)
    sampled = sampled_tokens(row, [asked, asked], np.array([0.5, 0.5]))
    assert [sampled.masks[row].nbytes for row in (0, 1)] == [0, 4 * LARGEST_MASK]


@pytest.mark.parametrize("sampling", [Sampling(return_sampling_mask=True), Sampling(temperature=0, top_k=3)])
def test_what_is_not_truncated_has_no_mask(sampling: Sampling) -> None:
    sampled = sampled_tokens(torch.from_numpy(logits())[None], [sampling], np.array([0.5]))
    assert sampled.masks == {}


def test_greedy_takes_the_likeliest_at_the_models_own_probability() -> None:
    row = torch.from_numpy(logits())[None]
    sampled = sampled_tokens(row, [Sampling(temperature=0.0, top_k=1)], np.array([0.9]))
    best = int(row.argmax())
    assert sampled.token_ids == [best]
    assert sampled.logprobs == pytest.approx([float(row.log_softmax(-1)[0, best])], abs=1e-6)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53], ids=["least", "middle", "greatest"])
@pytest.mark.parametrize("impossible", ["first", "last", "most"])
def test_what_is_impossible_is_never_drawn(number: float, impossible: str) -> None:
    row = torch.zeros(1, 200_000)
    edges = {"first": slice(0, 1000), "last": slice(-1000, None), "most": slice(7, 199_990)}
    row[0, edges[impossible]] = -torch.inf
    sampled = sampled_tokens(row, [Sampling()], np.array([number]))
    assert row[0, sampled.token_ids[0]] == 0


def test_numbers_depend_on_seed_and_index_alone_and_are_even() -> None:
    count = 100_000
    numbers = uniforms([3] * count, list(range(count)))
    assert numbers[4321] == uniforms([8, 3], [0, 4321])[1]
    assert numbers.min() >= 0 and numbers.max() < 1
    for samples in (numbers, uniforms(list(range(count)), [0] * count)):
        counts = np.histogram(samples, bins=24, range=(0, 1))[0]
        assert ((counts - count / 24) ** 2 / (count / 24)).sum() < quantile(23)
        assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.015
    assert uniforms([-1], [0])[0] == uniforms([2**64 - 1], [0])[0]
