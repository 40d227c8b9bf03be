"""The scenario runner of ml-loop's configs: app worlds, played by the agent that a config group chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from roost.rollout.agents.scenario import AgentScenario

SERVING = "roost.rollout.app_world.serving"
TASKS = {"_target_": f"{SERVING}.tasks.AppWorldTasks"}
ENVIRONMENT = {"_target_": f"{SERVING}.client.AppWorldEnvironments"}
MAX_INTERACTIONS = 40


class AppWorldScenarioRunner(AgentScenario):
    """Agents in app worlds: `appworld_config` has the agent, `max_interactions`, and other keys of `AgentScenario`."""

    agent_path: ClassVar[tuple[str, ...]] = ("appworld_config", "agent")

    def __init__(
        self,
        tokenizer: Any,
        appworld_config: Mapping[str, Any],
        tasks: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        keys = dict(appworld_config)
        if not isinstance(keys.get("agent"), Mapping):
            raise ValueError(
                "appworld_config has no agent; mount one: appworld@rl.scenario_runner.appworld_config: default"
            )
        super().__init__(
            tokenizer,
            tasks or TASKS,
            keys.pop("agent"),
            environment or ENVIRONMENT,
            keys.pop("max_interactions", MAX_INTERACTIONS),
            **keys,
        )
