"""`roost try`: run a few episodes of a job without a learner and without Ray, and show what would be trained."""

from __future__ import annotations

import asyncio
import contextlib
import sysconfig
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roost.config.findings import Findings
from roost.config.job import Job, resolve_model
from roost.config.train import SamplingSettings, TrainSettings
from roost.config.train_read import setting_location
from roost.engines.command import EngineKind, ServerSpec
from roost.engines.fleet import Fleet
from roost.engines.http_calls import HttpCalls
from roost.engines.protocol import Completion, EngineRefused, Finish, VersionSpan
from roost.engines.server_process import LocalOwner
from roost.rollout.episode import NOT_GENERATED, Episode, Sampler, Split, Tokens, TurnOptions
from roost.rollout.episode_runner import (
    PACKAGE,
    EpisodeFailed,
    EpisodeRequest,
    EpisodeRunner,
    LocalEpisodeRunner,
    OpenPolicy,
    close_scenario,
    task_of,
)
from roost.rollout.order import sample_seed
from roost.rollout.rewards.config import make_rewards
from roost.rollout.rewards.scoring import RewardedEpisodeRunner, Rewards
from roost.trainer.preflight import check_models
from roost.trainer.samplers import FleetSamplers
from roost.trainer.setup import load_scenario
from roost.trainer.targets import decoder

CALL_LIMIT_S = 3600.0
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
UNKNOWN_IDS = "token IDs (the text was tokenized again, so the counts may differ)"
UNKNOWN_LOGPROBS = "log-probs"


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """Options of a trial, besides its config. `url` names a server that runs already."""

    episodes: int = 4
    split: Split = Split.TRAIN
    task: int | None = None  # index of the only task; None: the first tasks of the split, one per episode
    url: str | None = None
    model: str | None = None  # its name at the URL
    api_key: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One episode of a trial, or its failure."""

    task: str
    episode: Episode | None
    call_seconds: tuple[float, ...]  # of each turn, in order
    error: str = ""
    traceback: tuple[str, ...] = ()  # lines of the user's frames


@dataclass(frozen=True, slots=True)
class Trial:
    """The episodes of a trial, a function from token IDs to text, and what is unknown because the server omits it."""

    attempts: tuple[Attempt, ...]
    decode: Callable[[Sequence[int], bool], str]
    unknown: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        return any(one.episode is None for one in self.attempts)

    def as_json(self) -> dict[str, Any]:
        return {"episodes": [self._episode(one) for one in self.attempts], "unknown": list(self.unknown)}

    def _episode(self, one: Attempt) -> dict[str, Any]:
        shown: dict[str, Any] = {"task": one.task, "call_seconds": list(one.call_seconds)}
        if one.episode is None:
            return {**shown, "error": one.error, "traceback": list(one.traceback)}
        score = one.episode.score
        return {
            **shown,
            "reward": score.reward,
            "parts": dict(score.parts),
            "turn_rewards": list(score.turn_rewards),
            "seconds": one.episode.seconds,
            "finish": one.episode.finish,
            "sequences": [self._sequence(tokens) for tokens in one.episode.sequences],
        }

    def _sequence(self, tokens: Tokens) -> dict[str, Any]:
        parts = [
            {
                "turn": None if part.turn == NOT_GENERATED else part.turn,
                "tokens": part.end - part.start,
                "finish": part.finish or None,
                "text": self.decode(tokens.token_ids[part.start : part.end].tolist(), True),
            }
            for part in tokens.parts
        ]
        trained = (tokens.turns != NOT_GENERATED).astype(int).tolist()
        return {"token_ids": tokens.token_ids.tolist(), "trained": trained, "parts": parts}


async def run_trial(job: Job, settings: TrainSettings, options: TrialOptions, say: Callable[[str], None]) -> Trial:
    """Run the episodes of a trial at the same time, with the job's task, agent, environment and rewards."""
    check_models(job, settings, say)
    scenario, tokenizer = load_scenario(job, settings)
    sampling = _sampling(settings.sampling, options)
    findings = Findings()
    configured = make_rewards(settings.rewards, setting_location("rewards", job), findings)
    findings.raise_errors()
    decode = decoder(tokenizer)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(close_scenario, scenario)
        opened = await stack.enter_async_context(_samplers(settings, sampling, options, tokenizer, say))
        calls = _TimedCalls(opened.open)
        runner: EpisodeRunner = LocalEpisodeRunner(scenario, calls.open, settings.rollout.episode_timeout_s)
        if settings.rewards:
            rewards = Rewards(configured.routing, configured.local)
            stack.push_async_callback(rewards.close)
            await rewards.prepare()
            runner = RewardedEpisodeRunner(runner, rewards, decode, options.split)
        size = scenario.size(options.split)
        _check_tasks(options, size)
        indices = [index % size if options.task is None else options.task for index in range(options.episodes)]
        tasks = [task_of(scenario, options.split, index) for index in indices]
        requests = [EpisodeRequest(task, number, number) for number, task in enumerate(tasks)]
        attempts = await asyncio.gather(*(_attempt(runner, request, calls) for request in requests))
        return Trial(tuple(attempts), decode, tuple(sorted(getattr(opened, "unknown", ()))))


def _check_tasks(options: TrialOptions, size: int) -> None:
    if size < 1:
        raise ValueError(f"the split {options.split} has no tasks")
    if options.task is not None and not 0 <= options.task < size:
        raise ValueError(f"there is no task {options.task}; the split {options.split} has tasks 0 to {size - 1}")


def _sampling(settings: SamplingSettings, options: TrialOptions) -> SamplingSettings:
    temperature = settings.temperature if options.temperature is None else options.temperature
    limit = settings.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
    return replace(settings, temperature=temperature, max_new_tokens=limit)


