"""Triton kernel for fingerprints: it reads a tensor once, where torch's operations read and write it 15 times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192  # words per program


@triton.jit  # type: ignore[untyped-decorator]
def _add_hashes(words, total, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the hashes of one block of words to the total; the constants are those of `probe`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_word = place < count
    word = tl.load(words + place, mask=is_word, other=0).to(tl.uint64, bitcast=True)
    word ^= (place + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    hashes = tl.where(is_word, word.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(total, tl.sum(hashes, axis=0))


def add_hashes(words: torch.Tensor, total: torch.Tensor) -> None:
    """Add the hashes of 64-bit words, counted from the first, to a total on the same device."""
    if words.numel():
        with torch.cuda.device_of(words):
            _add_hashes[(triton.cdiv(words.numel(), BLOCK),)](words, total, words.numel(), BLOCK=BLOCK, num_warps=8)
