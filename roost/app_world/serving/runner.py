"""Agents without a policy (oracle and random), and a scenario for ml-loop's config."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from roost.app_world.signature import Api, Parameter
from roost.app_world.tasks.task_set import make_task
from roost.app_world.world import APPS
from roost.config.findings import Findings, Where
from roost.rollout.agents.agent import Policy
from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.check_target import AGENT, ENVIRONMENT, TASKS, Call, Interface, Part, check_call
from roost.rollout.environments.environment import Environment, Observation
from roost.rollout.episode import Task

NO_WORK = ("api_docs", "supervisor")  # apps whose calls change nothing
QUOTED = re.compile(r'"([^"]+)"|(/[\w/.-]*\w)')  # quoted texts and paths in an instruction


class OracleAgent:
    """Runs the known solution of its task, statement by statement."""

    def __init__(self, task: Task) -> None:
        self._solution = make_task(str(task.data["task_id"])).solution

    async def run_episode(
        self, policy: Policy | None, environment: Environment, first: Observation, max_turns: int
    ) -> None:
        for block in blocks_of(self._solution, max_turns):
            if (await environment.step(block)).is_over:
                return


class RandomAgent:
    """Makes random calls with arguments of the right type, then completes the task."""

    def __init__(self, task: Task, seed: int = 0, calls: int = 3) -> None:
        self._random = Random(f"{task.data['task_id']} {seed}")
        found = QUOTED.finditer(str(task.data["instruction"]))
        self._words = [match[1] or match[2] for match in found]
        self._calls = calls

    async def run_episode(
        self, policy: Policy | None, environment: Environment, first: Observation, max_turns: int
    ) -> None:
        for _ in range(min(self._calls, max_turns - 1)):
            await environment.step(self._call())
        answer = self._random.choice(["", "answer=0", f"answer={self._text()!r}"])
        await environment.step(f"apis.supervisor.complete_task({answer})")

    def _call(self) -> str:
        app = self._random.choice([name for name in APPS if name not in NO_WORK])
        api = self._random.choice(list(APPS[app].apis.values()))
        return f"print(apis.{app}.{api.name}({self._arguments(api)}))"

    def _arguments(self, api: Api) -> str:
        given = [each for each in api.parameters if each.is_required or self._random.random() < 0.3]
        return ", ".join(f"{each.name}={self._argument(each)!r}" for each in given)

    def _argument(self, parameter: Parameter) -> object:
        kind = parameter.type_name.removesuffix(" or null")
        if kind == "integer":
            return self._random.randrange(1000)
        if kind == "boolean":
            return self._random.random() < 0.5
        return [self._text()] if kind == "list of strings" else self._text()

    def _text(self) -> str:
        return self._random.choice([*self._words, "milk", "home", "2026-03-02"])


def blocks_of(code: str, most: int) -> Sequence[str]:
    """The statements of code, one per block; the last block has all that remain.

    >>> blocks_of("a = 1\\nfor b in range(a):\\n    print(b)\\nprint(a)", most=2)
    ['a = 1', 'for b in range(a):\\n    print(b)\\nprint(a)']
    """
    statements = [ast.get_source_segment(code, statement) or "" for statement in ast.parse(code).body]
    return [*statements[: most - 1], *(["\n".join(statements[most - 1 :])] if len(statements) >= most else [])]


SERVING = "roost.app_world.serving"
OWN_TASKS = {"_target_": f"{SERVING}.tasks.AppWorldTasks"}
OWN_ENVIRONMENT = {"_target_": f"{SERVING}.client.AppWorldEnvironments"}
CONFIG = "appworld_config"
MOUNT = "mount one: appworld@rl.scenario_runner.appworld_config: default"


class AppWorldScenarioRunner(AgentScenario):
    """Agents in app worlds: `appworld_config` has the agent, `max_interactions`, and other keys of `AgentScenario`."""

    config_parts: ClassVar[Mapping[tuple[str, ...], Part]] = {
        (CONFIG, "agent"): AGENT,
        ("tasks",): TASKS,
        ("environment",): ENVIRONMENT,
    }

    def __init__(
        self,
        tokenizer: Any,
        appworld_config: Mapping[str, Any],
        tasks: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(appworld_config.get("agent"), Mapping):
            raise ValueError(f"appworld_config has no agent; {MOUNT}")
        keys = _keys(**appworld_config)
        super().__init__(tokenizer, tasks or OWN_TASKS, environment=environment or OWN_ENVIRONMENT, **keys)

    @staticmethod
    def check_config(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
        """Report missing and unknown keys of `appworld_config`."""
        keys, place = config.get(CONFIG), where.under(CONFIG)
        if not isinstance(keys, Mapping):
            return
        if keys.get("agent") is None:
            findings.error("RST-A014", place, "has no agent", "an agent runs the episodes", MOUNT)
        check_call(Call("runner", CONFIG, place), _keys, Interface(()), {"agent": None, **keys}, place, findings)


def _keys(
    agent: Mapping[str, Any],
    max_interactions: int = 40,
    keeps_reasoning: bool = False,
    template: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Translate ml-loop's keys to those of `AgentScenario`."""
    return {"agent": agent, "max_turns": max_interactions, "keeps_reasoning": keeps_reasoning, "template": template}
