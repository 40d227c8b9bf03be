"""Episodes of scripted agents, and a way to ask a server without a client."""

import asyncio
import contextlib

import httpx

from roost.app_world.serving.client import AppWorldEnvironments
from roost.app_world.serving.command_line import ServingLimits
from roost.app_world.serving.runner import OracleAgent
from roost.app_world.serving.server import serving
from roost.app_world.serving.tasks import to_task
from roost.app_world.tasks.task_set import ScenarioName, TaskSet, make_task
from tests.limits import HANG_S

NOTE = TaskSet("train", 1, 1, kinds=["jot_note"])[0]
TASK = to_task(NOTE)
NOBODY = f"{ScenarioName('train', difficulty=1, slot=31, number=0).id}_1"  # no kind has this slot


@contextlib.asynccontextmanager
async def opened(**keys):
    """Environments, on a server in this process where nothing else is said."""
    given = {"answer_limit_s": HANG_S, "start_limit_s": HANG_S} | ({} if "urls" in keys else {"servers": 0})
    environments = AppWorldEnvironments(**given | keys)
    try:
        yield environments
    finally:
        await environments.close()


async def played(environments, task, agent=OracleAgent, max_turns=40):
    """The score of an episode."""
    environment = await environments.open()
    try:
        first = await environment.reset(task)
        await agent(task=task).run_episode(None, environment, first, max_turns)
        return await environment.score()
    finally:
        await environment.close()


async def all_played(environments, tasks, agent=OracleAgent, at_a_time=8):
    places = asyncio.Semaphore(at_a_time)

    async def one(task):
        async with places:
            return await played(environments, task, agent)

    return await asyncio.gather(*map(one, tasks))


class Asker:
    """Asks routes for the world of a task, and gives the status with what came."""

    def __init__(self, client, task_id=NOTE.id):
        self._client, self.task_id = client, task_id

    async def __call__(self, route, **fields):
        answer = await self._client.post(route, json={"task_id": self.task_id} | fields)
        reported = answer.json()
        return answer.status_code, reported["output"] if answer.is_success else reported["detail"]

    async def get(self, route):
        answer = await self._client.get(route)
        return answer.status_code, answer.json()


@contextlib.asynccontextmanager
async def asking(**limits):
    async with (
        serving(ServingLimits(**limits)) as url,
        httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as client,
    ):
        yield Asker(client)


def solution(task_id=NOTE.id):
    return make_task(task_id).solution
