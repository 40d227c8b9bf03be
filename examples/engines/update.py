"""Two engines on this machine: generate, update weights during generation, sleep, and restart after one is killed.

python examples/engines/update.py
"""

import asyncio
import os
import signal
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from roost.engines import (
    Completion,
    EngineKind,
    Fleet,
    InFlight,
    LocalOwner,
    LocalSender,
    ModuleSource,
    Sampling,
    ServerSpec,
    SharedMemoryCarrier,
    WeightRoute,
    WeightUpdate,
    make_probe,
    write_tiny_model,
)

SAMPLING = Sampling(max_tokens=200, temperature=0.8, seed=1, ignore_eos=True)


class Learner:
    """A stand-in for a learner: a model in this process whose weights change randomly."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.version = 0

    @torch.no_grad()
    def step(self) -> WeightUpdate:
        for weight in self.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05 * weight.std())
        self.version += 1
        sender = LocalSender(ModuleSource(self.model), WeightRoute.SHARED_MEMORY, SharedMemoryCarrier)
        return WeightUpdate(self.version, make_probe(self.model, self.model.config.vocab_size), sender)


def describe(completion: Completion) -> str:
    spans = ", ".join(f"tokens {span.start}-{span.end - 1} by version {span.version}" for span in completion.versions)
    return f"{len(completion.token_ids)} tokens, {spans}, log-probability {sum(completion.logprobs):.1f}"


async def main(folder: Path) -> None:
    model = write_tiny_model(folder / "model", max_position_embeddings=1024)
    prompt = AutoTokenizer.from_pretrained(model)("Once upon a time").input_ids
    learner = Learner(model)
    specs = [ServerSpec(EngineKind.TORCH, str(model), name=f"engine-{index}", device="cpu") for index in range(2)]
    print("starting two engines ...", flush=True)
    async with Fleet([LocalOwner(spec, folder / "logs") for spec in specs]) as fleet:
        print("version 0:", describe(await fleet.generate(prompt, SAMPLING)))

        requests = [asyncio.create_task(fleet.generate(prompt, SAMPLING, episode=str(index))) for index in range(4)]
        await asyncio.sleep(0.15)
        await fleet.update(learner.step(), InFlight.HOLD)
        print("updated meanwhile:", *{describe(await request) for request in requests}, sep="\n  ")

        await fleet.sleep(level=2)
        await fleet.wake(learner.step())
        print("slept, and woke with new weights:", describe(await fleet.generate(prompt, SAMPLING)))

        request = asyncio.create_task(fleet.generate(prompt, SAMPLING, episode="0"))
        os.kill(fleet.pool.members["engine-0"].owner.pid, signal.SIGKILL)
        print("one killed:", describe(await request))
        while len(fleet.urls) < 2:
            await asyncio.sleep(0.2)
        for span in fleet.recorder.drain():
            print(f"  {span.name:8} {(span.end_ns - span.start_ns) / 1e9:6.2f} s")


if __name__ == "__main__":
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
