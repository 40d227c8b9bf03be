"""Protocols of agents and of the policy they call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roost.rollout.environments.environment import Environment, Observation

Message = Mapping[str, Any]  # with `role` and `content`, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the policy."""

    text: str  # without end-of-turn tokens
    token_ids: tuple[int, ...]
    is_cut: bool = False  # the token limit ended the turn


class Policy(Protocol):
    """The policy as seen by an agent. Every generated token is recorded exactly, for learning."""

    async def chat(self, messages: Sequence[Message], max_tokens: int | None = None) -> Reply:
        """Sample the policy's next turn in a conversation.

        Earlier turns of the policy are recognized and enter the prompt as the tokens that were generated; only new
        messages are tokenized. A conversation that continues no earlier one starts a new sequence.
        """
        ...


class Agent(Protocol):
    """Runs one episode: `_target_` names its class, which is called with the config's other keys and `task`.

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
        """Act until the environment is over or `max_turns` are used."""
        ...
