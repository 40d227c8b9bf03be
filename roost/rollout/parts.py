"""The parts of a scenario that configs name by `_target_`, and what each must be."""

from __future__ import annotations

from roost.rollout.check_target import Kind, Part

SCENARIO = Part(
    "scenario",
    (Kind(("size", "task", "play"), given=("tokenizer",)),),
    "roost.rollout.arithmetic.Arithmetic",
    "roost.rollout.scenario.Scenario",
)
TASKS = Part(
    "source of tasks",
    (Kind(("size", "task")),),
    "roost.app_world.serving.tasks.AppWorldTasks",
    "roost.rollout.agents.scenario.TaskSource",
)
ENVIRONMENT = Part(
    "class of environments",
    (Kind(("open", "close"), perhaps=("hardware",)),),
    "roost.app_world.serving.client.AppWorldEnvironments",
    "roost.rollout.environments.environment.Environments",
)
AGENT = Part(
    "agent",
    (
        Kind(("play",), given=("task",), offered=("recorder",)),
        Kind(("next_code_block",), given=("task", "llm")),
    ),
    "roost.rollout.agents.react.ReactCoder",
    "roost.rollout.agents.agent.Agent, and roost.rollout.agents.appworld_agent.AppworldAgent",
)
