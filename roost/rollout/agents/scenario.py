"""Scenario that runs tasks with agents in environments."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

from roost.config.findings import Findings, Where
from roost.engines.protocol import ContextFull
from roost.rollout.agents.agent import Agent
from roost.rollout.agents.appworld_agent import AppworldAdapter
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.chat_format import ChatFormat
from roost.rollout.agents.engine_parsers import parser_of
from roost.rollout.agents.recording import Recorder
from roost.rollout.check_target import AGENT, ENVIRONMENT, TASKS, Part, located, own_keys
from roost.rollout.environments.environment import Environment, Environments, Observation, make_environments
from roost.rollout.episode import EpisodeReward, Split, Task, Transcript
from roost.rollout.order import Order, order_of

SHOWN_CHARACTERS = 400  # characters of an action or an observation
SHOWN_STEPS = 20  # half of them the first, half the last


class WatchedEnvironment:
    """Environment wrapper that records steps and rewards."""

    def __init__(self, environment: Environment, transcript: Transcript) -> None:
        self._environment, self._transcript = environment, transcript
        self._steps: list[tuple[Any, Observation]] = []
        self._rewards: list[tuple[int, float]] = []  # (turns so far, reward)
        self._seen: Any = None  # content of the last observation
        self._states: dict[int, str] = {}  # by turn
        self.metrics: Mapping[str, float] = {}  # of the episode so far, if the environment reports them
        self.answer: str | None = None  # the text that rewards score, if the environment gives it

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        first = await self._environment.reset(task, seed)
        self._seen, self.metrics = first.content, first.info.get("metrics", {})
        return first

    async def step(self, action: Any) -> Observation:
        turns = self._transcript.turns
        self._states.setdefault(max(turns, 1) - 1, hashlib.sha1(str(self._seen).encode()).hexdigest())
        seen = await self._environment.step(action)
        self._seen = seen.content
        self._steps.append((action, seen))
        self.metrics = seen.info.get("metrics", self.metrics)
        self.answer = self.answer if seen.answer is None else seen.answer
        self._rewards.append((turns, float(seen.reward)))
        return seen

    async def score(self) -> float:
        return await self._environment.score()

    async def close(self) -> None:
        await self._environment.close()

    @property
    def rewards_of_turns(self) -> tuple[float, ...]:
        """Reward of each turn; empty if the environment gives no step rewards."""
        if not any(reward for _, reward in self._rewards):
            return ()
        turn_rewards = [0.0] * self._transcript.turns
        for turns, reward in self._rewards:
            turn_rewards[max(turns, 1) - 1] += reward
        return tuple(turn_rewards)

    @property
    def states_of_turns(self) -> tuple[str, ...]:
        """ID of the observation before each turn; empty if a turn took no step."""
        turns = range(self._transcript.turns)
        return tuple(self._states[turn] for turn in turns) if all(turn in self._states for turn in turns) else ()

    def steps_text(self) -> str:
        """The steps as readable text."""
        steps = [f"> {_short(action)}\n{_short(seen.content)}" for action, seen in self._steps]
        left_out = len(steps) - SHOWN_STEPS
        if left_out > 0:
            half = SHOWN_STEPS // 2
            steps = [*steps[:half], f"[{left_out} steps are not shown]", *steps[-half:]]
        return "\n".join(steps)


def _short(value: Any) -> str:
    """
    >>> _short("x" * 1000) == "x" * 400 + "…"
    True
    """
    text = str(value).strip()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


RECORDER = "recorder"


def make_agent(config: Mapping[str, Any], task: Task, recorder: Recorder) -> Agent:
    """Create the agent of an episode: its class is called with the config's other keys and `task`.

    It also gets `recorder` if it takes one; AppWorld agents get `llm` when the episode starts.
    """
    make = located(config["_target_"])
    keys = own_keys(config)
    if is_appworld_agent(make):
        return AppworldAdapter(make, keys, task)
    given = {RECORDER: recorder} if RECORDER in parameters_of(make) else {}
    agent: Agent = make(task=task, **given, **keys)
    return agent


def is_appworld_agent(make: Any) -> bool:
    return callable(getattr(make, "next_code_block", None)) and not is_agent(make)


def is_agent(make: Any) -> bool:
    return callable(getattr(make, "run_episode", None))


def parameters_of(make: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(make).parameters


CLOSE_LIMIT_S = 5.0  # a cancelled episode has 10 s in all to clean up

logger = logging.getLogger(__name__)


class TaskSource(Protocol):
    """A source of tasks."""

    def size(self, split: Split) -> int: ...

    def task(self, split: Split, index: int) -> Task: ...


class AgentScenario:
    """Runs tasks with agents in environments.

    `tasks` names a source of tasks by `_target_`, `environment` a class of `Environments`, `agent` a class of agents:
    a new agent runs each episode, for at most `max_turns`, and until a sequence has `max_sequence_length` tokens, or
    `max_response_length` after its first prompt. `chat_template` replaces the tokenizer's; `template` holds arguments
    for it; see `ChatFormat` for `keeps_reasoning`. `tool_parser` and `reasoning_parser` name parsers of vLLM or SGLang.

    Rewards score the policy's last turn, or the `answer` of the agent or of an observation, if there is one.
    """

    config_parts: ClassVar[Mapping[tuple[str, ...], Part]] = {
        ("agent",): AGENT,
        ("tasks",): TASKS,
        ("environment",): ENVIRONMENT,
    }

    def __init__(
        self,
        tokenizer: Any,
        tasks: Any,
        agent: Mapping[str, Any],
        environment: Any,
        max_turns: int = 40,
        keeps_reasoning: bool = False,
        template: Mapping[str, Any] | None = None,
        max_sequence_length: int | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_response_length: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; an episode has at least 1")
        self._tasks: TaskSource = _built(tasks)
        self._agent, self._environment, self._max_turns = dict(agent), environment, max_turns
        parser = parser_of(tokenizer, tool_parser, reasoning_parser)
        self._format = ChatFormat(tokenizer, keeps_reasoning, template, parser, chat_template)
        self._max_length, self._max_response = max_sequence_length, max_response_length
        self._environments: Environments | None = None
        self._recorder = Recorder()

    def size(self, split: Split) -> int:
        return self._tasks.size(split)

    def task(self, split: Split, index: int) -> Task:
        return self._tasks.task(split, index)

    def order(self, split: Split, seed: int) -> Order:
        return order_of(self._tasks, split, seed)

    def open_data(self, where: Where, findings: Findings) -> None:
        """Open the data of the tasks, if they have any, and report errors in them."""
        environment = self._environment
        if hasattr(self._tasks, "show_tools") and isinstance(environment, Mapping):
            make = located(environment["_target_"])
            self._tasks.show_tools(make.offered(environment) if hasattr(make, "offered") else ())
        if hasattr(self._tasks, "open_data"):
            self._tasks.open_data(where, findings)

    def first_tasks(self) -> Iterable[tuple[str, Task]]:
        """Tasks of the first rows of the data with their places; none if the tasks do not come from data."""
        found: Iterable[tuple[str, Task]] = self._tasks.first_tasks() if hasattr(self._tasks, "first_tasks") else ()
        return found

    @property
    def eval_sets(self) -> dict[str, range]:
        """Evaluation tasks of each named set of the data."""
        found: dict[str, range] = getattr(self._tasks, "eval_sets", {})
        return found

    def use_environments(self, environments: Environments) -> None:
        """Use these environments instead of creating them here. Call it before the first episode."""
        if self._environments is not None:
            raise RuntimeError("episodes have run already; call use_environments before the first")
        self._environments = environments

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        """Run an episode, from opening its environment to closing it."""
        if self._environments is None:
            self._environments = make_environments(self._environment)
        environment = await self._environments.open()
        try:
            return await self._run_agent(task, transcript, WatchedEnvironment(environment, transcript))
        finally:
            await _closed(environment)

    async def close(self) -> None:
        """Close the endpoint and the environments, which episodes share."""
        try:
            await self._recorder.close()
        finally:
            if self._environments is not None:
                await self._environments.close()

    async def _run_agent(self, task: Task, transcript: Transcript, environment: WatchedEnvironment) -> EpisodeReward:
        transcript.max_length, transcript.max_response = self._max_length, self._max_response
        first = await environment.reset(task, seed_of(task))
        agent, policy = make_agent(self._agent, task, self._recorder), ChatPolicy(transcript, self._format)
        running: Any = agent.run_episode(policy, environment, first, self._max_turns)
        if not inspect.isawaitable(running):
            name = f"{type(agent).__name__}.run_episode"
            raise TypeError(f"{name} is not asynchronous; write async def, or next_code_block")
        try:
            await running
        except ContextFull:
            if not any(len(each.completion_versions) for each in transcript.sequences()):
                raise  # the task itself is too long for the engines
        if transcript.turns == 0:
            raise RuntimeError(f"the policy had no turn in task {task.name!r}; there is nothing to learn from")
        answer = getattr(agent, "answer", None)
        if not isinstance(answer, str):
            answer = environment.answer
        if answer is None and policy.last_reply is not None:
            answer = policy.last_reply.text
        return EpisodeReward(
            await environment.score(),
            environment.steps_text() or answer or "",
            environment.rewards_of_turns,
            answer=answer,
            parts=environment.metrics,
            turn_states=environment.states_of_turns,
        )


def seed_of(task: Task) -> int:
    """Seed for the environment's reset: episodes of a group start alike, because they are compared.

    >>> seed_of(Task("a", {"seed": 7})), seed_of(Task("a")) == seed_of(Task("a")) != seed_of(Task("b"))
    (7, True)
    """
    seed = task.data.get("seed")
    return seed if isinstance(seed, int) else zlib.crc32(task.name.encode())


async def _closed(environment: Environment) -> None:
    """Close an environment, with a time limit even under cancellation; failing to close does not fail the episode."""
    loop = asyncio.get_running_loop()
    closing, until = asyncio.ensure_future(environment.close()), loop.time() + CLOSE_LIMIT_S
    closing.add_done_callback(_note)
    cancelled: asyncio.CancelledError | None = None
    while not closing.done() and loop.time() < until:
        try:
            await asyncio.wait([closing], timeout=until - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    closing.cancel()
    if cancelled is not None:
        raise cancelled


def _note(closing: asyncio.Future[None]) -> None:
    if closing.cancelled():
        logger.warning("an environment did not close within %g s", CLOSE_LIMIT_S)
    elif closing.exception() is not None:
        logger.warning("an environment did not close: %s", closing.exception())


def _built(named: Any) -> Any:
    """Instantiate a mapping with `_target_`; return any other value unchanged."""
    if not isinstance(named, Mapping):
        return named
    from hydra.utils import instantiate

    return instantiate(dict(named), _convert_="all")
