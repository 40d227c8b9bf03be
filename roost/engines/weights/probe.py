"""Fingerprints of tensors, equal on every device, and probes: fixed tokens with their expected log-probs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

CHUNK = 1 << 22  # words at a time, to need little extra memory
SPREAD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, as a signed number
# Finalization steps of the SplitMix64 generator: shift and multiplier.
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype of a tensor and a 16-digit hexadecimal hash of its bytes and shape.

    Every word is hashed with its position, and the hashes are summed modulo 2**64. Integer sums do not depend on the
    order, so GPU and CPU agree.

    >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(3))
    True
    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
    False
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), CHUNK * 8):
        words = _words(flat[start : start + CHUNK * 8])
        places = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=tensor.device)
        total += _hashed(words ^ (places * SPREAD)).sum()
    shape = zlib.crc32(repr(tuple(tensor.shape)).encode())
    return f"{str(tensor.dtype).removeprefix('torch.')}:{(int(total) ^ shape) % 2**64:016x}"


def _hashed(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in MIXING:
        words = (words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return words


def _words(part: torch.Tensor) -> torch.Tensor:
    """Bytes as 64-bit integers, zero-padded."""
    missing = -part.numel() % 8
    if missing:
        part = torch.cat([part, part.new_zeros(missing)])
    # The view needs 8-byte alignment.
    aligned = part if part.data_ptr() % 8 == 0 else part.clone()
    return aligned.view(torch.int64)


# 32 tokens are enough to tell weights apart.
LENGTH = 32
TOKEN_STEP = 73
TOLERANCES = {"float32": 2e-3, "float64": 2e-3, "bfloat16": 0.25, "float16": 0.08}


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids, log-probs of all but the first, and the tolerance for engines."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float

    def difference(self, logprobs: Sequence[float]) -> float:
        """Largest absolute difference from an engine's log-probs.

        >>> Probe((1, 2, 3), (-1.0, -2.0), 0.01).difference([-1.0, -2.5])
        0.5
        """
        if len(logprobs) != len(self.logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities came for a probe of {len(self.logprobs)}")
        return max(abs(one - other) for one, other in zip(logprobs, self.logprobs, strict=True))


def probe_tokens(vocabulary: int, length: int = LENGTH) -> tuple[int, ...]:
    """Fixed token ids spread over the vocabulary.

    >>> probe_tokens(100, 4)
    (1, 74, 47, 20)
    """
    return tuple((1 + place * TOKEN_STEP) % vocabulary for place in range(length))


@torch.no_grad()
def make_probe(model: nn.Module, vocabulary: int, tolerance: float | None = None) -> Probe:
    """Compute the log-probs of the fixed tokens with a Hugging Face model."""
    tokens = probe_tokens(vocabulary)
    weight = next(model.parameters())
    ids = torch.tensor([tokens], device=weight.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    limit = TOLERANCES.get(str(weight.dtype).removeprefix("torch."), 0.25) if tolerance is None else tolerance
    return Probe(tokens, tuple(found.tolist()), limit)
