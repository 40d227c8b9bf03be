"""Agents written for OpenAI's client: a function of the user's, which need not import Roost, runs the episode."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from roost.config.findings import Findings, Where, shown
from roost.rollout.agents.agent import Policy
from roost.rollout.agents.bridge import BlockingEnvironment, Bridge, StartedEnvironment, in_thread
from roost.rollout.agents.chat import ChatPolicy
from roost.rollout.agents.recording import RecordedEpisode, Recorder
from roost.rollout.check_target import Call, Interface, check_call, find_callable, located
from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Task

PROGRAM = Interface((), given=("base_url", "api_key", "model", "task", "environment"))

logger = logging.getLogger(__name__)


class OpenAIAgent:
    """Calls `run(base_url, api_key, model, task, environment, **arguments)`, which may be asynchronous.

    The environment has `first`, the first observation, and `step(action)`, which blocks if the function does.

    def run(base_url, api_key, model, task, environment):
        client = OpenAI(base_url=base_url, api_key=api_key)
        messages, seen = [], environment.first
        while not seen.is_over:
            messages.append({"role": "user", "content": seen.content})
            said = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
            messages.append({"role": "assistant", "content": said})
            seen = environment.step(said)
    """

    def __init__(self, task: Task, recorder: Recorder, run: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._task, self._recorder, self._arguments = task, recorder, dict(arguments or {})
        self._function = located(run)

    @staticmethod
    def check_config(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
        """Report a missing function, and arguments that it does not take or lacks."""
        written, arguments = config.get("run"), config.get("arguments") or {}
        if "run" not in config:
            return
        place = where.under("run")
        if not isinstance(written, str) or not written:
            findings.error(
                "RST-A012", place, "names no function", f"it is {shown(written)}", "write run: my_module.my_function"
            )
            return
        run = find_callable(written, place, "a function", findings)
        if run is None:
            return
        if not isinstance(arguments, Mapping):
            fix = "write them as name: value"
            findings.error(
                "RST-A013", where.under("arguments"), "is not a mapping of arguments", f"it is {shown(arguments)}", fix
            )
            return
        check_call(Call("program", written, place), run, PROGRAM, arguments, where.under("arguments"), findings)

    async def run_episode(self, policy: Policy, environment: Environment, first: Observation, max_turns: int) -> None:
        """Run until the function returns, or raises because its turns are used up."""
        if not isinstance(policy, ChatPolicy):
            raise TypeError(f"this agent needs a policy that records its tokens, not {type(policy).__name__}")
        async with self._recorder.episode(policy, max_turns) as episode:
            try:
                await self._run_program(episode, environment, first)
            except Exception as error:
                if not episode.is_used_up:
                    raise
                logger.info("the program ended once its turns were used up, with %s: %s", type(error).__name__, error)

    async def _run_program(self, episode: RecordedEpisode, environment: Environment, first: Observation) -> None:
        keys = {
            "base_url": episode.base_url,
            "api_key": episode.api_key,
            "model": self._recorder.model,
            "task": self._task,
            **self._arguments,
        }
        if inspect.iscoroutinefunction(self._function):
            await self._function(environment=StartedEnvironment(environment, first), **keys)
            return
        bridge = Bridge()
        blocking = BlockingEnvironment(bridge, environment, first)

        def release() -> None:
            episode.close()
            bridge.close()

        returned: Any = await in_thread(lambda: self._function(environment=blocking, **keys), release)
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError(
                "the program returned a coroutine, but is not async; declare it with async def, and await there"
            )
