"""The scenario runner of ml-loop's configs: app worlds, played by the agent that a config group chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from roost.config.errors import Findings, Where
from roost.rollout.agents.scenario import AgentScenario
from roost.rollout.check_target import Call, Kind, Part, check_call
from roost.rollout.parts import AGENT, ENVIRONMENT, TASKS

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
        """Find keys of `appworld_config` that are missing or unknown."""
        keys, place = config.get(CONFIG), where.under(CONFIG)
        if not isinstance(keys, Mapping):
            return
        if keys.get("agent") is None:
            findings.error(place, "has no agent", "an episode is played by one", MOUNT)
        check_call(Call("runner", CONFIG, place), _keys, Kind(()), {"agent": None, **keys}, place, findings)


def _keys(
    agent: Mapping[str, Any],
    max_interactions: int = 40,
    keeps_reasoning: bool = False,
    template: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """ml-loop's words for what `AgentScenario` takes."""
    return {"agent": agent, "max_turns": max_interactions, "keeps_reasoning": keeps_reasoning, "template": template}