async def _attempt(runner: EpisodeRunner, request: EpisodeRequest, calls: _TimedCalls) -> Attempt:
    try:
        episode = await runner.run_episode(request)
    except EpisodeFailed as error:
        return Attempt(
            request.task.name, None, calls.of(request.number), str(error), user_frames(error, error.traceback)
        )
    return Attempt(request.task.name, episode, calls.of(request.number))


def user_frames(error: BaseException, whole: str = "") -> tuple[str, ...]:
    """Lines of a traceback that are in the user's files, over all causes; without any, the last lines of `whole`."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    extracted = (frame for one in chain for frame in traceback.extract_tb(one.__traceback__))
    frames = [frame for frame in extracted if _is_user_code(frame.filename)]
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
    return tuple(dict.fromkeys(lines)) or tuple(whole.strip().splitlines()[-3:])


def _is_user_code(filename: str) -> bool:
    path = Path(filename)
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in (PACKAGE, *LIBRARIES))


class _TimedCalls:
    """Opens samplers that record the seconds of each call, by episode."""

    def __init__(self, open_policy: OpenPolicy) -> None:
        self._open, self._seconds = open_policy, dict[int, dict[int, float]]()

    def open(self, number: int, episode: int, attempt: int) -> Sampler:
        sample, seconds = self._open(number, episode, attempt), self._seconds.setdefault(number, {})

        async def timed(token_ids: Sequence[int], turn: int, *more: Any) -> Completion:
            began = time.perf_counter()
            try:
                return await sample(token_ids, turn, *more)
            finally:
                seconds[turn] = time.perf_counter() - began

        return timed

    def of(self, number: int) -> tuple[float, ...]:
        return tuple(seconds for _, seconds in sorted(self._seconds.get(number, {}).items()))


@contextlib.asynccontextmanager
async def _samplers(
    settings: TrainSettings,
    sampling: SamplingSettings,
    options: TrialOptions,
    tokenizer: Any,
    say: Callable[[str], None],
) -> AsyncIterator[FleetSamplers | UrlSamplers]:
    """Samplers at a URL, or of an engine that is started here."""
    if options.url is not None:
        samplers = UrlSamplers(options, sampling, tokenizer, settings.seed)
        try:
            yield samplers
        finally:
            await samplers.close()
        return
    import torch

    spec = ServerSpec(
        EngineKind(settings.engine),
        resolve_model(settings.learner.model),
        device="auto" if torch.cuda.is_available() else "cpu",
        seed=settings.seed,
        **dict(settings.engine_options),
    )
    say(f"starting {spec.kind.value} with {settings.learner.model}")
    with tempfile.TemporaryDirectory(prefix="roost-try-") as logs:
        async with Fleet([LocalOwner(spec, logs)], report=say) as fleet:
            yield FleetSamplers(fleet, sampling, settings.seed, "try")


@dataclass
class UrlSamplers:
    """Samplers that call /completions of an OpenAI-compatible URL; `unknown` names what the server omits."""

    options: TrialOptions
    sampling: SamplingSettings
    tokenizer: Any
    seed: int
    unknown: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._calls = HttpCalls(str(self.options.url).rstrip("/"), self.options.api_key, trust_env=True)
        self._gives_ids = True

    def open(self, number: int, episode: int, attempt: int) -> Sampler:
        async def sample(
            token_ids: Sequence[int], turn: int, max_tokens: int | None, options: TurnOptions | None = None
        ) -> Completion:
            if options and options.images:
                raise EngineRefused("images are not sent to a URL; try the policy with the built-in engine")
            limit = self.sampling.max_new_tokens
            body = {
                "model": self.options.model,
                "max_tokens": limit if max_tokens is None else min(max_tokens, limit),
                "temperature": self.sampling.temperature,
                "top_p": self.sampling.top_p,
                "seed": sample_seed(self.seed, number, episode, attempt, turn),
                "logprobs": 1,
                **({"stop": list(options.stop)} if options and options.stop else {}),
            }
            return self._completion(await self._generate(list(token_ids), body))

        return sample

    async def _generate(self, token_ids: list[int], body: dict[str, Any]) -> Any:
        """The server's answer. If it refuses token IDs, text is sent from then on."""
        if self._gives_ids:
            try:
                return await self._post({**body, "prompt": token_ids, "return_token_ids": True})
            except EngineRefused as error:
                if "return_token_ids" not in str(error) and "prompt" not in str(error):
                    raise
                self._gives_ids = False
        return await self._post({**body, "prompt": self.tokenizer.decode(token_ids)})

    async def _post(self, body: dict[str, Any]) -> Any:
        return await self._calls.post("/completions", body, limit_s=CALL_LIMIT_S, is_idempotent=True)

    def _completion(self, answer: Any) -> Completion:
        choice = answer["choices"][0]
        finish = Finish.LENGTH if choice.get("finish_reason") == "length" else Finish.STOP
        token_ids = choice.get("token_ids")
        if token_ids is None:
            self.unknown.add(UNKNOWN_IDS)
            token_ids = self.tokenizer(choice["text"], add_special_tokens=False).input_ids
            if finish is Finish.STOP and self.tokenizer.eos_token_id is not None:
                token_ids = [*token_ids, self.tokenizer.eos_token_id]
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        if len(logprobs) != len(token_ids):
            self.unknown.add(UNKNOWN_LOGPROBS)
            logprobs = [0.0] * len(token_ids)
        return Completion(tuple(token_ids), tuple(logprobs), finish, (VersionSpan(0, 0, len(token_ids)),))

    async def close(self) -> None:
        await self._calls.close()
