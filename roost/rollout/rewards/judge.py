"""Answers judged by a language model, behind an OpenAI-compatible endpoint or on an engine of its own."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roost.config.errors import Findings, Where
from roost.engines.errors import EngineError, EngineLost, EngineRefused
from roost.rollout.rewards.errors import RewardFailed
from roost.rollout.rewards.judge_engine import check_served
from roost.rollout.rewards.judge_reply import PATTERN, TEMPLATE, Reading, filled
from roost.rollout.rewards.reward import Answer
from roost.rollout.rewards.task_data import datum

if TYPE_CHECKING:
    from roost.engines.http_calls import HttpCalls
    from roost.rollout.rewards.judge_server import Served

REMINDER = (
    "I cannot read a number from {lowest} to {highest} in your reply. Give it again, in the form that was asked for."
)
NO_REFERENCE = "(none)"
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0  # between two questions to a server that is busy


class Judge:
    """Asks a model what an answer is worth, and reads a number from its reply."""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        engine: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        template: str = TEMPLATE,
        question: str | None = None,
        reference: str | None = None,
        lowest: float = 0.0,
        highest: float = 10.0,
        scale: bool = True,
        pattern: str = PATTERN,
        json_key: str | None = None,
        tries: int = 3,
        default: float | None = None,
        concurrency: int = 32,
        limit_s: float = 120.0,
        patience_s: float = 60.0,
        max_tokens: int = 1024,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        findings = Findings()
        served = {"base_url": base_url, "model": model, "engine": engine, "api_key_env": api_key_env}
        self.check_config(served, Where(), findings)
        findings.raise_errors()
        if "{answer}" not in template:
            raise ValueError("the template has no {answer}; the judge would not see what it judges")
        for name, value in (("tries", tries), ("concurrency", concurrency), ("limit_s", limit_s)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        self._asked = {"model": model, "max_tokens": max_tokens, "temperature": 0.0, **(sampling or {})}
        self._template, self._question, self._reference = template, question, reference
        self._reading = Reading(lowest, highest, pattern, json_key)
        self._scale, self._tries, self._default = scale, tries, default
        if patience_s < 0:
            raise ValueError(f"patience_s is {patience_s}; it cannot be below 0")
        self._limit_s, self._patience_s = limit_s, patience_s
        self._places = asyncio.Semaphore(concurrency)
        self._malformed = self._failed = 0
        self._server = _served(base_url, api_key_env, engine, model)

    @staticmethod
    def check_config(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
        """Find a model that nobody serves, and an engine that cannot be started."""
        check_served(config, where, findings)

    @property
    def counts(self) -> dict[str, int]:
        """How many replies had no number, how many answers were not judged, how often its engine was restarted."""
        return {"malformed": self._malformed, "failed": self._failed, **self._server.counts}

    async def prepare(self) -> None:
        """Start its engine, if it has one of its own: models are long in loading."""
        await self._server.calls()

    async def score(self, answer: Answer) -> float:
        prompt = filled(self._template, self._texts(answer))
        async with self._places:
            try:
                number = await self._judged(prompt)
            except RewardFailed:
                self._failed += 1
                if self._default is None:
                    raise
                return self._default
        reading = self._reading
        return (number - reading.lowest) / (reading.highest - reading.lowest) if self._scale else number

    async def close(self) -> None:
        await self._server.close()

    def _texts(self, answer: Answer) -> dict[str, str]:
        task = answer.task
        return {
            "task": task.name if self._question is None else str(datum(task, self._question)),
            "answer": answer.text,
            "reference": NO_REFERENCE if self._reference is None else str(datum(task, self._reference)),
            "lowest": f"{self._reading.lowest:g}",
            "highest": f"{self._reading.highest:g}",
        }

    async def _judged(self, prompt: str) -> float:
        """The number, after as many tries as it takes; a judge that forgot it is reminded."""
        messages = [{"role": "user", "content": prompt}]
        failure = ""
        for _ in range(self._tries):
            try:
                reply, is_cut = await self._patient_reply(messages)
            except EngineLost as error:
                raise RewardFailed(f"the judge does not answer: {error}") from error
            except EngineRefused as error:
                raise RewardFailed(f"the judge refuses: {error}") from error
            except EngineError as error:
                failure = str(error)
                continue
            number = None if is_cut else self._reading.number(reply)
            if number is not None:
                return number
            self._malformed += 1
            failure = f"its reply {'is cut off' if is_cut else 'has no number'}: {reply[-200:]!r}"
            messages = [
                *messages[:1],
                {"role": "assistant", "content": reply},
                {"role": "user", "content": self._reminder},
            ]
        raise RewardFailed(f"the judge gave no number in {self._tries} tries; {failure}")

    async def _patient_reply(self, messages: list[dict[str, str]]) -> tuple[str, bool]:
        """What the judge says; one that is busy, or not there, is asked again later, for so long.

        Where its own engine has died, a new one is asked, but no third one: the answer may be what ends them.
        """
        asked: HttpCalls | None = None
        servers, began, wait_s = 0, 0.0, FIRST_WAIT_S
        while True:
            calls = await self._server.calls()
            if calls is not asked:
                asked, servers, began, wait_s = calls, servers + 1, time.monotonic(), FIRST_WAIT_S
            try:
                return await self._reply(calls, messages)
            except EngineLost:
                pause_s = wait_s * random.uniform(0.5, 1.0)  # so that not all come back at the same time
                is_late = time.monotonic() + pause_s - began > self._patience_s
                if servers > 1 if await self._server.is_lost() else is_late:
                    raise
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _reply(self, calls: HttpCalls, messages: list[dict[str, str]]) -> tuple[str, bool]:
        """What the judge says, and whether it was cut off: then its last number may be half a number."""
        body = {**self._asked, "messages": messages}
        told = await calls.post("/chat/completions", body, limit_s=self._limit_s, may_repeat=True, about="judge")
        match told:
            case {"choices": [{"message": {"content": str(content)}, **choice}, *_]}:
                return content, choice.get("finish_reason") == "length"
            case {"choices": [{"message": {}}, *_]}:
                return "", True  # a model that thinks may have used up its tokens before it said anything
        raise EngineError(f"{calls.url} does not answer as an OpenAI-compatible endpoint: {str(told)[:200]}")

    @property
    def _reminder(self) -> str:
        return filled(REMINDER, {"lowest": f"{self._reading.lowest:g}", "highest": f"{self._reading.highest:g}"})


def _served(base_url: str | None, api_key_env: str | None, engine: Mapping[str, Any] | None, model: str) -> Served:
    from roost.rollout.rewards.judge_server import OwnServer, ServedByOthers

    if engine is not None:
        return OwnServer(engine, model)
    return ServedByOthers(str(base_url), _api_key(api_key_env))


def _api_key(variable: str | None) -> str | None:
    """Keys are never written into configs, which are kept with the run."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(
            f"the environment variable {variable} has no key for the judge; set it, or leave out api_key_env"
        )
    return key
