"""Learner on one GPU: tokens per second of learning and scoring, and the rate of offloading.

`python benchmarks/gpu_learner.py MODEL RESULTS` writes the results as JSON; `benchmarks/gpu.py` calls it.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from roost.config.train import LearnerSettings, LossSettings, OldLogprobs
from roost.learner.learner import Learner
from roost.learner.losses import Totals
from roost.learner.sample import NOT_GENERATED, Sample

DEVICE = torch.device("cuda", 0)
MATRIX = 8192
ROUNDS = 3
PROMPT = 128
SHAPES = ((4, 8192), (32, 1024))  # sequences, tokens of each
GIB = 1 << 30


def measure(model: Path) -> dict[str, Any]:
    """Results of the whole section."""
    rate = matrix_rate()
    settings = LearnerSettings(
        str(model),
        compute_dtype="bfloat16",
        compile=True,
        loss=LossSettings(old_logprobs=OldLogprobs.ROLLOUT),
    )
    rows = []
    for recomputes in (False, True):
        learner = Learner(replace(settings, activation_checkpointing=recomputes), DEVICE)
        for count, length in SHAPES:
            rows.append({"activation_checkpointing": recomputes, **rates(learner, count, length, rate)})
            print(rows[-1], file=sys.stderr, flush=True)
        offload = offload_rates(learner)
        del learner
        gc.collect()
        torch.cuda.empty_cache()
    return {"matrix_tflops": rate / 1e12, "learner": rows, "offload": offload}


def rates(learner: Learner, count: int, length: int, matrix: float) -> dict[str, Any]:
    """Tokens per second of an optimizer step and of scoring, and the step's share of the matrix rate."""
    samples = random_samples(count, length, learner.module.config.vocab_size)
    totals = Totals(sequences=count, tokens=sum(sample.num_generated for sample in samples), longest=length)
    torch.cuda.reset_peak_memory_stats()
    first, learnt = timed(lambda: learner.learn(samples, totals))
    peak = torch.cuda.max_memory_allocated() / GIB
    scored = timed(lambda: learner.score(samples))[1]
    tokens = count * length
    return {
        "shape": [count, length],
        "learn_tokens_per_s": tokens / learnt,
        "learn_share": tokens / learnt * flops_per_token(learner.module, length) / matrix,
        "score_tokens_per_s": tokens / scored,
        "first_s": first,
        "peak_gib": peak,
    }


def random_samples(count: int, length: int, vocabulary: int) -> list[Sample]:
    """Samples with a prompt and one turn."""
    random = np.random.default_rng(0)
    turns = np.zeros(length, np.int64)
    turns[:PROMPT] = NOT_GENERATED
    return [
        Sample(
            token_ids=random.integers(0, vocabulary, length),
            turns=turns,
            logprobs=np.full(length, -10.0, np.float32),
            advantages=random.normal(size=length).astype(np.float32),
        )
        for _ in range(count)
    ]


def flops_per_token(model: Any, length: int) -> float:
    """Floating-point operations of a forward and a backward pass without recomputation; attention is causal."""
    config = model.config
    weights = sum(weight.numel() for weight in model.parameters()) - model.get_input_embeddings().weight.numel()
    return 6.0 * weights + 6.0 * config.num_hidden_layers * config.hidden_size * length


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    one, other = (torch.randn(MATRIX, MATRIX, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / timed(lambda: one @ other, rounds=20)[1]


def offload_rates(learner: Learner) -> dict[str, float]:
    """GiB/s of the first and the second offload and load, and of a copy of pinned memory."""
    size = sum(weight.numel() for weight in learner.module.parameters()) * 12 / GIB  # weight and moments, float32
    rates = {"state_gib": size}
    for name in ("first", "second"):
        for what, move in (("offload", learner.offload), ("load", learner.load)):
            rates[f"{name}_{what}"] = size / once(move)
    host = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE)
    rates["pinned_offload"] = 4 / timed(lambda: host.copy_(device, non_blocking=True))[1]
    rates["pinned_load"] = 4 / timed(lambda: device.copy_(host, non_blocking=True))[1]
    return rates


def timed(call: Callable[[], Any], rounds: int = ROUNDS) -> tuple[float, float]:
    """Seconds of the first call, and the median of later ones."""
    first = once(call)
    once(call)
    return first, median(once(call) for _ in range(rounds))


def once(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(Path(sys.argv[1]))))
