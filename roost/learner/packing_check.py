"""Whether a model keeps packed sequences apart: some mix tokens in ways that know nothing of where a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from roost.learner.sample import Floats, Sample

Say = Callable[[Sequence[Sample]], list[Floats]]


def check_packing(say: Say, vocabulary: int, tolerance: float, model: str) -> None:
    """Raise if what is said of a sequence depends on others beside it, or on tokens that come after.

    Every log-probability would be wrong then, and nothing else would tell.
    """
    one, other = _sample(7, vocabulary, 1), _sample(9, vocabulary, 2)
    longer = _sample(12, vocabulary, 1)  # begins as the first one does
    alone = [say([sample])[0] for sample in (one, other)]
    beside = say([one, other])
    pairs = [*zip(alone, beside, strict=True), (alone[0], say([longer])[0][: len(one)])]
    apart = max(float(np.abs(first - second).max()) for first, second in pairs)
    if not apart <= tolerance:
        raise ValueError(
            f"{model} mixes sequences that are packed into one row, so it cannot be trained here: log-probabilities of "
            f"a sequence differ by up to {apart:.2g} with another beside it. Layers other than attention (state space, "
            "convolutions, linear attention) and attention of a model's own are not supported"
        )


def _sample(length: int, vocabulary: int, seed: int) -> Sample:
    """The first tokens of a sequence that follows from the seed."""
    return Sample.of_policy(np.random.default_rng(seed).integers(0, vocabulary, 16)[:length])
