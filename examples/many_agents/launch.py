"""512 agent processes on four simulated nodes of this machine, or as many as fit into memory; each runs two episodes.

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

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read when Ray is imported; makes it listen on loopback only

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
SPARED = 4 * 2**30  # bytes of memory left to other programs
EPISODE_LIMIT_S = 600.0
OBJECT_STORE = 100 * 2**20  # bytes on each node; this script does not use it


# The task ---------------------------------------------------------------------------------------------------------


class Echo:
    """The policy must repeat the prompt. The answer that is shown has the process and node of the episode."""

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
    """Sampler that returns the prompt, without an engine."""

    async def sample(token_ids: Sequence[int], turn: int, max_tokens: int | None) -> Completion:
        count = len(token_ids)
        return Completion(tuple(token_ids), (0.0,) * count, Finish.STOP, (VersionSpan(0, 0, count),))

    return sample


# The cluster ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated_nodes() -> Iterator[str]:
    """Start a Ray cluster of four nodes on this machine; yield its address."""
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    cpus = max(1, (os.cpu_count() or 1) // NODES)  # a node starts as many processes at a time
    # In a separate folder, so that other programs that look for a Ray on this machine do not find this one.
    with tempfile.TemporaryDirectory(prefix="roost-", ignore_cleanup_errors=True) as folder:
        os.environ.update(RAY_TMPDIR=folder, ROOST_FAKE_ACCELERATORS="0")
        ray_cluster = RayCluster()
        try:
            for node in range(NODES):
                os.environ["ROOST_NODE_RANK"] = str(node)  # inherited by the node, a child of this process
                ray_cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE, include_dashboard=False)
            yield ray_cluster.address
        finally:
            ray.shutdown()
            ray_cluster.shutdown()


def planned(processes: int, cluster: Cluster) -> Plan:
    """Plan of the job with this number of processes."""
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    agent = job["cluster"]["component_placement"]["agent"]
    agent["placement"] = scaled(agent["placement"], processes)
    return roost.plan(job, inventory=cluster)


# Launch and episodes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The process of an episode, its reward, and the resources of the process after it."""

    pid: int
    node: int  # as Ray reports it
    reward: float
    memory: int  # bytes (PSS)
    cpu_s: float
    threads: int
    files: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a launch with episodes in every process; answers are in rank order."""

    planned_nodes: tuple[int, ...]
    answers: tuple[Answer, ...]
    launch_s: float
    first_s: float  # of imports, connections and the first answers of all processes
    again_s: float  # of the second answers of all processes

    @property
    def is_as_planned(self) -> bool:
        """Return True if every process answered from its planned node."""
        answered = [answer for answer in self.answers if answer.reward == 1.0]
        pids = {answer.pid for answer in answered}
        return len(pids) == len(self.planned_nodes) and self.planned_nodes == tuple(each.node for each in answered)


def launch_and_measure(cluster: Cluster, plan: Plan) -> Outcome:
    """Launch the plan's agents, run their episodes, and stop them."""
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
    """The second episodes in rank order, and the seconds that the first and the second ones took."""
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
    """Run one episode in each process, in rank order: each goes to the process with the fewest running episodes."""
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
    """Measure four processes; then launch the requested number, or as many as fit."""
    with simulated_nodes() as address, Cluster(num_nodes=NODES, address=address) as cluster:
        trial = launch_and_measure(cluster, planned(NODES, cluster))
        each = max(answer.memory for answer in trial.answers)
        free = psutil.virtual_memory().available
        room = fitting(free, SPARED, each, MOST)
        print(f"one process takes {each / 1e6:.0f} MB, {free / 1e9:.1f} GB are free: {room} of {MOST} fit", flush=True)
        count = room if processes is None else processes
        if not NODES <= count <= room:
            raise SystemExit(f"{count} processes cannot be launched here; set --processes to {NODES} to {room}")
        return launch_and_measure(cluster, planned(count, cluster))


# Output -----------------------------------------------------------------------------------------------------------


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
    parser.add_argument("--processes", type=int, help=f"number of processes (default: as many as fit, at most {MOST})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file")
    options = parser.parse_args()
    outcome = run(options.processes)
    print(table(outcome))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    if not outcome.is_as_planned:
        raise SystemExit("not every process answered from its planned node")


if __name__ == "__main__":
    main()
