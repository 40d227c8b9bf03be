"""Workers around the models: agents, environments and rewards, where the plan places them.

Each is launched if the plan places it. Otherwise episodes run and are scored in the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from roost.config.train import RolloutLogprobs, SamplingSettings, TrainSettings
from roost.engines.command import TRAITS, EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import Completion, Sampling
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
from roost.rollout.episode import Decode, Sampler, Scenario, Split, TurnOptions, token_numbers
from roost.rollout.episode_runner import EpisodeRunner, LocalEpisodeRunner, close_scenario
from roost.rollout.gateway import Gateway
from roost.rollout.order import sample_seed
from roost.rollout.rewards.config import ConfiguredRewards
from roost.rollout.rewards.scoring import RewardedEpisodeRunner, Rewards, RewardWorker
from roost.runtime.worker import GroupSpec, LaunchOptions, WorkerGroup
from roost.trainer.targets import load_scenario
from roost.trainer.watching import FailureFiles, RecordingEpisodeRunner

DEFAULT_OPTIONS = TurnOptions()
JOINT_TOKENS = 64  # longest completions that are requested together
COMPARED_GROUPS = 4  # of a step at least, to measure the mismatch of log-probs
LONGEST_INTERVAL = 16  # groups from one that is compared to the next, so that larger steps compare more
GATHER_S = 0.002  # to wait after the first request of a group, as slots may be too scarce for all of its episodes


class FleetSamplers:
    """Opens samplers for episodes. Episodes of a group use one engine, which has their prompt in its cache.

    With `group_size`, the first turns of a group's episodes are one request for several completions. Log-probs are
    requested for every `logprobs_every`-th group; 0: for none. Without a seed, the engine's own randomness is used.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: SamplingSettings,
        seed: int | None,
        label: str = "group",
        group_size: int = 1,
        logprobs_every: int = 1,
    ) -> None:
        self._fleet, self._settings, self._seed, self._label = fleet, settings, seed, label
        self._group_size, self._logprobs_every = group_size, logprobs_every
        self._gathering: dict[tuple[Any, ...], GroupRequest] = {}

    def open(self, number: int, episode: int, attempt: int) -> Sampler:
        """Return the sampler for one attempt at an episode. Seeds depend on the numbers alone."""

        async def sample(
            token_ids: Sequence[int], turn: int, max_tokens: int | None, options: TurnOptions = DEFAULT_OPTIONS
        ) -> Completion:
            settings = self._settings
            limit = settings.max_new_tokens if max_tokens is None else min(max_tokens, settings.max_new_tokens)
            sampling = Sampling(
                max_tokens=limit,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                min_tokens=settings.min_new_tokens,
                repetition_penalty=settings.repetition_penalty,
                # Engines number the completions of one request in the same way.
                seed=None if self._seed is None else sample_seed(self._seed, number, attempt, turn) + episode,
                stop=tuple(dict.fromkeys((*options.stop, *settings.stop_strings))),
                json_schema=options.json_schema,
                images=options.images,
                logprobs=self._logprobs_every > 0 and number % self._logprobs_every == 0,
                return_sampling_mask=settings.sampling_mask_replay and bool(settings.truncated_by),
                return_routed_experts=settings.router_replay,
            )
            if self._group_size > 1 and turn == attempt == 0:
                return await self._with_group(number, episode, tuple(token_ids), sampling)
            return await self._fleet.generate(token_ids, sampling, episode=f"{self._label} {number}")

        return sample

    def close(self, number: int) -> None:
        """Release the engine of a finished group."""
        self._fleet.end_episode(f"{self._label} {number}")

    async def _with_group(
        self, number: int, episode: int, token_ids: tuple[int, ...], sampling: Sampling
    ) -> Completion:
        key = number, token_ids, replace(sampling, seed=None)
        group = self._gathering.get(key)
        if group is None:
            group = self._gathering[key] = GroupRequest(self._fleet, token_ids, f"{self._label} {number}")
            asyncio.get_running_loop().call_later(GATHER_S, self._send, key, group)
        completion = group.add(episode, sampling)
        if group.size == self._group_size:
            self._send(key, group)
        return await completion

    def _send(self, key: tuple[Any, ...], group: GroupRequest) -> None:
        if self._gathering.get(key) is group:
            del self._gathering[key]
            group.send()


