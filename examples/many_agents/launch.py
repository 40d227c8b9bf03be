"""512 agent processes on four simulated nodes of this machine, or as many as its memory holds; each plays episodes.

python examples/many_agents/launch.py
python examples/many_agents/launch.py --processes 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from proportions import fitting, scaled

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when Ray is imported: it listens on loopback only

import roost
from roost import Cluster
from roost.engines.protocol import Completion, Finish, VersionSpan
from roost.placement.plan import Plan
from roost.rollout.env_worker import AgentGroup, AgentWorker
from roost.rollout.episode import Episode, EpisodeReward, Sampler, Split, Task, Transcript
from roost.rollout.episode_runner import EpisodeRequest
from roost.rollout.gateway import Gateway
from roost.runtime.worker import WorkerGroup

JOB = Path(__file__).with_name("job.yaml")
NODES = 4
MOST = 512
SPARED = 4 * 2**30  # bytes of memory that are left to everybody else
EPISODE_LIMIT_S = 600.0
OBJECT_STORE = 100 * 2**20  # bytes on each node; nothing here is put into it


# What is played ---------------------------------------------------------------------------------------------------


class Echo:
    """The policy is to say again what it is shown; the answer tells which process of which node asked it to."""

    def size(self, split: Split) -> int:
        return MOST

    def task(self, split: Split, index: int) -> Task:
        return Task(f"say {index}", {"ids": [index, index + 1]})

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        import ray

        transcript.give(task.data["ids"])
        completion = await transcript.take(max_tokens=2)
        asked_by = {"pid": os.getpid(), "node_id": ray.get_runtime_context().get_node_id()}
        return EpisodeReward(float(list(completion) == task.data["ids"]), json.dumps(asked_by))


def make_echo(task: Mapping[str, Any], model: str) -> Echo:
    return Echo()


def open_policy(number: int, episode: int, attempt: int) -> Sampler:
    """Turns that the driver answers by itself; those of a job are drawn on its engines."""

    async def sample(token_ids: Sequence[int], turn: int, max_tokens: int | None) -> Completion:
        count = len(token_ids)
        return Completion(tuple(token_ids), (0.0,) * count, Finish.STOP, (VersionSpan(0, 0, count),))

    return sample


# Where it is played -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated_nodes() -> Iterator[str]:
    """The address of a Ray of four nodes, all of which are this machine."""
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    cpus = max(1, (os.cpu_count() or 1) // NODES)  # a node starts as many processes at a time
    # In a folder of its own, or others who look for a Ray on this machine would find this one.
    with tempfile.TemporaryDirectory(prefix="roost-", ignore_cleanup_errors=True) as folder:
        os.environ.update(RAY_TMPDIR=folder, ROOST_FAKE_ACCELERATORS="0")
        ray_cluster = RayCluster()
        try:
            for node in range(NODES):
                os.environ["ROOST_NODE_RANK"] = str(node)  # a node is a child of this process, and inherits it
                ray_cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE, include_dashboard=False)
            yield ray_cluster.address
        finally:
            ray.shutdown()
            ray_cluster.shutdown()


def planned(processes: int, cluster: Cluster) -> Plan:
    """The job with so many processes."""
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    agent = job["cluster"]["component_placement"]["agent"]
    agent["placement"] = scaled(agent["placement"], processes)
    return roost.plan(job, inventory=cluster)


# Launching and playing --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Worker of an episode, its reward, and the memory of the process by then."""

    pid: int
    node: int  # on which Ray says that it runs
    reward: float
    memory: int  # bytes: its own, and its part of what it shares with others
    cpu_s: float
    threads: int
    files: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A group that was launched, and has played in every process; answers are in rank order."""

    planned_nodes: tuple[int, ...]
    answers: tuple[Answer, ...]
    launch_s: float
    first_s: float  # until every process has prepared and answered once: it loads what it needs, and connects
    again_s: float  # until every process has answered once more

    @property
    def is_as_planned(self) -> bool:
        """Whether every process has answered, and from the node that the plan says."""
        answered = [answer for answer in self.answers if answer.reward == 1.0]
        pids = {answer.pid for answer in answered}
        return len(pids) == len(self.planned_nodes) and self.planned_nodes == tuple(each.node for each in answered)


def launched_and_played(cluster: Cluster, plan: Plan) -> Outcome:
    """Launch the plan's agents, let each play, and end them."""
    agents = AgentWorker.create_group(make_echo, {}, "", EPISODE_LIMIT_S)
    node_ids = [node.report.node_id for node in cluster.nodes]
    began = time.perf_counter()
    group = cluster.launch(plan, {"agent": agents})["agent"]
    try:
        group.wait_ready()
        launch_s = time.perf_counter() - began
        episodes, first_s, again_s = asyncio.run(run_episodes(group))
        answers = tuple(answer_of(episode, node_ids) for episode in episodes)
    finally:
        group.close()
    planned_nodes = tuple(placement.cluster_node_rank for placement in plan["agent"].table)
    return Outcome(planned_nodes, answers, launch_s, first_s, again_s)


