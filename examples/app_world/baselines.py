"""Baselines of the app world: tasks solved by an agent that runs the solutions, and by one that calls APIs at random.

Both act through a server and its sandboxes, like a policy. No model is needed.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from roost.app_world.serving.client import AppWorldEnvironments
from roost.app_world.serving.runner import OracleAgent, RandomAgent
from roost.app_world.serving.tasks import AppWorldTasks
from roost.rollout.episode import Split, Task

AGENTS: dict[str, Callable[..., Any]] = {"oracle": OracleAgent, "random": RandomAgent}


def main(tasks: int = 60, seed: int = 0, at_a_time: int = 8, max_turns: int = 40) -> None:
    """Run both agents on this many tasks of each difficulty."""
    asyncio.run(compare(tasks, seed, at_a_time, max_turns))


async def compare(count: int, seed: int, at_a_time: int, max_turns: int) -> None:
    console = Console()
    table = Table("difficulty", "agent", "tasks solved", "scenarios solved")
    environments = AppWorldEnvironments(worlds=at_a_time)
    try:
        with Progress(console=console, transient=True) as progress:
            for difficulty in (1, 2, 3):
                source = AppWorldTasks(difficulty, count=count, seed=seed)
                tasks = [source.task(Split.TRAIN, index) for index in range(count)]
                for name, agent in AGENTS.items():
                    bar = progress.add_task(f"difficulty {difficulty}, {name}", total=count)
                    solved = await solved_by(
                        environments, tasks, agent, max_turns, lambda bar=bar: progress.advance(bar)
                    )
                    scenarios = by_scenario(tasks, solved)
                    table.add_row(str(difficulty), name, f"{sum(solved)}/{count}", f"{sum(scenarios)}/{len(scenarios)}")
    finally:
        await environments.close()
    console.print(table)


async def solved_by(
    environments: AppWorldEnvironments,
    tasks: Sequence[Task],
    agent: Callable[..., Any],
    max_turns: int,
    on_done: Callable[[], None],
) -> list[bool]:
    """For each task, whether the agent solved it; tasks wait until a world is free."""

    async def solves(task: Task) -> bool:
        environment = await environments.open()
        try:
            first = await environment.reset(task)
            await agent(task=task).run_episode(None, environment, first, max_turns)
            return await environment.score() == 1.0
        finally:
            await environment.close()
            on_done()

    return await asyncio.gather(*map(solves, tasks))


def by_scenario(tasks: Sequence[Task], solved: Sequence[bool]) -> list[bool]:
    """For each scenario, whether all of its variants were solved."""
    scenarios: dict[str, bool] = {}
    for task, is_solved in zip(tasks, solved, strict=True):
        scenario = str(task.data["scenario_id"])
        scenarios[scenario] = scenarios.get(scenario, True) and is_solved
    return list(scenarios.values())


if __name__ == "__main__":
    typer.run(main)
