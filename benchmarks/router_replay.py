"""Router replay: mismatch (KL) and reward of a tiny mixture, with an engine in bfloat16 and a learner in float32.

python benchmarks/router_replay.py --steps 25 --seeds 2
"""

from __future__ import annotations

import argparse
import queue
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from roost.config.train import LearnerSettings, OptimizerSettings
from roost.engines.protocol import Sampling
from roost.engines.weights.source import ModuleSource
from roost.learner.learner import Learner
from roost.learner.losses import Totals
from roost.learner.sample import NOT_GENERATED, Sample
from roost.net.routing import padded_routing
from roost.rollout.arithmetic import share_right, write_arithmetic_model
from roost.torch_engine.engine import EngineSettings, Progress, Request, TorchEngine
from roost.trainer.metrics import mismatch

LARGEST, GENERATIONS, MAX_TOKENS = 2, 12, 3
CPU = torch.device("cpu")
MIXTURE = {
    "family": "qwen3_moe",
    "hidden_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, slots=True)
class Step:
    """Figures of one step."""

    reward: float
    kl: float  # of the engine from the learner, before the step
    replaced: float | None  # share of the engine's experts that the learner's routers would not have chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.seeds):
        for replays in (False, True):
            steps = run(seed, replays, arguments.steps)
            kl = [step.kl for step in steps]
            rewards = [step.reward for step in steps]
            first, last = statistics.mean(rewards[:3]), statistics.mean(rewards[-3:])
            replaced = [step.replaced for step in steps if step.replaced is not None]
            print(
                f"seed {seed}, {'replay' if replays else 'no replay'}: KL mean {statistics.mean(kl):.2e}, "
                f"largest {max(kl):.2e}; reward {first:.2f} to {last:.2f}"
                + (f"; choices replaced {statistics.mean(replaced):.2%}" if replaced else ""),
                flush=True,
            )


def run(seed: int, replays: bool, steps: int) -> list[Step]:
    """Train with the built-in engine, both in this process."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_arithmetic_model(Path(folder) / "model", seed, **MIXTURE))
        optimizer = OptimizerSettings(learning_rate=2e-3, weight_decay=0.0)
        learner = Learner(LearnerSettings(model, router_replay=replays, optimizer=optimizer, seed=seed), CPU)
        engine = TorchEngine(EngineSettings(model, device="cpu", dtype="bfloat16", seed=seed, max_context=32))
        try:
            return [step_of(engine, learner, AutoTokenizer.from_pretrained(model), number) for number in range(steps)]
        finally:
            engine.close()


def step_of(engine: TorchEngine, learner: Learner, tokenizer: AutoTokenizer, number: int) -> Step:
    """Generate, learn twice, and send the weights to the engine."""
    sums = [(one, other) for one in range(LARGEST + 1) for other in range(LARGEST + 1)]
    prompts = [tokenizer(f"{one}+{other}=", add_special_tokens=False).input_ids for one, other in sums]
    answers = [
        [*tokenizer(f"{sum(each)}", add_special_tokens=False).input_ids, tokenizer.eos_token_id] for each in sums
    ]
    progress = generated(engine, [prompt for prompt in prompts for _ in range(GENERATIONS)], number)
    rewards = np.array(
        [share_right(each.token_ids, answers[index // GENERATIONS]) for index, each in enumerate(progress)]
    ).reshape(len(sums), GENERATIONS)
    advantages = (rewards - rewards.mean(1, keepdims=True)).flatten()
    samples = [sample_of(prompts[index // GENERATIONS], each, advantages[index]) for index, each in enumerate(progress)]
    scored = learner.score(samples)
    engine_side, own = (
        np.concatenate([array[sample.is_generated] for sample, array in zip(samples, arrays, strict=True)])
        for arrays in ([sample.logprobs for sample in samples], scored)
    )
    samples = [replace(sample, old_logprobs=array) for sample, array in zip(samples, scored, strict=True)]
    totals = Totals(len(samples), sum(sample.num_generated for sample in samples), MAX_TOKENS)
    metrics = [learner.learn(samples, totals) for _ in range(2)]
    engine.between_steps(lambda: give(engine, learner, number + 1))
    return Step(float(rewards.mean()), mismatch(engine_side, own)["kl_k3"], metrics[0].get("experts/replaced"))


def give(engine: TorchEngine, learner: Learner, version: int) -> None:
    """Replace the engine's weights by the learner's, rounded to bfloat16."""
    source, weights = ModuleSource(learner.module), engine.named_weights()
    for info, tensor in zip(source.tensors, source.stream(), strict=True):
        weights[info.name].copy_(tensor)
    engine.weights_replaced(version)


def generated(engine: TorchEngine, prompts: Sequence[Sequence[int]], number: int) -> list[Progress]:
    answers: list[queue.SimpleQueue[Progress]] = [queue.SimpleQueue() for _ in prompts]
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sampling = Sampling(MAX_TOKENS, seed=number * len(prompts) + index, return_routed_experts=True)
        engine.submit(Request(f"{number}-{index}", tuple(prompt), sampling, streams=False), answer.put)
    return [answer.get() for answer in answers]


def sample_of(prompt: Sequence[int], progress: Progress, advantage: float) -> Sample:
    tokens = np.array([*prompt, *progress.token_ids])
    turns = np.array([NOT_GENERATED] * len(prompt) + [0] * len(progress.token_ids))
    logprobs = np.array([0.0] * len(prompt) + list(progress.logprobs), np.float32)
    assert progress.routing is not None
    routing = padded_routing(progress.routing, len(tokens))
    return Sample(tokens, turns, logprobs, np.full(len(tokens), advantage, np.float32), routed_experts=routing)


if __name__ == "__main__":
    main()
