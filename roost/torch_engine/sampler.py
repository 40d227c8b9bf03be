"""Sample tokens from logits, with sampling parameters and a random number per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.engines.protocol import Sampling

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, with its log-prob under the distribution it was sampled from."""

    token_ids: list[int]
    logprobs: list[float]


def draw(logits: Tensor, samplings: Sequence[Sampling], uniforms: NDArray[np.float64]) -> SampledTokens:
    """Sample one token per row. Temperature 0 is greedy, with the log-prob under the model's distribution."""
    logits = logits.float()
    greedy = [sampling.is_greedy for sampling in samplings]
    if all(greedy):
        tokens = logits.argmax(-1)
        return _with_logprobs(logits, tokens)
    device = logits.device
    temperatures = [1.0 if sampling.is_greedy else sampling.temperature for sampling in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=device)[:, None]
    logits = _filtered(logits, samplings)
    tokens = _inverse(logits, torch.from_numpy(uniforms).to(device))
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=device), logits.argmax(-1), tokens)
    return _with_logprobs(logits, tokens)


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of one token per row, without computing all log-probs."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _with_logprobs(logits: Tensor, tokens: Tensor) -> SampledTokens:
    return SampledTokens(tokens.tolist(), chosen_logprobs(logits, tokens).tolist())


def _inverse(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling, in double precision, because a vocabulary has a long tail."""
    probabilities = logits.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Rounding must not move the target past the last token.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    # A parallel cumsum may decrease by a rounding error and stop at a token that was filtered out.
    is_possible = probabilities.gather(-1, tokens[:, None]).squeeze(-1) > 0
    return torch.where(is_possible, tokens, logits.argmax(-1))


def _filtered(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits after min-p, top-k and top-p, in this order, for the rows that use them."""
    rows = [row for row, each in enumerate(samplings) if not each.is_greedy and each.min_p > 0.0]
    if rows:
        part = logits[rows]
        floor = torch.tensor([samplings[row].min_p for row in rows], device=logits.device).log()
        below = part < part.amax(-1, keepdim=True) + floor[:, None]
        logits = logits.index_copy(0, _index(rows, logits), part.masked_fill_(below, NEVER))
    rows = [row for row, each in enumerate(samplings) if not each.is_greedy and (each.top_k > 0 or each.top_p < 1.0)]
    if rows:
        part = logits[rows]
        below = part < _thresholds(part, [samplings[row] for row in rows])[:, None]
        logits = logits.index_copy(0, _index(rows, logits), part.masked_fill_(below, NEVER))
    return logits


def _thresholds(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Smallest logit per row that top-k and then top-p keep; ties are kept."""
    vocabulary = logits.shape[-1]
    counts = [min(each.top_k, vocabulary) or vocabulary for each in samplings]
    ordered = logits.topk(max(counts), -1).values
    counts_per_row = torch.tensor(counts, device=logits.device)[:, None]
    least = ordered.gather(-1, counts_per_row - 1)
    if all(each.top_p == 1.0 for each in samplings):
        return least.squeeze(-1)
    # Top-k keeps ties with its last token; those within the table also count for top-p.
    ordered = ordered.masked_fill(ordered < least, NEVER)
    cumulative = ordered.softmax(-1).cumsum(-1, dtype=torch.float64)
    shares = torch.tensor([each.top_p for each in samplings], dtype=torch.float64, device=logits.device)[:, None]
    # A token is kept if the cumulative probability before it is below top_p; the first always is.
    kept = (cumulative < shares).sum(-1, keepdim=True).clamp_(max=ordered.shape[-1] - 1)
    return torch.maximum(ordered.gather(-1, kept), least).squeeze(-1)


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, which spreads adjacent indices
MASK = (1 << 64) - 1


def uniforms(seeds: list[int], indices: list[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from seeds and token indices.

    >>> bool(uniforms([7, 5], [0, 3])[1] == uniforms([5], [3])[0])
    True
    """
    keys = np.array([seed & MASK for seed in seeds], np.uint64)
    counters = np.array(indices, np.uint64)
    # Mixed twice, so that adjacent seeds do not give shifted copies of one stream.
    bits = _mixed(_mixed(keys + STRIDE) + (counters + np.uint64(1)) * STRIDE)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
