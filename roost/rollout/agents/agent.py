"""The protocol of agents: one is made for each episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Task

Message = Mapping[str, Any]  # with `role` and `content`, as OpenAI's


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said when it was its turn."""

    text: str  # without the tokens that end a turn
    token_ids: tuple[int, ...]
    is_cut: bool = False  # it reached its limit before it ended its turn


class Policy(Protocol):
    """The policy as an agent talks to it. Every token it makes is recorded for learning, exactly as it was made."""

    async def chat(self, messages: Sequence[Message], max_tokens: int | None = None) -> Reply:
        """The policy's next turn in a conversation.

        Turns that it made before are known again and go into the prompt as the very tokens that it made; only what is
        new is tokenised. A conversation that does not go on from one of those before begins a new sequence.
        """
        ...


class Agent(Protocol):
    """Plays one episode: `_target_` names its class, which is called with the config's other keys and `task`.

    class Guesser:
        def __init__(self, task, hint=""):
            self._messages = [{"role": "system", "content": f"You guess numbers. {hint}"}]

        async def run_episode(self, policy, environment, first, max_turns):
            seen = first
            for _ in range(max_turns):
                if seen.is_over:
                    break
                self._messages.append({"role": "user", "content": seen.content})
                reply = await policy.chat(self._messages)
                self._messages.append({"role": "assistant", "content": reply.text})
                seen = await environment.step(reply.text)
    """

    async def run_episode(self, policy: Policy, environment: Environment, first: Observation, max_turns: int) -> None:
        """Act until the environment is over, or the turns are used up."""
        ...


class MakesAgent(Protocol):
    """A class of agents."""

    def __call__(self, *, task: Task, **keys: Any) -> Agent: ...
