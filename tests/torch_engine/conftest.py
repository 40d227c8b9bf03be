"""Tiny models, engines on them, and what transformers itself makes of a prompt."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from roost.engines.protocol import Finish, Sampling
from roost.engines.tiny_model import write_tiny_model
from roost.torch_engine.engine import EngineSettings, Progress, Request, TorchEngine
from tests.limits import HANG_S
from tests.one_thread import one_thread  # noqa: F401


@dataclass
class Answer:
    """Progress of one request, step by step."""

    steps: queue.SimpleQueue[Progress] = field(default_factory=queue.SimpleQueue)
    taken: list[Progress] = field(default_factory=list)

    def next(self) -> Progress:
        self.taken.append(self.steps.get(timeout=HANG_S))
        return self.taken[-1]

    def all(self) -> Answer:
        while not self.taken or self.taken[-1].finish is None:
            self.next()
        return self

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.taken for token in step.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for step in self.taken for logprob in step.logprobs]

    @property
    def versions(self) -> list[int]:
        return [step.version for step in self.taken for _ in step.token_ids]

    @property
    def finish(self) -> Finish | None:
        return self.taken[-1].finish


class Driver:
    """An engine, and answers to wait for."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._count = 0

    def ask(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> Answer:
        self._count += 1
        answer = Answer()
        name = options.pop("request_id", f"request-{self._count}")
        self.engine.submit(Request(name, tuple(prompt), sampling, **options), answer.steps.put)
        return answer

    def ask_all(self, prompts: Sequence[Sequence[int]], sampling: Sampling, **options: Any) -> list[Answer]:
        return [answer.all() for answer in [self.ask(prompt, sampling, **options) for prompt in prompts]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, written once."""
    written: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in written:
            written[family] = write_tiny_model(tmp_path_factory.mktemp("models") / family, family)
        return written[family]

    return folder


@pytest.fixture
def start(models: Callable[[str], Path]) -> Iterator[Callable[..., Driver]]:
    """Starts engines that are closed after the test."""
    engines: list[TorchEngine] = []

    def started(family: str = "qwen2", **settings: Any) -> Driver:
        engines.append(TorchEngine(EngineSettings(str(models(family)), device="cpu", **settings)))
        return Driver(engines[-1])

    yield started
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def reference(models: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' own model of a family."""
    from transformers import AutoModelForCausalLM

    return lambda family: AutoModelForCausalLM.from_pretrained(models(family), dtype=torch.float32).eval()
