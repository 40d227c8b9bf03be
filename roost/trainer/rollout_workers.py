"""Rollout workers: agents, environments and rewards in processes of their own, and the stages that use them.

Each is launched if the plan places it. Otherwise episodes run and are scored in the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from roost.config.train import TrainSettings
from roost.engines.fleet import Fleet
from roost.engines.server_process import START_LIMIT_S
from roost.net.addresses import node_address
from roost.placement.plan import Plan
from roost.placement.rules.rewards import placed_rewards
from roost.procs.user_code import within
from roost.rollout.env_worker import (
    AgentGroup,
    AgentWorker,
    EnvironmentFailed,
    EnvWorker,
    RemoteEnvironments,
    finish_workers,
    run_in_environment,
)
from roost.rollout.episode import Decode, Scenario, Split, token_numbers
from roost.rollout.episode_runner import EpisodeRunner, LocalEpisodeRunner, close_scenario
from roost.rollout.gateway import Gateway
from roost.rollout.rewards.config import ConfiguredRewards
from roost.rollout.rewards.scoring import RewardedEpisodeRunner, Rewards, RewardWorker
from roost.runtime.worker import GroupSpec, LaunchOptions, WorkerGroup
from roost.trainer.samplers import EVALUATION, TRAINING, samplers_of
from roost.trainer.targets import load_scenario
from roost.trainer.watching import FailureFiles, RecordingEpisodeRunner

AGENT, ENV = "agent", "env"
FINISH_LIMIT_S = 60.0
PREPARE_LIMIT_S = 900.0  # to construct user classes: tokenizers, simulators, connections to robots
REWARDS_LIMIT_S = START_LIMIT_S + 60.0  # longer, so that a judge's engine can report why it does not start
RESTARTS = 100  # of one worker: an agent or environment that dies fails its episodes, never the run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """Runner of one kind of episodes, and the callback for finished groups."""

    runner: EpisodeRunner
    on_end: Callable[[int], None]


@dataclass(frozen=True)
class Stages:
    training: Stage
    evaluation: Stage
    rewards: Rewards | None = None  # None: scenarios score their own episodes


def rollout_worker_groups(
    plan: Plan, settings: TrainSettings, model: str, tokenizer_class: str, paths: tuple[str, ...]
) -> dict[str, GroupSpec]:
    """Worker groups of the agents, environments and rewards that the plan places."""
    placed = {part.name for part in plan.components}
    groups: dict[str, GroupSpec] = {}
    for name, component in placed_rewards(settings.rewards, placed).items():
        groups[component] = RewardWorker.create_group(name, settings.rewards[name], paths)
    if AGENT in placed:
        limit = settings.rollout.episode_timeout_s
        make = partial(load_scenario, tokenizer_class=tokenizer_class)
        groups[AGENT] = AgentWorker.create_group(make, dict(settings.task), model, limit, paths)
    if ENV in placed and isinstance(settings.task.get("environment"), Mapping):
        limit = settings.rollout.episode_timeout_s
        groups[ENV] = EnvWorker.create_group(dict(settings.task["environment"]), paths, limit)
    return groups


def restarting(groups: Mapping[str, GroupSpec]) -> dict[str, LaunchOptions]:
    """Launch options that restart a dead worker in place."""
    return {name: LaunchOptions(restarts=RESTARTS) for name in groups}


@contextlib.asynccontextmanager
async def open_stages(
    groups: Mapping[str, WorkerGroup],
    scenario: Scenario,
    fleet: Fleet,
    settings: TrainSettings,
    is_one_node: bool,
    failures: FailureFiles,
    configured: ConfiguredRewards | None = None,
    decode: Decode = token_numbers,
) -> AsyncIterator[Stages]:
    """Open the runners of training and evaluation episodes. `is_one_node`: the cluster has one node."""
    samplers = samplers_of(fleet, settings, scenario)
    async with contextlib.AsyncExitStack() as stack:
        if ENV in groups:
            stack.push_async_callback(finish_workers, groups[ENV], FINISH_LIMIT_S)
        # After the callback: if one environment fails to start, the others are still closed.
        environments = await _prepared_environments(groups.get(ENV))
        runners: dict[str, EpisodeRunner] = {}
        if AGENT in groups:
            gateway = Gateway()
            contact = await stack.enter_async_context(gateway.serving("127.0.0.1" if is_one_node else node_address()))
            for label, each in samplers.items():
                gateway.serve(label, each.open)
            agents = AgentGroup(groups[AGENT], contact, environments)
            stack.push_async_callback(agents.finish, FINISH_LIMIT_S)
            await _prepared("the agents", agents.prepare())
            runners |= {label: agents.runner(label) for label in samplers}
        else:
            if environments is not None:
                run_in_environment(scenario, environments)
            limit = settings.rollout.episode_timeout_s
            runners |= {label: LocalEpisodeRunner(scenario, each.open, limit) for label, each in samplers.items()}
            stack.push_async_callback(_finish, scenario)
        rewards: Rewards | None = None
        if configured is not None and settings.rewards:
            elsewhere = {name: groups[part] for name, part in placed_rewards(settings.rewards, groups).items()}
            for group in elsewhere.values():
                await asyncio.to_thread(group.wait_ready)
            rewards = Rewards(configured.routing, configured.local, elsewhere)
            stack.push_async_callback(rewards.close)
            await _prepared("the rewards", rewards.prepare(), REWARDS_LIMIT_S)
            splits = {TRAINING: Split.TRAIN, EVALUATION: Split.EVALUATION}
            runners = {
                label: RewardedEpisodeRunner(runner, rewards, decode, splits[label])
                for label, runner in runners.items()
            }
        runners = {label: RecordingEpisodeRunner(runner, failures) for label, runner in runners.items()}
        training, evaluation = (Stage(runners[label], samplers[label].close) for label in (TRAINING, EVALUATION))
        yield Stages(training, evaluation, rewards)


async def _finish(scenario: Scenario) -> None:
    """Close the scenario. One that hangs must not fail a finished run."""
    try:
        await within(FINISH_LIMIT_S, close_scenario(scenario))
    except Exception as error:  # anything a user's class raises
        logger.warning("the scenario did not close and is left behind: %s: %s", type(error).__name__, error)


async def _prepared(who: str, preparing: Awaitable[Any], limit_s: float = PREPARE_LIMIT_S) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await preparing
    except TimeoutError:
        raise TimeoutError(
            f"{who} were not ready within {limit_s:g} s; see their logs for what their constructors wait for"
        ) from None


async def _prepared_environments(group: WorkerGroup | None) -> RemoteEnvironments | None:
    if group is None:
        return None
    wrong = [error for error in await _prepared("the environments", group.prepare()) if error]
    if wrong:
        raise EnvironmentFailed(f"the environments cannot be created: {wrong[0]}")
    return RemoteEnvironments(group.hosts)
