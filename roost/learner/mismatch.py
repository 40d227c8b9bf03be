"""Difference of an engine's log-probs from the learner's own, for the same tokens and weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MOST = 700.0  # beyond it exp is infinite


def mismatch(engine: npt.NDArray[np.floating], learner: npt.NDArray[np.floating]) -> dict[str, float]:
    """Statistics of the difference over sampled tokens; empty without tokens.

    `kl_k3` estimates KL(engine || learner). Maximum and 99th percentile cannot be combined over ranks: pass all tokens.

    >>> found = mismatch(np.log([0.5, 0.5]), np.log([0.5, 0.25]))
    >>> {name: round(value, 4) for name, value in found.items() if name != "logprob_p99"}
    {'logprob_mean': 0.3466, 'logprob_max': 0.6931, 'probability_mean': 0.125, 'kl_k3': 0.0966}
    """
    if len(engine) != len(learner):
        raise ValueError(f"{len(engine)} log-probabilities of the engine, but {len(learner)} of the learner")
    if len(engine) == 0:
        return {}
    engine, learner = engine.astype(np.float64), learner.astype(np.float64)
    apart = np.abs(engine - learner)
    above = np.minimum(learner - engine, MOST)
    return {
        "logprob_mean": float(apart.mean()),
        "logprob_max": float(apart.max()),
        "logprob_p99": float(np.percentile(apart, 99)),
        "probability_mean": float(np.abs(np.exp(engine) - np.exp(learner)).mean()),
        "kl_k3": float((np.expm1(above) - above).mean()),
    }
