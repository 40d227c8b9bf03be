"""Random numbers without state: the same seed and index give the same number, whatever else is drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: indices one apart end up far apart
MASK = (1 << 64) - 1


def uniforms(seeds: list[int], indices: list[int]) -> NDArray[np.float64]:
    """Numbers from 0 up to, but not including, 1.

    >>> bool(uniforms([7, 5], [0, 3])[1] == uniforms([5], [3])[0])
    True
    """
    keys = np.array([seed & MASK for seed in seeds], np.uint64)
    counters = np.array(indices, np.uint64)
    # Mixed twice, so that neighbouring seeds do not give shifted copies of one stream.
    bits = _mixed(_mixed(keys + STRIDE) + (counters + np.uint64(1)) * STRIDE)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
