"""Agent that fills templates with an environment's observations, as ROLL's environment managers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roost.rollout.agents.agent import Message, Policy
from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Task

INVALID = " (this action is not valid; follow the format that the instructions ask for)"


class History(StrEnum):
    """How earlier turns are shown to the policy."""

    TRAJECTORY = "trajectory"  # one conversation: an episode is one sequence
    STEP = "step"  # a new prompt in each turn, with the last turns as text: a turn is one sequence
    STEP_CONCAT = "step_concat"  # the same, with the observations of the last turns only


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, with the observation before it."""

    observation: str
    action: str
    reward: float
    is_valid: bool


class TemplatedAgent:
    """Answers each observation with one turn of the policy.

    `tags` maps the tag of a task to the arguments of `Templates`.
    """

    def __init__(self, task: Task, tags: Mapping[str, Mapping[str, Any]]) -> None:
        if task.tag not in tags:
            raise ValueError(f"there are no templates for the tag {task.tag!r}; there are {', '.join(tags)}")
        self._templates = Templates(**tags[task.tag])

    async def run_episode(self, policy: Policy, environment: Environment, first: Observation, max_turns: int) -> None:
        templates, seen = self._templates, first
        instruction = str(first.info.get("env_instruction", ""))
        conversation: list[Message] = []
        turns: list[Turn] = []
        for _ in range(min(max_turns, templates.max_steps)):
            shown = templates.messages(instruction, turns, seen)
            conversation = [*conversation, *shown] if templates.history is History.TRAJECTORY else list(shown)
            reply = await policy.chat(conversation, templates.max_tokens_per_step)
            conversation.append({"role": "assistant", "content": reply.text})
            before, seen = seen, await environment.step(reply.text)
            action, is_valid = str(seen.info.get("action", reply.text)), bool(seen.info.get("is_valid", True))
            turns.append(Turn(str(before.content), action, seen.reward, is_valid))
            if seen.is_over:
                break


class Templates:
    """Prompts of one kind of task.

    `agent_template` is a format string. In trajectories its fields are turn_idx, observation, suffix, actions_left and
    max_response_length, and the environment's instruction precedes the first turn. Otherwise they are env_instruction,
    history, step_count, history_length, current_step, current_observation and max_response_length; of the last
    `history_length` turns, this one included, the earlier ones are in the history.
    """

    def __init__(
        self,
        agent_template: str,
        agent_system_template: str | None = None,
        history: str = History.TRAJECTORY,
        history_length: int = 1,
        max_steps: int = 10,
        max_tokens_per_step: int | None = None,
    ) -> None:
        self._template, self._system = agent_template, agent_system_template
        self.history, self._history_length = History(history), history_length
        self.max_steps, self.max_tokens_per_step = max_steps, max_tokens_per_step

    def messages(self, instruction: str, turns: Sequence[Turn], seen: Observation) -> list[Message]:
        """Messages for the next turn: the new ones of a trajectory, or a whole prompt."""
        if self.history is History.TRAJECTORY:
            text = (f"{instruction}\n" if instruction and not turns else "") + self._next(turns, seen)
        else:
            text = self._whole(instruction, turns, seen)
        opens = self._system is not None and (self.history is not History.TRAJECTORY or not turns)
        system: list[Message] = [{"role": "system", "content": self._system}] if opens else []
        return [*system, {"role": "user", "content": text}]

    def _next(self, turns: Sequence[Turn], seen: Observation) -> str:
        return self._template.format(
            turn_idx=len(turns) + 1,
            observation=seen.content,
            suffix=seen.info.get("suffix", ""),
            actions_left=self.max_steps - len(turns),
            max_response_length=self.max_tokens_per_step,
        )

    def _whole(self, instruction: str, turns: Sequence[Turn], seen: Observation) -> str:
        before = len(turns) - (self._history_length - 1)
        kept = [(number, turn) for number, turn in enumerate(turns, 1) if number > before]
        if self.history is History.STEP_CONCAT:
            history = "\n".join(turn.observation for _, turn in kept)
        else:
            history = ", ".join(_written(number, turn) for number, turn in kept)
        return self._template.format(
            env_instruction=instruction,
            history=history,
            step_count=len(turns),
            history_length=len(kept),
            current_step=len(turns) + 1,
            current_observation=seen.content,
            max_response_length=self.max_tokens_per_step,
        )


def _written(number: int, turn: Turn) -> str:
    action = turn.action if turn.is_valid else turn.action + INVALID
    return f"(step: {number}, observation: {turn.observation}, action: {action}, reward: {turn.reward:g})"
