"""Reward model: a sequence classifier with one label, whose number is the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from roost.config.findings import Findings, Where
from roost.engines.protocol import EngineError
from roost.rollout.rewards.judge_server import ExternalServer, OwnServer, check_served
from roost.rollout.rewards.reward import Answer, RewardFailed
from roost.transport.context import worker_setup

POOLING = "/pooling"  # of vLLM


class RewardModel:
    """Scores conversations by a classifier: loaded here with transformers, or served by vLLM.

    Without `engine` and `base_url` each process of the reward loads the model on its accelerator, or on the CPU.
    The model reads the conversation through its own chat template, or else the question and the answer as a pair.
    """

    def __init__(
        self,
        model: str,
        engine: Mapping[str, Any] | None = None,
        base_url: str | None = None,
        dtype: str = "auto",
        batch_size: int = 16,
        max_length: int | None = None,
        limit_s: float = 120.0,
    ) -> None:
        findings = Findings()
        self.check_config({"model": model, "engine": engine, "base_url": base_url}, Where(), findings)
        findings.raise_errors()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self._name, self._dtype, self._batch_size, self._max_length = model, dtype, batch_size, max_length
        self._limit_s = limit_s
        self._server: OwnServer | ExternalServer | None = None
        if engine is not None:
            arguments = ["--runner", "pooling", *engine.get("args", ())]
            self._server = OwnServer({**engine, "args": arguments}, model, api="")
        elif base_url is not None:
            self._server = ExternalServer(base_url.removesuffix("/v1"), None)
        self._tokenizer: Any = None
        self._model: Any = None
        self._lock = asyncio.Lock()  # one load or forward pass at a time

    @staticmethod
    def check_config(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
        """Report a model with two servers, and an engine that cannot start; without either it is loaded here."""
        if config.get("engine") is not None or config.get("base_url") is not None:
            check_served(config, where, findings)
            kind = config["engine"].get("kind") if isinstance(config.get("engine"), Mapping) else "vllm"
            if kind != "vllm":
                why, fix = f"kind is {kind}", "write kind: vllm, or leave engine out to load the model here"
                findings.error("RST-A023", where.under("engine"), "serves no classifier", why, fix)

    async def prepare(self) -> None:
        """Load the tokenizer and the model, or start the server."""
        async with self._lock:
            if self._tokenizer is None:  # else loaded by a concurrent call
                await asyncio.to_thread(self._load)
        if self._server is not None:
            await self._server.calls()

    async def score_batch(self, answers: Sequence[Answer]) -> list[float]:
        """The model's number for each answer."""
        if self._tokenizer is None:  # `prepare` is not called again after a restart
            await self.prepare()
        texts = [self._text(answer) for answer in answers]
        if self._server is not None:
            return await self._served(texts)
        async with self._lock:
            return await asyncio.to_thread(self._computed, texts)

    async def close(self) -> None:
        self._model = None
        if self._server is not None:
            await self._server.close()

    def _load(self) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._name)
            if self._server is not None:
                self._tokenizer = tokenizer
                return
            model = AutoModelForSequenceClassification.from_pretrained(self._name, num_labels=1, dtype=self._dtype)
        except (OSError, ValueError) as error:
            raise RewardFailed(f"the reward model {self._name} cannot be loaded: {error}") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        setup = worker_setup()
        self._model = model.to("cuda" if setup is not None and setup.physical_ids else "cpu").eval()
        self._tokenizer = tokenizer

    def _text(self, answer: Answer) -> str:
        """The conversation as the model reads it."""
        messages = [{"role": one["role"], "content": one["content"]} for one in answer.messages]
        if not messages or any(one["role"] not in ("system", "user", "assistant", "tool") for one in messages):
            given = answer.task.data.get("messages") or [{"role": "user", "content": answer.question}]
            messages = [*given, {"role": "assistant", "content": answer.text}]
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(str(one["content"]) for one in messages)

    def _computed(self, texts: Sequence[str]) -> list[float]:
        import torch

        found: list[float] = []
        for begin in range(0, len(texts), self._batch_size):
            batch = self._tokenizer(
                list(texts[begin : begin + self._batch_size]),
                return_tensors="pt",
                padding=True,
                truncation=self._max_length is not None,
                max_length=self._max_length,
                add_special_tokens=not self._tokenizer.chat_template,
            ).to(self._model.device)
            batch.pop("token_type_ids", None)
            with torch.inference_mode():
                found += self._model(**batch).logits.float()[:, 0].tolist()
        return found

    async def _served(self, texts: Sequence[str]) -> list[float]:
        """Ask vLLM's pooling route."""
        if self._server is None:
            raise RuntimeError("there is no server")
        calls = await self._server.calls()
        body = {"model": self._name, "input": list(texts), "use_activation": False}
        try:
            reply = await calls.post(POOLING, body, limit_s=self._limit_s, is_idempotent=True, about="reward")
        except EngineError as error:
            raise RewardFailed(f"the reward model does not answer: {error}") from error
        match reply:
            case {"data": [*rows]} if len(rows) == len(texts):
                return [_first_number(row) for row in rows]
        raise RewardFailed(f"{calls.url} does not answer as vLLM's pooling route: {str(reply)[:200]}")


def _first_number(row: Any) -> float:
    """The number of a pooled output, which may be nested in lists.

    >>> _first_number({"data": [[0.25]]})
    0.25
    """
    value = row.get("data") if isinstance(row, Mapping) else row
    while isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardFailed(f"a pooled output is {row!r}; a number is needed")
    return float(value)
