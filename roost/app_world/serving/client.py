"""Environments of app worlds: episodes on our servers, or on AppWorld's."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from roost.app_world.serving.appworld_data import root_of_appworld
from roost.app_world.serving.connection import Connection, ServerLost, ServerRefused
from roost.app_world.serving.hosts import GivenServer, Host, LocalServer, appworld_server, own_server
from roost.app_world.serving.limits import ServingLimits
from roost.app_world.serving.pool import PooledServer, ServerPool
from roost.app_world.serving.told import GUARD
from roost.rollout.environments.environment import Observation
from roost.rollout.scenario import Task
from roost.sandbox.limits import Limits

FULL = 503
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between asking a full server again


class AppWorldEnvironments:
    """Worlds of apps in which agents act by code.

    By default `servers` processes of our own are started, with `worlds` at a time each; 0 servers is one in this very
    process. `urls` are servers that run already, ours or AppWorld's. `appworld_python` is an interpreter that has
    AppWorld, of which `servers` processes are started, with one world each, on the data in `appworld_root`.

    An episode is worth 1 if its task was solved; with `partial`, the part of the tests that passed.
    """

    def __init__(
        self,
        servers: int = 1,
        worlds: int = 64,
        urls: Sequence[str] | None = None,
        appworld_python: str | None = None,
        appworld_root: str | None = None,
        partial: bool = False,
        shows_supervisor: bool = True,
        limits: Mapping[str, Any] | None = None,
        idle_s: float = 1800.0,
        allows_weak: bool = False,
        options: Mapping[str, Any] | None = None,
        answer_limit_s: float = 120.0,
        start_limit_s: float = 300.0,
    ) -> None:
        """`limits` are those of each sandbox; `options` are sent with /initialize, for AppWorld's own settings."""
        self.partial, self.shows_supervisor, self.options = partial, shows_supervisor, dict(options or {})
        self.answer_limit_s = answer_limit_s
        if servers < 0:
            raise ValueError(f"servers is {servers}; it is 0 for one in this process, or a number of processes")
        if urls is not None and appworld_python is not None:
            raise ValueError("urls and appworld_python are both given; servers run already, or are to be started")
        hosts: list[Host]
        if urls is not None:
            hosts = [GivenServer(url) for url in urls]
        elif appworld_python is not None:
            root = root_of_appworld(appworld_root)
            hosts = [appworld_server(number, appworld_python, root, start_limit_s) for number in range(servers)]
        else:
            own = ServingLimits(worlds, idle_s, sandbox=Limits(**(limits or {})), allows_weak=allows_weak)
            hosts = [own_server(number, own, start_limit_s) for number in range(servers)] or [LocalServer(own)]
        if not hosts:
            raise ValueError("there is no server to play on; give urls, or servers of at least 1")
        self._pool = ServerPool([PooledServer(host, answer_limit_s) for host in hosts])

    async def open(self) -> AppWorldEnvironment:
        server, connection = await self._pool.take()
        return AppWorldEnvironment(self, server, connection)

    async def close(self) -> None:
        await self._pool.close()

    def release(self, server: PooledServer) -> None:
        self._pool.give_back(server)


class AppWorldEnvironment:
    """The world of one episode. Actions are code, and what is shown is what the code printed."""

    def __init__(self, environments: AppWorldEnvironments, server: PooledServer, connection: Connection) -> None:
        self._environments, self._server, self._connection = environments, server, connection
        self._world: dict[str, str] = {}  # what says which world is meant
        self._is_closed = False

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Begin the task whose id is the `task_id` of its data; a world has no chance in it, so seeds do nothing."""
        self._world = {"task_id": str(task.data["task_id"])}
        if self._server.takes_episodes:
            self._world["episode"] = uuid.uuid4().hex
        begun = await self._begun({**self._environments.options, "experiment_name": self._server.name})
        return Observation(first_shown(begun, self._environments.shows_supervisor), info=dict(begun))

    async def step(self, action: Any) -> Observation:
        """Run code."""
        code = str(action).encode(errors="replace").decode()  # halves of characters are no text
        output = str(await self._ask("/execute", code=code))
        return Observation(output, is_over=bool(await self._ask("/task_completed")))

    async def score(self) -> float:
        report = await self._ask("/evaluate", suppress_errors=True)
        return share_passed(report) if self._environments.partial else float(bool(report["success"]))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._world:
                with contextlib.suppress(ServerLost, ServerRefused):  # then the world is gone anyway
                    await self._ask("/close")
        finally:
            self._environments.release(self._server)

    async def _begun(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The task as the server tells it; one that has no place left is asked again."""
        pause = FIRST_PAUSE_S
        deadline = asyncio.get_running_loop().time() + self._environments.answer_limit_s
        while True:
            try:
                begun: Mapping[str, Any] = await self._ask("/initialize", **given)
                return begun
            except ServerRefused as error:
                if error.status != FULL or asyncio.get_running_loop().time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _ask(self, route: str, **fields: Any) -> Any:
        if not self._world:
            raise RuntimeError(f"there is no world for {route} yet; reset the environment first")
        try:
            return await self._connection.ask(route, {**self._world, **fields})
        except ServerLost as error:
            self._server.doubt()
            raise ServerLost(f"{error}; the episode's world is lost") from error


def first_shown(begun: Mapping[str, Any], shows_supervisor: bool = True) -> str:
    """What is to be done, and for whom.

    >>> ada = {"first_name": "Ada", "last_name": "Berg", "email": "ada@example.com", "phone_number": "555-0100"}
    >>> print(first_shown({"instruction": "Buy milk.", "supervisor": ada}))
    Buy milk.
    <BLANKLINE>
    You act for Ada Berg (email ada@example.com, phone 555-0100).
    """
    instruction = str(begun["instruction"])
    if not shows_supervisor:
        return instruction
    who = begun["supervisor"]
    name = f"{who['first_name']} {who['last_name']}"
    return f"{instruction}\n\nYou act for {name} (email {who['email']}, phone {who['phone_number']})."


def share_passed(report: Mapping[str, Any]) -> float:
    """The part of the tests that passed; nothing as long as only those did that doing nothing passes.

    >>> passed = [{"label": "no_op_pass"}, {"label": "no_op_fail"}]
    >>> share_passed({"num_tests": 4, "passes": passed}), share_passed({"num_tests": 4, "passes": passed[:1]})
    (0.5, 0.0)
    """
    passes = report["passes"]
    if all(test.get("label") == GUARD for test in passes):
        return 0.0
    return len(passes) / int(report["num_tests"])