async def run_episodes(group: WorkerGroup) -> tuple[Sequence[Episode], float, float]:
    """An episode of every process in rank order, and the seconds that the first one of each and another one took."""
    gateway = Gateway()
    gateway.serve("group", open_policy)
    async with gateway.serving() as contact:
        agents = AgentGroup(group, contact)
        began = time.perf_counter()
        await agents.prepare()
        await one_each(agents, group.world_size)
        first = time.perf_counter()
        episodes = await one_each(agents, group.world_size)
        return episodes, first - began, time.perf_counter() - first


async def one_each(agents: AgentGroup, count: int) -> Sequence[Episode]:
    """Begun together, each goes to the process that plays the fewest: one to each, in rank order."""
    scenario, runner = Echo(), agents.runner("group")
    requests = [EpisodeRequest(scenario.task(Split.TRAIN, rank), rank, 0) for rank in range(count)]
    return await asyncio.gather(*map(runner.run_episode, requests))


def answer_of(episode: Episode, node_ids: Sequence[str]) -> Answer:
    asked_by = json.loads(episode.score.shown)
    process = psutil.Process(asked_by["pid"])
    return Answer(
        process.pid,
        node_ids.index(asked_by["node_id"]),
        episode.score.reward,
        process.memory_full_info().pss,
        sum(process.cpu_times()[:2]),
        process.num_threads(),
        process.num_fds(),
    )


def run(processes: int | None) -> Outcome:
    """Try four, to know what one costs; then launch as many as are wanted, or fit."""
    with simulated_nodes() as address, Cluster(num_nodes=NODES, address=address) as cluster:
        trial = launched_and_played(cluster, planned(NODES, cluster))
        each = max(answer.memory for answer in trial.answers)
        free = psutil.virtual_memory().available
        room = fitting(free, SPARED, each, MOST)
        print(f"one process takes {each / 1e6:.0f} MB, {free / 1e9:.1f} GB are free: {room} of {MOST} fit", flush=True)
        count = room if processes is None else processes
        if not NODES <= count <= room:
            raise SystemExit(f"{count} processes cannot be launched here; ask for {NODES} to {room}")
        return launched_and_played(cluster, planned(count, cluster))


# What a person sees -----------------------------------------------------------------------------------------------


def table(outcome: Outcome) -> str:
    """Summary of the launch: processes per node, and their cost."""
    lines = ["node  processes  answered  MB of one  CPU s of one"]
    for node in range(NODES):
        here = [answer for answer in outcome.answers if answer.node == node]
        right = sum(answer.reward == 1.0 for answer in here)
        memory = statistics.mean(answer.memory for answer in here) / 1e6
        cpu_s = statistics.mean(answer.cpu_s for answer in here)
        lines.append(f"{node:4}  {outcome.planned_nodes.count(node):9}  {right:8}  {memory:9.1f}  {cpu_s:12.2f}")
    count, one = len(outcome.answers), outcome.answers[0]
    total = sum(answer.memory for answer in outcome.answers) / 1e9
    lines += [
        "",
        f"launched    {count} in {outcome.launch_s:.1f} s, {count / outcome.launch_s:.1f} a second",
        f"prepared    with a first answer of each in {outcome.first_s:.1f} s",
        f"answered    once more in {outcome.again_s:.2f} s, {count / outcome.again_s:.0f} a second",
        f"memory      {total:.1f} GB of all; each has {one.threads} threads and {one.files} open files",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, help=f"in all (default: as many as fit, at most {MOST})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to a file as well")
    options = parser.parse_args()
    outcome = run(options.processes)
    print(table(outcome))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    if not outcome.is_as_planned:
        raise SystemExit("not every process answered from the node that the plan says")


if __name__ == "__main__":
    main()