class GroupRequest:
    """First turns of a group's episodes, sent together."""

    def __init__(self, fleet: Fleet, token_ids: tuple[int, ...], label: str) -> None:
        self._fleet, self._token_ids, self._label = fleet, token_ids, label
        self._waiting: dict[int, tuple[Sampling, asyncio.Future[Completion]]] = {}
        self._calls: list[asyncio.Task[None]] = []

    @property
    def size(self) -> int:
        return len(self._waiting)

    def add(self, episode: int, sampling: Sampling) -> asyncio.Future[Completion]:
        completion = asyncio.get_running_loop().create_future()
        self._waiting[episode] = sampling, completion
        return completion

    def send(self) -> None:
        """Send a request for each run of consecutive episodes; there is one run unless slots were scarce."""
        left = sorted(episode for episode, (_, completion) in self._waiting.items() if not completion.done())
        while left:
            count = next((n for n in range(1, len(left)) if left[n] != left[0] + n), len(left))
            run, left = left[:count], left[count:]
            self._calls.append(asyncio.create_task(self._generate(run)))

    async def _generate(self, run: Sequence[int]) -> None:
        sampling = self._waiting[run[0]][0]
        waiting = [self._waiting[episode][1] for episode in run]
        call = asyncio.ensure_future(self._fleet.generate_n(self._token_ids, sampling, len(run), self._label))

        def cancel_unwanted(_: object) -> None:
            if all(each.cancelled() for each in waiting):
                call.cancel()

        for each in waiting:
            each.add_done_callback(cancel_unwanted)
        await asyncio.wait([call])
        error = None if call.cancelled() else call.exception()
        for index, each in enumerate(waiting):
            if each.done():
                continue  # its episode was cancelled
            if call.cancelled():
                each.cancel()
            elif error is not None:
                each.set_exception(error)
            else:
                each.set_result(call.result()[index])


AGENT, ENV = "agent", "env"
TRAINING, EVALUATION = "group", "evaluation"
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


def surrounding_groups(
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
    is_alone: bool,
    failures: FailureFiles,
    configured: ConfiguredRewards | None = None,
    decode: Decode = token_numbers,
) -> AsyncIterator[Stages]:
    """Open the runners of training and evaluation episodes. `is_alone`: the cluster has one node."""
    samplers = samplers_of(fleet, settings, scenario)
    async with contextlib.AsyncExitStack() as stack:
        if ENV in groups:
            stack.push_async_callback(finish_workers, groups[ENV], FINISH_LIMIT_S)
        environments = await _environments(groups.get(ENV))  # after the callback, which closes the others
        runners: dict[str, EpisodeRunner] = {}
        if AGENT in groups:
            gateway = Gateway()
            contact = await stack.enter_async_context(gateway.serving("127.0.0.1" if is_alone else node_address()))
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


def samplers_of(fleet: Fleet, settings: TrainSettings, scenario: Scenario) -> dict[str, FleetSamplers]:
    """Samplers of training and of evaluation."""
    own, shared = settings.evaluation, settings.sampling
    evaluated = replace(
        shared,
        temperature=own.eval_temperature,
        top_p=shared.top_p if own.eval_top_p is None else own.eval_top_p,
        top_k=shared.top_k if own.eval_top_k is None else own.eval_top_k,
        sampling_mask_replay=False,
        router_replay=False,
    )
    is_seeded = settings.rollout.request_seeds
    is_free = TRAITS[EngineKind(settings.engine)].has_cheap_logprobs
    seed = settings.seed if is_seeded or (is_seeded is None and is_free) else None
    every = logprob_interval(settings, scenario)
    joint = joint_generations(settings, scenario)
    return {
        TRAINING: FleetSamplers(fleet, shared, seed, TRAINING, joint, every),
        EVALUATION: FleetSamplers(fleet, evaluated, seed, EVALUATION, logprobs_every=1 if every == 1 else 0),
    }


def logprob_interval(settings: TrainSettings, scenario: Scenario) -> int:
    """Number of groups of which one has its log-probs requested from the engine.

    vLLM packs, decodes and writes each token's log-prob in Python, which takes longer than to generate it. If the loss
    uses only the learner's own log-probs, those of a few groups are enough to measure the mismatch.
    """
    wanted = settings.rollout.rollout_logprobs
    if wanted is RolloutLogprobs.AUTO:
        loss = settings.learner.loss
        are_used = loss.uses_engine_logprobs or loss.max_logprob_mismatch > 0
        are_seen = not getattr(scenario, "single_turn", False)  # agents may read them
        is_free = TRAITS[EngineKind(settings.engine)].has_cheap_logprobs
        wanted = RolloutLogprobs.ALL if are_used or are_seen or is_free else RolloutLogprobs.SOME
    if wanted is RolloutLogprobs.ALL:
        return 1
    return min(max(1, settings.rollout.prompts_per_step // COMPARED_GROUPS), LONGEST_INTERVAL)


def joint_generations(settings: TrainSettings, scenario: Scenario) -> int:
    """Number of a group's generations that are one request.

    All of them wait for the slowest. That is worth it only for short completions, for which a call costs more than
    the tokens, and only where no episode has another turn or is cut off.
    """
    rollout = settings.rollout
    is_short = settings.sampling.max_new_tokens <= JOINT_TOKENS
    is_joint = getattr(scenario, "single_turn", False) and is_short and not rollout.extra_generations
    return rollout.num_generations if is_joint and rollout.rollout_fraction == 1.0 else 1


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


async def _environments(group: WorkerGroup | None) -> RemoteEnvironments | None:
    if group is None:
        return None
    wrong = [error for error in await _prepared("the environments", group.prepare()) if error]
    if wrong:
        raise EnvironmentFailed(f"the environments cannot be made: {wrong[0]}")
    return RemoteEnvironments(group.hosts)
