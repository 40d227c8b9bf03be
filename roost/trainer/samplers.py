"""Samplers of episodes: requests to the engines of the fleet, with the job's sampling settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roost.config.train import RolloutLogprobs, SamplingSettings, TrainSettings
from roost.engines.command import TRAITS, EngineKind
from roost.engines.fleet import Fleet
from roost.engines.protocol import Completion, Sampling
from roost.rollout.episode import Sampler, Scenario, TurnOptions
from roost.rollout.order import sample_seed

TRAINING, EVALUATION = "group", "evaluation"  # labels of groups: an episode of the fleet is "group 12"
DEFAULT_OPTIONS = TurnOptions()
JOINT_TOKENS = 64  # longest completions that are requested together
COMPARED_GROUPS = 4  # least groups of a step whose log-probs are requested, to measure their mismatch
LONGEST_INTERVAL = 16  # most groups from one with log-probs to the next, so that larger steps compare more
GATHER_S = 0.002  # longest wait for the other first turns of a group; slots may be too scarce for all of them


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
        label: str = TRAINING,
        group_size: int = 1,
        logprobs_every: int = 1,
    ) -> None:
        self._fleet, self._settings, self._seed, self._label = fleet, settings, seed, label
        self._group_size, self._logprobs_every = group_size, logprobs_every
        self._gathering: dict[tuple[Any, ...], GroupRequest] = {}

    def open(self, number: int, episode: int, attempt: int) -> Sampler:
        """Return the sampler for one attempt at an episode of group `number`. Seeds depend on the numbers alone."""

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
    is_cheap = TRAITS[EngineKind(settings.engine)].has_cheap_logprobs  # and so are seeds
    seed = settings.seed if is_seeded or (is_seeded is None and is_cheap) else None
    every = logprob_interval(settings, scenario)
    joint = joint_generations(settings, scenario)
    return {
        TRAINING: FleetSamplers(fleet, shared, seed, TRAINING, joint, every),
        EVALUATION: FleetSamplers(fleet, evaluated, seed, EVALUATION, logprobs_every=1 if every == 1 else 0),
    }


def logprob_interval(settings: TrainSettings, scenario: Scenario) -> int:
    """Log-probs are requested from the engine for one group in so many.

    vLLM packs, decodes and writes each token's log-prob in Python, which takes longer than to generate it. If the loss
    uses only the learner's own log-probs, those of a few groups are enough to measure the mismatch.
    """
    wanted = settings.rollout.rollout_logprobs
    if wanted is RolloutLogprobs.AUTO:
        loss = settings.learner.loss
        are_used = loss.uses_engine_logprobs or loss.max_logprob_mismatch > 0
        are_seen = not getattr(scenario, "single_turn", False)  # agents may read them
        is_cheap = TRAITS[EngineKind(settings.engine)].has_cheap_logprobs
        wanted = RolloutLogprobs.ALL if are_used or are_seen or is_cheap else RolloutLogprobs.SOME
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
