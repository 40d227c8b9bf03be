"""The workload: episodes of a few turns, each followed by a slow environment step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from roost.rollout.environments.environment import Environment, Environments, Observation
from roost.rollout.episode import EpisodeReward, Split, Task, Transcript

VOCABULARY = 256  # of prompts and observations: the tokenizer's bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """An episode, with the same turns and tokens in all ways."""

    turns: int = 4
    tokens: int = 16  # generated in a turn
    prompt: int = 32
    observation: int = 8  # tokens of a step's observation
    wait: float = 0.05  # seconds of a step

    @property
    def generated(self) -> int:
        """Tokens generated in an episode."""
        return self.turns * self.tokens


def shown(workload: Workload, episode: int, step: int) -> list[int]:
    """Tokens of the prompt (step 0) and of each observation; every episode starts differently."""
    chance = Random(f"{episode} {step}")
    return [chance.randrange(VOCABULARY) for _ in range(workload.observation if step else workload.prompt)]


class Waiting:
    """An environment whose steps only take time, like those that wait for a browser or a test run."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._episode, self._steps = 0, 0

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        self._episode, self._steps = task.data["episode"], 0
        return Observation(shown(self._workload, self._episode, 0))

    async def step(self, action: Any) -> Observation:
        await asyncio.sleep(self._workload.wait)
        self._steps += 1
        seen = shown(self._workload, self._episode, self._steps)
        return Observation(seen, 1.0, is_over=self._steps == self._workload.turns)

    async def score(self) -> float:
        return float(self._steps)

    async def close(self) -> None:
        pass


class WaitingEnvironments:
    """Opens any number of environments."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    async def open(self) -> Environment:
        return Waiting(self._workload)

    async def close(self) -> None:
        pass


class Talk:
    """The workload as a scenario of Roost; workers construct it by `_target_`."""

    def __init__(self, tokenizer: Any = None, **workload: Any) -> None:
        self._environments: Environments = WaitingEnvironments(Workload(**workload))

    def size(self, split: Split) -> int:
        return 1_000_000

    def task(self, split: Split, index: int) -> Task:
        return Task(f"episode {index}", {"episode": index})

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        environment = await self._environments.open()
        try:
            seen = await environment.reset(task)
            rewards: list[float] = []
            while not seen.is_over:
                transcript.give(seen.content)
                seen = await environment.step(await transcript.take())
                rewards.append(seen.reward)
            return EpisodeReward(await environment.score(), of_turns=tuple(rewards))
        finally:
            await environment.close()


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """A model that never ends a turn early, so that every turn has the maximum number of tokens."""
    from transformers.utils import logging

    from roost.engines.tiny_model import write_tiny_model

    logging.disable_progress_bar()
    return write_tiny_model(
        folder,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        eos_token_id=None,
    )


def check(workload: Workload, generated: Sequence[int]) -> None:
    """Check that all ways did the same work; otherwise the comparison is invalid."""
    short = [each for each in generated if each != workload.generated]
    if short:
        raise RuntimeError(
            f"{len(short)} of {len(generated)} episodes generated {short[0]} tokens, not {workload.generated}"
        )
