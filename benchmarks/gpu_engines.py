"""Engines, weight updates and whole training steps on one GPU, and TRL's steps beside them.

`python benchmarks/gpu_engines.py serving|step|trl|update MODEL RESULTS` writes the results as JSON; `benchmarks/gpu.py`
calls it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from train_roost import PATIENT, run
from train_workload import Workload

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.connect import connect
from roost.engines.protocol import Engine, InFlight, Part, Sampling
from roost.engines.server_process import start_ready
from roost.engines.weights.carriers import SharedMemoryCarrier, device_carrier
from roost.engines.weights.payload import BUCKET_BYTES
from roost.engines.weights.source import ModuleSource
from roost.engines.weights.update import LocalSender, send
from roost.placement.routes import WeightRoute

READY_LIMIT_S, RUN_LIMIT_S = 600.0, 900.0
PROMPT, SERVED_TOKENS, STEP_TOKENS, WARM_UP_TOKENS = 128, 256, 512, 32
AT_ONCE = (1, 64, 256, 512)
PROMPTS, GROUP, STEPS = 64, 8, 3
OFFLOADS = {"offload_weight": True, "offload_grad": True, "offload_optimizer": True}
KEPT_FRACTION = 0.25  # of the device, for an engine that stays: all 512 sequences fit
PHASES = ("generate", "switch", "score", "learn", "sync", "step")
HERE = Path(__file__).parent
TRL_WORKLOAD = Workload(STEPS, PROMPTS, GROUP, PROMPT, STEP_TOKENS, learning_rate=1e-6)
TRL_MICRO_BATCH, TRL_LIMIT_S = 32, 400.0  # samples of 640 tokens in one pass: about 100 GiB without recomputation
ROUNDS = 3
COPIED_BYTES = 4_000_000_000
UPDATED_FRACTION = 0.4
LARGER_BUCKETS = 4 << 30
SMALL = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
LARGE = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32}
UPDATED = {  # by GB in bfloat16
    "1": {**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 8},
    "4": {**LARGE, "num_key_value_heads": 8, "num_hidden_layers": 10},
    "16": {**LARGE, "num_key_value_heads": 8, "num_hidden_layers": 44},
}


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
            for count in AT_ONCE:
                await _rate(engine, count, WARM_UP_TOKENS)
                results[str(count)] = await _rate(engine, count, SERVED_TOKENS)
                print(kind, count, round(results[str(count)]), file=sys.stderr, flush=True)
            # The requests of a training step: one for each group.
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
    """Collocated steps with each engine: seconds of each phase, and tokens per second of the generation."""
    kinds = [EngineKind.TORCH, *([EngineKind.VLLM] if find_spec("vllm") else [])]
    ways = ((kind, keeps) for kind in kinds for keeps in (False, True))
    return {"step": {f"{kind}{', keep' if keeps else ''}": step_with(kind, model, keeps) for kind, keeps in ways}}


def step_with(kind: EngineKind, model: Path, keeps: bool = False) -> dict[str, float]:
    """Steps in which engine and learner take turns on the device, or both stay (`keeps`)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_prompts(folder / "prompts.jsonl", PROMPTS * STEPS, PROMPT)
        began = time.time()
        metrics = run(job(kind, model, data, keeps), folder / "job", RUN_LIMIT_S, is_shown=True)
    rate = samples_per_s(metrics, PROMPTS * GROUP)
    first = metrics[0]["time"] - metrics[0]["time/step"] - began
    found = {**phases(metrics[1:]), "samples_per_s": rate, "first_step_s": first}
    print(kind, found, file=sys.stderr, flush=True)
    return found


def write_prompts(file: Path, count: int, tokens: int) -> Path:
    """A data file of random digits, each of which is a token."""
    random = Random(1)
    rows = ("".join(str(random.randrange(10)) for _ in range(tokens)) for _ in range(count))
    file.write_text("".join(f"{json.dumps({'prompt': row})}\n" for row in rows))
    return file


def samples_per_s(rows: Sequence[dict[str, Any]], samples: int) -> float:
    """Samples per second from the end of the first step, which warms up, to the end of the last.

    >>> samples_per_s([{"time": 10.0}, {"time": 12.0}, {"time": 14.0}], 8)
    4.0
    """
    return samples * (len(rows) - 1) / float(rows[-1]["time"] - rows[0]["time"])


