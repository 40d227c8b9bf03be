"""Agents written for AppWorld's interface."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from roost.engines.protocol import ContextFull
from roost.rollout.agents.agent import Policy
from roost.rollout.agents.bridge import BlockingEnvironment, Bridge, RolloutCancelled, in_thread
from roost.rollout.agents.chat import RecordedReply
from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Task


@dataclass(frozen=True)
class AppworldTask:
    """A task with the fields of AppWorld's tasks."""

    id: str
    instruction: str
    supervisor: Any  # with those of first_name, last_name, email and phone_number that the environment has
    datetime: str = ""


def appworld_task(task: Task, first: Observation) -> AppworldTask:
    """Build the task from Roost's task and the info of the first observation.

    >>> task = Task("7_1: call Ann", {"task_id": "7_1", "instruction": "call Ann"})
    >>> shown = appworld_task(task, Observation("", info={"supervisor": {"first_name": "Bo"}}))
    >>> shown.id, shown.instruction, shown.supervisor.first_name
    ('7_1', 'call Ann', 'Bo')
    """
    known = {**task.data, **first.info}
    return AppworldTask(
        str(known.get("task_id", task.name)),
        str(known.get("instruction", task.name)),
        SimpleNamespace(**dict(known.get("supervisor") or {})),
        str(known.get("datetime", "")),
    )


__all__ = [
    "AppworldAdapter",
    "AppworldAgent",
    "AssistantMessage",
    "IPythonMessage",
    "MaxSeqLenExceeded",
    "PolicyMessage",
    "RolloutCancelled",
    "SystemMessage",
    "UserMessage",
]

NO_CODE = "No code was found."  # shown as the output if the agent returns no code


class MaxSeqLenExceeded(Exception):
    """The conversation exceeds the engine's context; the episode ends and is scored as it is."""


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation."""

    role: ClassVar[str]
    content: str


@dataclass(frozen=True)
class SystemMessage(ChatMessage):
    role: ClassVar[str] = "system"
    today_date: str | None = None  # for agents that set it; chat templates do not get it


@dataclass(frozen=True)
class UserMessage(ChatMessage):
    role: ClassVar[str] = "user"


@dataclass(frozen=True)
class IPythonMessage(ChatMessage):
    """Output of code. Templates without this role show it as a user message."""

    role: ClassVar[str] = "ipython"


@dataclass(frozen=True)
class AssistantMessage(ChatMessage):
    role: ClassVar[str] = "assistant"


@dataclass(frozen=True)
class PolicyMessage(AssistantMessage):
    """A turn of the policy, with its tokens."""

    prompt_tokens: tuple[int, ...] = field(default=(), repr=False)
    generated_tokens: tuple[int, ...] = field(default=(), repr=False)
    generated_token_logprobs: tuple[float, ...] = field(default=(), repr=False)
    stopped_by_max_tokens_limit: bool = False
    rollout_cancelled: bool = False

    def __post_init__(self) -> None:
        tokens, logprobs = len(self.generated_tokens), len(self.generated_token_logprobs)
        if tokens != logprobs:
            raise ValueError(f"{tokens} tokens came with {logprobs} log-probabilities")


class LLM(Protocol):
    """The policy as these agents see it."""

    def generate(self, messages: Sequence[ChatMessage]) -> PolicyMessage:
        """Sample the next turn. Raise MaxSeqLenExceeded, or RolloutCancelled when the episode is over."""
        ...


class AppWorldInterface(Protocol):
    """The world as these agents see it."""

    def execute(self, code: str) -> str:
        """Run code and return its output."""
        ...

    def task_completed(self) -> bool:
        """Return True if the episode is over."""
        ...


class AppworldAgent(abc.ABC):
    """Base class. Created for each episode with `task`, `llm` and every key of its YAML as keyword arguments."""

    @abc.abstractmethod
    def next_code_block(self, output: str | None, world: AppWorldInterface) -> str:
        """Return the code to run next, given the last output (None at first); "" if there is none."""

    @abc.abstractmethod
    def history_as_messages(self, last_execution_output: str) -> list[ChatMessage]:
        """Return the whole conversation, ending with this output."""


class AppworldAdapter:
    """Runs an episode with an AppWorld agent, in its own thread."""

    def __init__(self, make: Callable[..., AppworldAgent], keys: Mapping[str, Any], task: Task) -> None:
        self._make, self._keys, self._task = make, dict(keys), task

    async def run_episode(self, policy: Policy, environment: Environment, first: Observation, max_turns: int) -> None:
        bridge = Bridge()
        world = _World(BlockingEnvironment(bridge, environment, first))
        llm = _BlockingPolicy(bridge, policy)
        try:
            task = appworld_task(self._task, first)
            conversation = await in_thread(lambda: self._run(task, llm, world, max_turns), bridge.close)
        except RolloutCancelled as error:
            raise asyncio.CancelledError(str(error)) from error
        llm.keep(conversation)

    def _run(self, task: AppworldTask, llm: LLM, world: AppWorldInterface, max_turns: int) -> Sequence[ChatMessage]:
        """Run the agent and return its conversation."""
        agent = self._make(task=task, llm=llm, **self._keys)
        output: str | None = None
        for _ in range(max_turns):
            if world.task_completed():
                break
            try:
                code = agent.next_code_block(output, world)
            except MaxSeqLenExceeded:
                break
            if not isinstance(code, str):
                raise TypeError(f"{type(agent).__name__}.next_code_block must return a string, not {code!r}")
            output = world.execute(code) if code else NO_CODE
        return agent.history_as_messages(output or "")


class _World:
    def __init__(self, environment: BlockingEnvironment) -> None:
        self._environment = environment

    def execute(self, code: str) -> str:
        return str(self._environment.step(code).content)

    def task_completed(self) -> bool:
        return self._environment.seen.is_over


class _BlockingPolicy:
    def __init__(self, bridge: Bridge, policy: Policy) -> None:
        self._bridge, self._policy = bridge, policy
        self._sent: list[tuple[PolicyMessage, RecordedReply]] = []

    def keep(self, conversation: Sequence[ChatMessage]) -> None:
        """Learn only from replies that are in the conversation: an agent may sample several and drop some.

        If none is in it, the agent wrote its own messages, and all replies are kept.
        """
        is_kept = [any(message == each for each in conversation) for message, _ in self._sent]
        for (_, reply), stays in zip(self._sent, is_kept, strict=True):
            if any(is_kept) and not stays:
                reply.leave_out()

    def generate(self, messages: Sequence[ChatMessage]) -> PolicyMessage:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            reply = self._bridge.wait(lambda: self._policy.chat(chat))
        except ContextFull as error:
            if not self._sent:
                raise  # there is nothing to learn from
            raise MaxSeqLenExceeded(str(error)) from error
        if not isinstance(reply, RecordedReply):
            raise TypeError(f"this agent needs a policy that records its tokens, not {type(self._policy).__name__}")
        message = PolicyMessage(
            content=reply.text,
            prompt_tokens=reply.prompt_ids,
            generated_tokens=reply.token_ids,
            generated_token_logprobs=reply.logprobs,
            stopped_by_max_tokens_limit=reply.is_cut,
        )
        self._sent.append((message, reply))
        return message
