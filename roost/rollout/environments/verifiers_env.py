"""Environments of the verifiers library, which runs its own rollouts against an endpoint and scores them.

Three parts of an `AgentScenario`: the tasks, the environments, and an agent that only points verifiers to the endpoint
that records the policy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

from roost.procs.user_code import in_daemon_thread
from roost.rollout.agents.agent import Policy
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.recording import Recorder
from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Split, Task

MAX_TASKS = 100_000  # of an endless taskset
NO_KEY = "ROOST_RECORDING_KEY"  # never set: the endpoint's URL is its only secret
INSTALL = "install it where episodes run, in an environment of its own: pip install 'verifiers>=0.4,<0.5'"

logger = logging.getLogger(__name__)


class VerifiersTasks:
    """Rows of a verifiers 0.4 taskset as tasks; the last `evaluation` of them are for evaluation.

    The keys are those of `VerifiersEnvironments`; both read the same taskset, and a task is an index into it.
    """

    def __init__(self, taskset: str | Mapping[str, Any], evaluation: int = 0, **config: Any) -> None:
        self._config = _config(taskset, "", config)
        self._evaluation = evaluation
        self._rows: list[Any] | None = None

    def size(self, split: Split) -> int:
        train = len(self._loaded()) - self._evaluation
        if train < 1:
            raise ValueError(
                f"the taskset has {train + self._evaluation} tasks; evaluation: {self._evaluation} leaves none"
            )
        return self._evaluation if split is Split.EVALUATION else train

    def task(self, split: Split, index: int) -> Task:
        place = index + (self.size(Split.TRAIN) if split is Split.EVALUATION else 0)
        data = self._loaded()[place].data
        return Task(data.name or f"{self._config['taskset']['id']} {place}", {"index": place})

    def _loaded(self) -> list[Any]:
        if self._rows is None:
            self._rows = _rows_of(_loaders().load_taskset(_resolved(self._config).taskset))
        return self._rows


class VerifiersAgent:
    """Lets verifiers run the episode against an endpoint that records the policy's turns."""

    def __init__(self, task: Task, recorder: Recorder, sampling: Mapping[str, Any] | None = None) -> None:
        self._recorder, self._sampling = recorder, dict(sampling or {})

    async def run_episode(self, policy: Policy, environment: Environment, first: Observation, max_turns: int) -> None:
        """Run until the rollout ends. If it fails because all turns are used, its reward is 0."""
        if not isinstance(policy, ChatPolicy):
            raise TypeError(f"this agent needs a policy that records its tokens, not {type(policy).__name__}")
        async with self._recorder.episode(policy, max_turns) as episode:
            endpoint = {"base_url": episode.base_url, "model": self._recorder.model, "sampling": self._sampling}
            try:
                await environment.step(endpoint)
            except Exception as error:
                if not episode.is_used_up:
                    raise
                logger.info("the rollout ended once its turns were used up, with %s: %s", type(error).__name__, error)


class VerifiersEnvironments:
    """An environment of verifiers 0.4: `taskset` is its ID, `env` the ID of a paired environment, if any.

    The other keys are those of verifiers' own config, such as `agent: {harness: {id: "null"}, runtime: {type:
    subprocess}}`. An episode has one step: the action names an OpenAI-compatible endpoint of the policy, by `base_url`
    and `model`; the rollout runs against it, and its reward is the score.
    """

    def __init__(self, taskset: str | Mapping[str, Any], env: str = "", slots: int = 64, **config: Any) -> None:
        self._config = _config(taskset, env, config)
        self._places = asyncio.Semaphore(slots)
        self._starting = asyncio.Lock()
        self._environment: Any = None
        self._rows: list[Any] = []
        self._serving = AsyncExitStack()

    async def open(self) -> VerifiersEnvironment:
        await self._places.acquire()
        return VerifiersEnvironment(self, self._places.release)

    async def close(self) -> None:
        await self._serving.aclose()
        self._environment = None

    async def prompt(self, index: int) -> str:
        """Prompt of a task."""
        await self._ready()
        text: str = self._rows[index].data.prompt_text
        return text

    async def rollout(self, index: int, base_url: str, model: str, sampling: Mapping[str, Any]) -> Any:
        """Run a task against an endpoint and return verifiers' episode with its traces."""
        await self._ready()
        library = _module("verifiers.v1")
        client = library.EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        context = library.ModelContext(model=model, client=client, sampling=library.SamplingConfig(**sampling))
        return await self._environment.run_episode(self._rows[index], context)

    async def _ready(self) -> None:
        """Load the tasks, which may take long, and start the environment that rollouts share."""
        async with self._starting:
            if self._environment is None:
                environment, self._rows = await asyncio.wrap_future(in_daemon_thread("environments", self._loaded))
                await self._serving.enter_async_context(environment.serving())
                self._environment = environment

    def _loaded(self) -> tuple[Any, list[Any]]:
        environment = _loaders().load_environment(_resolved(self._config))
        return environment, _rows_of(environment.taskset)


