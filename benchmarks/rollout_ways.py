"""The compared ways to run episodes. Each runs a number of episodes at a concurrency and returns their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import httpx
from rollout_workload import Talk, Workload, shown

from roost.config.train import SamplingSettings
from roost.engines import EngineKind, Fleet, LocalOwner, ServerSpec
from roost.rollout.episode import Split
from roost.rollout.episode_runner import EpisodeRequest, EpisodeRunner, LocalEpisodeRunner
from roost.trainer.samplers import FleetSamplers

HERE = Path(__file__).parent
LIMIT_S = 600.0
WORKERS = 2
LABEL, MODEL = "group", "model"
# Threads that spin while they wait for each other take several times as long where anything else uses a core.
PATIENT = {"OMP_WAIT_POLICY": "passive"}


@contextlib.asynccontextmanager
async def engine(model: Path, folder: Path, threads: int, batch: int) -> AsyncIterator[Fleet]:
    """A fleet of one built-in engine with this batch size."""
    spec = ServerSpec(
        EngineKind.TORCH,
        str(model),
        device="cpu",
        served_name=MODEL,
        env={"OMP_NUM_THREADS": str(threads), **PATIENT},
        args=("--max-num-seqs", str(batch)),
    )
    async with Fleet([LocalOwner(spec, folder / "logs")]) as fleet:
        yield fleet


# Roost's --------------------------------------------------------------------------------------------------------------


class Episodes:
    """Coroutines of one event loop, in this process or, with a gateway, in agent workers."""

    def __init__(self, fleet: Fleet, workload: Workload) -> None:
        self.samplers = FleetSamplers(fleet, SamplingSettings(max_new_tokens=workload.tokens), seed=0, label=LABEL)
        self._scenario = Talk(**asdict(workload))
        self.here = LocalEpisodeRunner(self._scenario, self.samplers.open, LIMIT_S)

    async def run_episode(self, runner: EpisodeRunner, count: int, concurrency: int) -> list[int]:
        left, tokens = iter(range(count)), list[int]()

        async def one_after_another() -> None:
            for number in left:
                episode = await runner.run_episode(EpisodeRequest(self._scenario.task(Split.TRAIN, number), number, 0))
                self.samplers.close(number)
                tokens.append(episode.completion_tokens)

        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
        return tokens


@contextlib.asynccontextmanager
async def in_workers(episodes: Episodes, workload: Workload, model: Path) -> AsyncIterator[EpisodeRunner]:
    """A runner whose episodes run in agent workers, which sample turns through the driver's gateway."""
    from roost import Cluster, NodePlacementStrategy
    from roost.rollout.env_worker import AgentGroup, AgentWorker
    from roost.rollout.gateway import Gateway
    from roost.trainer.targets import load_scenario

    task = {"_target_": "rollout_workload.Talk", **asdict(workload)}
    spec = AgentWorker.create_group(load_scenario, task, str(model), LIMIT_S, [str(HERE)])
    gateway = Gateway()
    gateway.serve(LABEL, episodes.samplers.open)
    with Cluster(num_nodes=1, address="local") as cluster:
        group = spec.launch(cluster, NodePlacementStrategy([0] * WORKERS), "agent")
        async with gateway.serving() as contact:
            agents = AgentGroup(group, contact)
            await agents.prepare()
            yield agents.runner(LABEL)


# A thread for each episode --------------------------------------------------------------------------------------------


class Route(Protocol):
    """Requests and replies of a turn: OpenAI's route, or the one that Roost uses."""

    path: str

    def body_of(self, workload: Workload, prompt: Sequence[int], seed: int) -> dict[str, Any]: ...

    def tokens_of(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Tokens of a turn and their log-probs, which a trainer needs."""
        ...


class Completions:
    path = "/v1/completions"

    def body_of(self, workload: Workload, prompt: Sequence[Any], seed: int) -> dict[str, Any]:
        how = {"max_tokens": workload.tokens, "temperature": 1.0, "seed": seed, "logprobs": 1}
        return {"model": MODEL, "prompt": prompt, **how, "return_token_ids": True, "return_tokens_as_token_ids": True}

    def tokens_of(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


class TokenRoute:
    path = "/inference/v1/generate"

    def body_of(self, workload: Workload, prompt: Sequence[int], seed: int) -> dict[str, Any]:
        how = {"max_tokens": workload.tokens, "temperature": 1.0, "seed": seed, "logprobs": 0, "detokenize": False}
        return {"model": MODEL, "token_ids": prompt, "sampling_params": how}

    def tokens_of(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def run_in_threads(url: str, route: Route, workload: Workload, count: int, concurrency: int) -> list[int]:
    """Episodes in `concurrency` threads; each thread keeps its own client."""
    left, lock = iter(range(count)), threading.Lock()

    def one_after_another() -> list[int]:
        tokens = []
        # Without certificates: reading them takes longer than an episode.
        with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False, verify=False) as client:
            while (number := _next(left, lock)) is not None:
                tokens.append(run_synchronously(client, route, workload, number))
        return tokens

    with ThreadPoolExecutor(concurrency) as pool:
        playing = [pool.submit(one_after_another) for _ in range(concurrency)]
        return [each for measured in playing for each in measured.result()]


def _next(numbers: Iterator[int], lock: threading.Lock) -> int | None:
    with lock:
        return next(numbers, None)


def run_synchronously(client: httpx.Client, route: Route, workload: Workload, number: int) -> int:
    token_ids, logprobs = shown(workload, number, 0), list[float]()
    for turn in range(workload.turns):
        answer = client.post(route.path, json=route.body_of(workload, token_ids, number * workload.turns + turn))
        tokens, scores = route.tokens_of(answer.raise_for_status().json()["choices"][0])
        token_ids += tokens
        logprobs += scores
        time.sleep(workload.wait)
        token_ids += shown(workload, number, turn + 1)
    return len(logprobs)


# The engine alone -----------------------------------------------------------------------------------------------------


def run_alone(url: str, workload: Workload, count: int, concurrency: int) -> list[int]:
    """Upper bound of the engine: a turn of all episodes in one request, without environments."""
    tokens, route = list[int](), Completions()
    with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        for first in range(0, count, concurrency):
            numbers = range(first, min(first + concurrency, count))
            prompts = [shown(workload, number, 0) for number in numbers]
            tokens += [0] * len(prompts)
            for turn in range(workload.turns):
                request = route.body_of(workload, prompts, first + turn)
                choices = client.post(route.path, json=request).raise_for_status().json()["choices"]
                for place, choice in enumerate(choices):
                    tokens[first + place] += len(choice["token_ids"])
                    prompts[place] += choice["token_ids"] + shown(workload, numbers[place], turn + 1)
    return tokens


def forget(url: str) -> None:
    """Clear the engine's prefix cache."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=LIMIT_S, trust_env=False).raise_for_status()