def phases(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over steps."""
    found = {name: median(each.get(f"time/{name}", 0.0) for each in steps) for name in PHASES}
    rates = [each["tokens/generated"] / each["time/generate"] for each in steps]
    mismatch = [each.get("mismatch/logprob_mean", float("nan")) for each in steps]
    return {**found, "generated_tokens_per_s": median(rates), "mismatch": median(mismatch)}


def job(kind: EngineKind, model: Path, data: Path, keeps: bool = False) -> dict[str, Any]:
    options = {"max_context": 1024, **({"memory_fraction": KEPT_FRACTION} if keeps else {})}
    return {
        "cluster": {"num_nodes": 1, "num_gpus_per_node": 1, "component_placement": {"actor,rollout": 0}},
        "actor": {"model": {"model_path": str(model)}, "optim": {"lr": 1e-6}, **({} if keeps else OFFLOADS)},
        "train": {
            "engine": kind.value,
            "compute_dtype": "bfloat16",
            "activation_checkpointing": False,  # the memory suffices
            "micro_batch_tokens": 16_384,
            "prompts_per_step": PROMPTS,
            "num_generations": GROUP,
            "max_new_tokens": STEP_TOKENS,
            "max_steps": STEPS,
            "checkpoint_every": 0,
            "data": {"path": str(data)},
            "rewards": {"digits": {"_target_": "train_scenarios.LikedDigits"}},
            "engine_options": options,
        },
    }


def trl(model: Path) -> dict[str, Any]:
    """Samples per second of TRL's GRPO on the prompts and lengths of `step`: with vLLM, else with `generate`."""
    ways = [*(["vllm"] if find_spec("vllm") else []), "dynamic"]
    for way in ways:
        rows = trl_rows(model, TRL_WORKLOAD, TRL_MICRO_BATCH, way, "cuda")
        if len(rows) > 1:
            tokens = median(row["tokens"] for row in rows[1:])
            rate = samples_per_s(rows, TRL_WORKLOAD.samples)
            return {"trl": {"generation": way, "steps": len(rows), "tokens": tokens, "samples_per_s": rate}}
        print(f"TRL with {way}: {len(rows)} steps done", file=sys.stderr, flush=True)
    raise RuntimeError("TRL did not complete two steps; its output is above")


def trl_rows(model: Path, workload: Workload, micro_batch: int, generation: str, device: str) -> list[dict[str, Any]]:
    """The steps that TRL completed within the limit."""
    settings = {
        "workload": asdict(workload),
        "micro_batch": micro_batch,
        "generation": generation,
        "device": device,
        "threads": os.cpu_count() or 1,
    }
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ, **PATIENT, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        command = [sys.executable, str(HERE / "train_peer_trl.py"), str(model), json.dumps(settings), str(file)]
        try:
            subprocess.run(command, stdout=sys.stderr, env=environment, timeout=TRL_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"TRL was stopped after {TRL_LIMIT_S:.0f} s", file=sys.stderr, flush=True)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def update(model: Path) -> dict[str, Any]:
    """Weight updates of models of 1, 4 and 16 GB, beside the copy rate of the device; vLLM takes the smallest."""
    found = {}
    copied = copy_rate()
    for name, sizes in UPDATED.items():
        kinds = [EngineKind.TORCH, *([EngineKind.VLLM] if name == "1" and find_spec("vllm") else [])]
        with sent_model(model, sizes, torch.device("cuda", 0)) as (module, folder, written):
            for kind in kinds:
                try:
                    rates: dict[str, Any] = asyncio.run(update_rates(kind, module, folder))
                except Exception as error:  # the other measurements are still useful
                    rates = {"failed": f"{type(error).__name__}: {error}"}
                found[f"{name} GB, {kind.value}"] = {"copy": copied, "write": written, **rates}
                print(name, kind, found[f"{name} GB, {kind.value}"], file=sys.stderr, flush=True)
    return {"update": found}


def copy_rate() -> float:
    """GB/s of a copy within the device; what is copied counts once."""
    one, other = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        other.copy_(one)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return COPIED_BYTES / median(seconds[1:]) / 1e9


@contextmanager
def sent_model(
    model: Path, sizes: dict[str, int], device: torch.device
) -> Iterator[tuple[torch.nn.Module, Path, float]]:
    """A random model in float32 on the device, its checkpoint in bfloat16, and the GB/s of writing that."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False)
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * gigabytes(module) * 1e9
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as name:
        companions, folder = Path(name) / "companions", Path(name) / "model"
        shutil.copytree(model, companions, ignore=shutil.ignore_patterns("*.safetensors*"))
        config.save_pretrained(companions)
        sender = LocalSender(ModuleSource(module, torch.bfloat16), WeightRoute.RELOAD, SharedMemoryCarrier)
        began = time.perf_counter()
        asyncio.run(sender.write(str(companions), str(folder)))
        yield module, folder, gigabytes(module) / (time.perf_counter() - began)
    del module, sender
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gigabytes(module: torch.nn.Module) -> float:
    """Size of the weights in bfloat16."""
    return sum(weight.numel() for weight in module.parameters()) * 2 / 1e9


async def update_rates(kind: EngineKind, module: torch.nn.Module, folder: Path) -> dict[str, float]:
    """GB/s of updates from weights in float32, as a learner has them, and in bfloat16, and of a reload.

    An engine that is awake keeps its old weights in host memory until the update is whole; one that sleeps has none.
    """
    device = next(module.parameters()).device
    spec = ServerSpec(
        kind,
        str(folder),
        device=device.type,
        dtype="bfloat16",
        max_context=1024,
        memory_fraction=UPDATED_FRACTION,
        sleeps=True,
        weight_transfer="ipc" if kind is EngineKind.VLLM else None,
        args=("--enforce-eager",),
    )
    size = gigabytes(module)
    with tempfile.TemporaryDirectory() as logs:
        process = await start_ready(spec, logs, READY_LIMIT_S)
        engine = connect(kind, process.url, sleeps=True)
        try:
            found = {}
            for name, source in sources(module):
                for is_asleep in (True, False):
                    seconds = await update_s(engine, local_sender(source, device).send, is_asleep)
                    found[f"{name}, {'asleep' if is_asleep else 'awake'}"] = size / seconds
                larger = local_sender(source, device, LARGER_BUCKETS)
                found[f"{name}, asleep, larger buckets"] = size / await update_s(engine, larger.send, True)
            # The last source is bfloat16: what sending takes without fingerprints of what is sent.
            plain = await update_s(engine, lambda engines, version: plain_send(engines, source, version, device), True)
            found["bfloat16, asleep, no fingerprints"] = size / plain
            await engine.pause(InFlight.DRAIN)
            began = time.perf_counter()
            await engine.load_checkpoint(str(folder), 100)
            found["reload"] = size / (time.perf_counter() - began)
            return found
        finally:
            await engine.close()
            await process.stop()


def sources(module: torch.nn.Module) -> Iterator[tuple[str, ModuleSource]]:
    """Weights of the module in float32, cast on the way, then in bfloat16; the module is changed for the second."""
    yield "float32", ModuleSource(module.float(), torch.bfloat16)
    yield "bfloat16", ModuleSource(module.bfloat16())


def local_sender(source: ModuleSource, device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> LocalSender:
    """The sender of a learner that shares the engine's device; without one (to try it), by shared memory."""
    if device.type == "cpu":
        return LocalSender(source, WeightRoute.SHARED_MEMORY, SharedMemoryCarrier, bucket_bytes)
    return LocalSender(source, WeightRoute.DEVICE, lambda: device_carrier(source), bucket_bytes)


async def plain_send(engines: Sequence[Engine], source: ModuleSource, version: int, device: torch.device) -> Any:
    return await send(
        engines, source, version, SharedMemoryCarrier() if device.type == "cpu" else device_carrier(source)
    )


async def update_s(engine: Engine, give: Callable[[Sequence[Engine], int], Any], is_asleep: bool) -> float:
    """Median seconds of an update after a first one."""
    seconds = []
    for version in range(1, ROUNDS + 2):
        if is_asleep:
            await engine.sleep(2)
            await engine.wake([Part.WEIGHTS])
        else:
            await engine.pause(InFlight.DRAIN)
        began = time.perf_counter()
        sent = await give([engine], version)
        seconds.append(time.perf_counter() - began)
        for error in sent.failed.values():
            raise error
        await (engine.wake([Part.KV_CACHE]) if is_asleep else engine.resume())
    return median(seconds[1:])


if __name__ == "__main__":
    section = {"serving": serving, "step": step, "trl": trl, "update": update}[sys.argv[1]]
    Path(sys.argv[3]).write_text(json.dumps(section(Path(sys.argv[2]))))