class VerifiersEnvironment:
    """One rollout."""

    def __init__(self, environments: VerifiersEnvironments, release: Callable[[], None]) -> None:
        self._environments, self._release = environments, release
        self._index: int | None = None
        self._reward = 0.0

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Select the task at `index`; verifiers takes no seed."""
        self._index, self._reward = int(task.data["index"]), 0.0
        return Observation(await self._environments.prompt(self._index))

    async def step(self, action: Any) -> Observation:
        """Run the rollout against the endpoint in the action."""
        if self._index is None:
            raise RuntimeError("the rollout is over, or has not begun; reset before the next")
        if not isinstance(action, Mapping) or "base_url" not in action:
            raise ValueError(f"the action is {action!r}; give base_url, and model, of an endpoint for the policy")
        index, self._index = self._index, None
        model, sampling = action.get("model", "policy"), action.get("sampling", {})
        episode = await self._environments.rollout(index, action["base_url"], model, sampling)
        self._reward = reward_of(episode)
        # The reward is that of the whole rollout, not of the last turn, so the score returns it.
        return Observation(last_reply(episode), is_over=True, info={"metrics": metrics_of(episode)})

    async def score(self) -> float:
        return self._reward

    async def close(self) -> None:
        self._release()


def reward_of(episode: Any) -> float:
    """Return the mean reward of the policy's scored traces. Raise RuntimeError for a failed rollout.

    Traces of agents that are not trained, such as a judge, do not count; a reward of None was not given.
    """
    if not episode.ok:
        errors = [*episode.errors, *(trace.last_error for trace in episode.traces if trace.last_error)]
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it reports no error"
        raise RuntimeError(f"verifiers' rollout failed: {why}")
    own = [trace for trace in episode.traces if trace.agent.trainable]
    scored = [float(trace.reward) for trace in own if any(reward is not None for reward in trace.rewards.values())]
    if not scored:
        raise RuntimeError(f"verifiers scored none of {len(own)} traces of the policy; its task needs a reward")
    return sum(scored) / len(scored)


def metrics_of(episode: Any) -> dict[str, float]:
    """Metrics by name; for several traces, those of the last."""
    found = [item for trace in episode.traces for item in trace.metrics.items()]
    return {name: float(value) for name, value in found if value is not None}


def last_reply(episode: Any) -> str:
    """Last reply of the policy."""
    return str(episode.traces[-1].last_reply) if episode.traces else ""


def _config(taskset: str | Mapping[str, Any], env: str, config: Mapping[str, Any]) -> dict[str, Any]:
    wanted = dict(taskset) if isinstance(taskset, Mapping) else {"id": taskset}
    return {**config, "id": env, "taskset": wanted}


def _rows_of(taskset: Any) -> list[Any]:
    return list(itertools.islice(taskset, MAX_TASKS))


def _resolved(config: Mapping[str, Any]) -> Any:
    return _loaders().resolve_env_config(dict(config))


def _loaders() -> Any:
    return _module("verifiers.v1.utils.loaders")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}; {INSTALL}") from error
