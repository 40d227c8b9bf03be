"""Engines and whole training steps on one GPU.

`python benchmarks/gpu_engines.py serving|step MODEL RESULTS` writes the results as JSON; `benchmarks/gpu.py` calls it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from train_roost import run

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.connect import connect
from roost.engines.protocol import Engine, Sampling
from roost.engines.server_process import start_ready

READY_LIMIT_S, RUN_LIMIT_S = 600.0, 900.0
PROMPT, SERVED_TOKENS, STEP_TOKENS = 128, 256, 512
AT_ONCE = (1, 64, 256, 512)
PROMPTS, GROUP, STEPS = 64, 8, 3
OFFLOADS = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}
PHASES = ("generate", "switch", "score", "learn", "sync", "step")


def serving(model: Path) -> dict[str, Any]:
    """Tokens per second of each engine by plain requests, by the number of requests at once."""
    kinds = [EngineKind.TORCH, *([EngineKind.VLLM] if find_spec("vllm") else [])]
    return {"serving": {kind.value: asyncio.run(_serving(kind, model)) for kind in kinds}}


async def _serving(kind: EngineKind, model: Path) -> dict[str, float]:
    spec = ServerSpec(kind, str(model), device="cuda", dtype="bfloat16", max_context=1024, memory_fraction=0.8)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as logs:
        process = await start_ready(spec, logs, READY_LIMIT_S)
        engine = connect(kind, process.url)
        try:
            results = {"ready_s": time.perf_counter() - began}
            await _rate(engine, 64, SERVED_TOKENS)  # warm-up
            for count in AT_ONCE:
                results[str(count)] = await _rate(engine, count, SERVED_TOKENS)
                print(kind, count, round(results[str(count)]), file=sys.stderr, flush=True)
            # The requests of a step, in the way a step sends them: one for each group.
            results["groups"] = await _rate(engine, PROMPTS, STEP_TOKENS, GROUP)
            return results
        finally:
            await engine.close()
            await process.stop()


async def _rate(engine: Engine, requests: int, tokens: int, n: int = 1) -> float:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True, logprobs=False)
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate_n(ids, sampling, n) for ids in prompts(requests)))
    return requests * n * tokens / (time.perf_counter() - began)


def prompts(count: int) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(10) for _ in range(PROMPT)] for _ in range(count)]


def step(model: Path) -> dict[str, Any]:
    """Seconds of each phase of a collocated step with vLLM, and tokens per second of its generation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "prompts.jsonl"
        random = Random(1)
        rows = ("".join(str(random.randrange(10)) for _ in range(PROMPT)) for _ in range(PROMPTS * STEPS))
        data.write_text("".join(f"{json.dumps({'prompt': row})}\n" for row in rows))
        began = time.time()
        metrics = run(job(model, data), folder / "job", RUN_LIMIT_S)
        log = (folder / "job" / "log").read_text(errors="replace")
    print(log, file=sys.stderr)
    return {"step": {**phases(metrics[1:]), "first_step_s": metrics[0]["time"] - metrics[0]["time/step"] - began}}


def phases(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over steps."""
    found = {name: median(each.get(f"time/{name}", 0.0) for each in steps) for name in PHASES}
    rates = [each["tokens/generated"] / each["time/generate"] for each in steps]
    mismatch = [each.get("mismatch/logprob_mean", float("nan")) for each in steps]
    return {**found, "generated_tokens_per_s": median(rates), "mismatch": median(mismatch)}


def job(model: Path, data: Path) -> dict[str, Any]:
    return {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": 0}},
        "actor": {"model": {"model_path": str(model)}, "optim": {"lr": 1e-6}, **OFFLOADS},
        "rollout": {"rollout_backend": "vllm"},
        "train": {
            "compute_dtype": "bfloat16",
            "activation_checkpointing": False,  # the engine sleeps while the learner works: there is room
            "micro_batch_tokens": 16_384,
            "prompts_per_step": PROMPTS,
            "num_generations": GROUP,
            "max_new_tokens": STEP_TOKENS,
            "max_steps": STEPS,
            "checkpoint_every": 0,
            "data": {"path": str(data)},
            "rewards": {"digits": {"_target_": "train_scenarios.LikedDigits"}},
            "engine_options": {"max_context": 1024},
        },
    }


if __name__ == "__main__":
    section = {"serving": serving, "step": step}[sys.argv[1]]
    Path(sys.argv[3]).write_text(json.dumps(section(Path(sys.argv[2]))))
