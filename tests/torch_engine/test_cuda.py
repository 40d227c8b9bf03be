"""On a CUDA device: paged attention, captured decode steps, and memory that is given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from roost.engines.protocol import InFlight, Sampling
from roost.engines.tiny_model import write_tiny_model
from roost.torch_engine.engine import EngineSettings, TorchEngine
from tests.torch_engine.conftest import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [
    [(7 * place + token) % 256 for token in range(length)] for place, length in enumerate((1, 30, 255, 300, 420))
]
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
KV_BYTES = 1 << 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Heads of a size that real models have.
    return write_tiny_model(tmp_path_factory.mktemp("cuda"), "qwen3", hidden_size=128, head_dim=64)


@pytest.fixture
def start_on_cuda(folder: Path) -> Iterator[Any]:
    engines: list[TorchEngine] = []

    def started(**settings: Any) -> Driver:
        engines.append(TorchEngine(EngineSettings(str(folder), device="cuda", kv_bytes=KV_BYTES, **settings)))
        return Driver(engines[-1])

    yield started
    for engine in engines:
        engine.close()


def scored(folder: Path, token_ids: list[int]) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.5)])
def test_logprobs_are_those_of_the_model(
    start_on_cuda: Any, folder: Path, dtype: str, tolerance: float, graphs: bool
) -> None:
    """In half precision the tokens may differ; their log-probabilities given what came before may not, by much."""
    driver = start_on_cuda(dtype=dtype, cuda_graphs=graphs, max_batch_tokens=512)
    for prompt, answer in zip(PROMPTS, driver.ask_all(PROMPTS, GREEDY), strict=True):
        expected = scored(folder, prompt + answer.token_ids)[len(prompt) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_back(start_on_cuda: Any, level: int) -> None:
    driver = start_on_cuda(dtype="bfloat16")
    engine = driver.engine
    expected = driver.ask(PROMPTS[1], GREEDY).all().token_ids
    kept = {name: weight.clone() for name, weight in engine.named_weights().items()}
    before = torch.cuda.memory_reserved()
    engine.pause(InFlight.DROP)
    engine.sleep(level)
    assert before - torch.cuda.memory_reserved() >= KV_BYTES // 2
    engine.wake()

    def write() -> None:
        for name, weight in engine.named_weights().items():
            weight.copy_(kept[name])
        engine.weights_replaced(1)

    if level == 2:
        engine.between_steps(write)
    assert driver.ask(PROMPTS[1], GREEDY).all().token_ids == expected
