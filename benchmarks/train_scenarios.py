"""Scenarios of the training benchmarks; named by `_target_` in the configs that `train_roost` writes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

from train_workload import Workload, prompt, reward

from roost.rollout.arithmetic import Arithmetic
from roost.rollout.episode import EpisodeReward, Split, Task, Transcript
from roost.rollout.rewards.reward import Answer


class Liking:
    """The workload that Roost and the peer train on."""

    single_turn = True

    def __init__(self, tokenizer: Any, **workload: Any) -> None:
        self._workload = Workload(**workload)
        self._tokenizer = tokenizer

    def size(self, split: Split) -> int:
        return self._workload.steps * self._workload.prompts

    def task(self, split: Split, index: int) -> Task:
        return Task(prompt(self._workload, index))

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        transcript.give(self._tokenizer(task.name, add_special_tokens=False).input_ids)
        completion = await transcript.take()
        return EpisodeReward(reward(completion), f"{len(completion)} tokens")


class LikedDigits:
    """A reward for prompts from a data file. It reads text, which the liked tokens lack, so it rewards digits."""

    async def score(self, answer: Answer) -> float:
        return sum(character.isdecimal() for character in answer.text) / max(1, len(answer.text))

    async def close(self) -> None:
        pass


class PenalisedArithmetic(Arithmetic):
    """Sums with a penalty for wrong characters: rewards of -1 to 0."""

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        score = await super().run_episode(task, transcript)
        return replace(score, reward=score.reward - 1)


class SlowArithmetic(Arithmetic):
    """Sums with long-tailed delays: most answers come soon, some much later, as with environments and tools."""

    def __init__(self, tokenizer: Any, largest: int, wait: float, spread: float, longest: float, seed: int = 0) -> None:
        super().__init__(tokenizer, largest)
        self._wait, self._spread, self._longest = wait, spread, longest
        self._chance = Random(seed)

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        score = await super().run_episode(task, transcript)
        await asyncio.sleep(min(self._longest, self._wait * self._chance.lognormvariate(0.0, self._spread)))
        return score
