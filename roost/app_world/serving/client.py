"""Environments of app worlds: a pool of servers and their processes, and tasks from AppWorld's own data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from roost.app_world.serving.command_line import ServingLimits, options_of
from roost.app_world.serving.connection import Connection, ServerLost, ServerRefused
from roost.app_world.serving.server import GUARD, serving
from roost.net.addresses import PortLeases
from roost.procs.child import last_lines, start_supervised
from roost.procs.child_env import child_env
from roost.procs.server_keeper import KILL_LIMIT, TERMINATE_LIMIT, Link
from roost.rollout.environments.environment import Observation
from roost.rollout.episode import Split, Task
from roost.sandbox.limits import Limits, remove

GRACE_S = 3.0
MARGIN_S = 5.0  # by which a keeper may exceed its own limits
POLL_S = 0.05
LINES_SHOWN = 15


class SupervisedProcess:
    """A program with a keeper process, which ends it when this process ends or drops the object."""

    def __init__(self, name: str, link: Link, pid: int, log: Path) -> None:
        self._name, self._link, self.pid, self._log = name, link, pid, log
        self._exit_code: int | None = None
        self._is_over = False

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> SupervisedProcess:
        """Start a program; its output goes to the log."""
        starting = asyncio.ensure_future(asyncio.to_thread(cls._start, name, command, env, log))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread cannot be cancelled: stop what it started
            await (await starting).stop()
            raise

    @classmethod
    def _start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> SupervisedProcess:
        return cls(name, *start_supervised(name, command, env, log), log)

    @property
    def is_alive(self) -> bool:
        self._read_messages()
        return self._exit_code is None and not self._is_over and not self._link.is_closed

    def describe_end(self) -> str:
        """Describe how the process ended, with its last output."""
        self._read_messages()
        how = "ended" if self._exit_code is None else f"ended with exit code {self._exit_code}"
        printed = last_lines(self._log, LINES_SHOWN).strip()
        return f"{self._name} {how}" + (f"; its last output:\n{printed}" if printed else "")

    async def stop(self) -> None:
        """End the process and everything it started. May be called more than once."""
        self._link.tell(stop=GRACE_S)
        deadline = time.monotonic() + GRACE_S + TERMINATE_LIMIT + KILL_LIMIT + MARGIN_S
        while not self._is_over and not self._link.is_closed and time.monotonic() < deadline:
            self._read_messages()
            await asyncio.sleep(POLL_S)
        self._link.close()

    def _read_messages(self) -> None:
        """Read messages of the keeper."""
        for message in self._link.receive(wait=0.0):
            self._exit_code = message["ended"]
            self._is_over = self._is_over or "ending" in message


FIRST_START_PAUSE_S, LONGEST_START_PAUSE_S = 0.05, 0.5  # backoff while a server starts
PACKAGES_FROM = str(Path(__file__).parents[3])

Command = Callable[[int], Sequence[str]]  # from the port


class WorldServer(Protocol):
    """Starts and stops one server."""

    @property
    def is_running(self) -> bool: ...

    async def start(self) -> str:
        """Start or restart the server; return its URL once it answers."""
        ...

    async def stop(self) -> None: ...


class RemoteServer:
    """A server that Roost does not start or stop."""

    is_running = True

    def __init__(self, url: str) -> None:
        self._url = url

    async def start(self) -> str:
        return self._url

    async def stop(self) -> None:
        pass


class LocalServer:
    """A server in this event loop."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._serving = contextlib.AsyncExitStack()
        self.is_running = False

    async def start(self) -> str:
        await self.stop()
        url = await self._serving.enter_async_context(serving(self._limits))
        self.is_running = True
        return url

    async def stop(self) -> None:
        self.is_running = False
        await self._serving.aclose()


class SpawnedServer:
    """A server in its own process, with a folder for its log and the files of its sandboxes."""

    def __init__(self, name: str, command: Command, env: Mapping[str, str], start_limit_s: float) -> None:
        self._name, self._command, self._env, self._limit_s = name, command, dict(env), start_limit_s
        self._process: SupervisedProcess | None = None
        self._ports = PortLeases()
        self._folder: Path | None = None
        self._at_exit: weakref.finalize[..., SpawnedServer] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_alive

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        await self.stop()
        try:
            return await self._started()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        self._ports.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove, folder)
        if self._at_exit is not None:
            self._at_exit.detach()

    async def _started(self) -> str:
        self._folder = Path(tempfile.mkdtemp(prefix="roost-app-world-"))
        self._at_exit = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # if not stopped
        port = self._ports.lease()
        env = child_env(os.environ, {**self._env, "TMPDIR": str(self._folder)})
        process = await SupervisedProcess.start(self._name, self._command(port), env, self._folder / "log")
        self._process = process
        url = f"http://127.0.0.1:{port}"
        await _wait_until_ready(url, process, self._limit_s)
        return url


def roost_server(number: int, limits: ServingLimits, start_limit_s: float) -> SpawnedServer:
    """Roost's server in its own process."""
    command = [sys.executable, "-m", "roost.app_world.serving", *options_of(limits), "--port"]
    path = os.pathsep.join(filter(None, (PACKAGES_FROM, os.environ.get("PYTHONPATH"))))
    return SpawnedServer(f"app world {number}", lambda port: [*command, str(port)], {"PYTHONPATH": path}, start_limit_s)


def appworld_server(number: int, python: str, root: Path, start_limit_s: float) -> SpawnedServer:
    """AppWorld's server, run by an interpreter of its own, as its packages conflict with Roost's."""
    command = [python, "-m", "appworld.cli", "serve", "environment", "--root", str(root), "--port"]
    env = {"APPWORLD_ROOT": str(root), "PYTHONPATH": ""}
    return SpawnedServer(f"AppWorld {number}", lambda port: [*command, str(port)], env, start_limit_s)


async def _wait_until_ready(url: str, process: SupervisedProcess, limit_s: float) -> None:
    """Wait until the server of this process answers."""
    connection, deadline, pause = Connection(url, limit_s), time.monotonic() + limit_s, FIRST_START_PAUSE_S
    try:
        while True:
            try:
                await connection.about()
                return
            except (ServerLost, ServerRefused):
                if not process.is_alive:
                    raise ServerLost(process.describe_end()) from None
                if time.monotonic() > deadline:
                    raise ServerLost(f"the server at {url} did not answer within {limit_s:g} s of its start") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_START_PAUSE_S)
    finally:
        await connection.close()


def root_of_appworld(root: str | None = None) -> Path:
    """Folder with AppWorld's data: `root`, APPWORLD_ROOT, or the current folder."""
    folder = Path(root or os.environ.get("APPWORLD_ROOT") or ".").expanduser().resolve()
    if not (folder / "data" / "tasks").is_dir():
        raise ValueError(
            f"AppWorld's data is not in {folder / 'data'}; run `appworld download data --root {folder}`, or name the "
            "folder that has it by root or APPWORLD_ROOT"
        )
    return folder


class AppWorldDataTasks:
    """Tasks of AppWorld's splits: `split` for training, `evaluation_split` for evaluation."""

    def __init__(self, split: str = "train", root: str | None = None, evaluation_split: str = "dev") -> None:
        self._data = root_of_appworld(root) / "data"
        self._ids = {Split.TRAIN: self._listed(split), Split.EVALUATION: self._listed(evaluation_split)}
        common = set(self._ids[Split.TRAIN]) & set(self._ids[Split.EVALUATION])
        if common:
            raise ValueError(
                f"{split} and {evaluation_split} have {len(common)} tasks in common; choose two that differ"
            )

    def size(self, split: Split) -> int:
        return len(self._ids[split])

    def task(self, split: Split, index: int) -> Task:
        task_id = self._ids[split][index]
        folder = self._data / "tasks" / task_id
        instruction = json.loads((folder / "specs.json").read_text(encoding="utf-8"))["instruction"]
        difficulty = _difficulty(folder)
        data = {
            "task_id": task_id,
            "instruction": instruction,
            "difficulty": difficulty,
            "scenario_id": task_id.partition("_")[0],
        }
        tag = "appworld" if difficulty is None else f"appworld.{difficulty}"
        return Task(f"{task_id}: {instruction}", data, tag)

    def _listed(self, split: str) -> tuple[str, ...]:
        path = self._data / "datasets" / f"{split}.txt"
        if not path.is_file():
            known = ", ".join(sorted(other.stem for other in path.parent.glob("*.txt"))) or "none"
            raise ValueError(f"AppWorld's data has no split {split!r}; there are: {known}")
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(line.partition(":")[0].strip() for line in lines if line.strip())  # a tag may follow the id


def _difficulty(folder: Path) -> int | None:
    """Difficulty of a task; None if the data lack it, as for secret splits."""
    path = folder / "ground_truth" / "metadata.json"
    return json.loads(path.read_text(encoding="utf-8")).get("difficulty") if path.is_file() else None


class PooledServer:
    """A server of the pool, started when needed."""

    def __init__(self, backend: WorldServer, answer_limit_s: float) -> None:
        self.backend = backend
        self.name = f"roost_{secrets.token_hex(4)}"  # experiment name, for files that the server writes
        self.in_use = 0
        self.capacity = 1  # worlds
        self.takes_episodes = False  # tells worlds apart by episode, as Roost's server does
        self._answer_limit_s = answer_limit_s
        self._connection: Connection | None = None
        self._is_suspect = False
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def ready(self) -> Connection:
        """Return a connection; start the server if it does not run."""
        async with self._turn:
            if self._is_closed:
                raise ServerLost("the environments are closed")
            connection = self._connection
            if connection is None or not await self._is_healthy(connection):
                connection = await self._start()
            return connection

    def mark_suspect(self) -> None:
        """Check the server before its next use, because it did not answer."""
        self._is_suspect = True

    async def close(self) -> None:
        """Stop the server for good."""
        async with self._turn:
            self._is_closed = True
            await self._disconnect()
            await self.backend.stop()

    async def _is_healthy(self, connection: Connection) -> bool:
        if not self.backend.is_running:
            return False
        if self._is_suspect:
            try:
                await connection.about()
            except (ServerLost, ServerRefused):
                return False
            self._is_suspect = False
        return True

    async def _start(self) -> Connection:
        await self._disconnect()
        connection = Connection(await self.backend.start(), self._answer_limit_s)
        try:
            about = await connection.about()
        except BaseException:
            await connection.close()
            raise
        self.takes_episodes = about.get("episodes") is True
        if self.takes_episodes:
            self.capacity = int(about.get("worlds", 1))
        self._connection, self._is_suspect = connection, False
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class ServerPool:
    """Hands out slots on servers, the emptiest first."""

    def __init__(self, servers: Sequence[PooledServer]) -> None:
        self._servers = list(servers)
        self._free: asyncio.Semaphore | None = None  # created once the servers run and their capacity is known
        self._turn = asyncio.Lock()

    async def take(self) -> tuple[PooledServer, Connection]:
        """Take a slot on a healthy server; wait while all are taken."""
        free = await self._open_slots()
        await free.acquire()
        try:
            return await self._acquire()
        except BaseException:
            free.release()
            raise

    def release(self, server: PooledServer) -> None:
        server.in_use -= 1
        if self._free is not None:
            self._free.release()

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))

    async def _open_slots(self) -> asyncio.Semaphore:
        async with self._turn:
            if self._free is None:
                begun = await asyncio.gather(*(server.ready() for server in self._servers), return_exceptions=True)
                for error in begun:
                    if isinstance(error, BaseException):
                        raise error
                self._free = asyncio.Semaphore(sum(server.capacity for server in self._servers))
            return self._free

    async def _acquire(self) -> tuple[PooledServer, Connection]:
        """Take a slot on the emptiest server, or on the next if that is lost: a lost server is always the emptiest."""
        lost: ServerLost | None = None
        for server in sorted(self._servers, key=lambda server: server.in_use / server.capacity):
            if server.in_use >= server.capacity:
                continue
            server.in_use += 1
            try:
                return server, await server.ready()
            except ServerLost as error:
                lost = error
                server.in_use -= 1
            except BaseException:
                server.in_use -= 1
                raise
        raise lost or ServerLost("no server has a free slot")


FULL = 503
FIRST_FULL_PAUSE_S, LONGEST_FULL_PAUSE_S = 0.1, 2.0  # backoff for a full server


class AppWorldEnvironments:
    """App worlds in which agents act by writing code.

    By default `servers` processes of Roost's server are started, with up to `worlds` worlds each; 0 runs one in this
    process. `urls` are running servers, Roost's or AppWorld's. `appworld_python` is an interpreter that has AppWorld:
    `servers` processes of it are started, with one world each, on the data in `appworld_root`.

    The reward is 1 if the task was solved; with `partial`, the share of tests that passed.
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
            raise ValueError(f"servers is {servers}; write 0 to run one in this process, or a number of processes")
        if urls is not None and appworld_python is not None:
            raise ValueError("urls and appworld_python are both given; leave out one of them")
        backends: list[WorldServer]
        if urls is not None:
            backends = [RemoteServer(url) for url in urls]
        elif appworld_python is not None:
            root = root_of_appworld(appworld_root)
            backends = [appworld_server(number, appworld_python, root, start_limit_s) for number in range(servers)]
        else:
            own = ServingLimits(worlds, idle_s, sandbox=Limits(**(limits or {})), allows_weak=allows_weak)
            backends = [roost_server(number, own, start_limit_s) for number in range(servers)] or [LocalServer(own)]
        if not backends:
            raise ValueError("there is no server; give urls, or set servers to 1 or more")
        self._pool = ServerPool([PooledServer(backend, answer_limit_s) for backend in backends])

    async def open(self) -> AppWorldEnvironment:
        server, connection = await self._pool.take()
        return AppWorldEnvironment(self, server, connection)

    async def close(self) -> None:
        await self._pool.close()

    def release(self, server: PooledServer) -> None:
        self._pool.release(server)


class AppWorldEnvironment:
    """The world of one episode. Actions are code, observations are its output."""

    def __init__(self, environments: AppWorldEnvironments, server: PooledServer, connection: Connection) -> None:
        self._environments, self._server, self._connection = environments, server, connection
        self._world: dict[str, str] = {}  # fields that identify the world in requests
        self._is_closed = False

    async def reset(self, task: Task, seed: int | None = None) -> Observation:
        """Start the task with the `task_id` of its data; worlds are deterministic, so seeds have no effect."""
        self._world = {"task_id": str(task.data["task_id"])}
        if self._server.takes_episodes:
            self._world["episode"] = uuid.uuid4().hex
        begun = await self._begun({**self._environments.options, "experiment_name": self._server.name})
        return Observation(first_shown(begun, self._environments.shows_supervisor), info=dict(begun))

    async def step(self, action: Any) -> Observation:
        """Run code."""
        code = str(action).encode(errors="replace").decode()  # lone surrogates cannot be encoded
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
                with contextlib.suppress(ServerLost, ServerRefused):  # the world is gone in that case
                    await self._ask("/close")
        finally:
            self._environments.release(self._server)

    async def _begun(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start the task on the server; retry a full server until the limit."""
        pause = FIRST_FULL_PAUSE_S
        deadline = asyncio.get_running_loop().time() + self._environments.answer_limit_s
        while True:
            try:
                begun: Mapping[str, Any] = await self._ask("/initialize", **given)
                return begun
            except ServerRefused as error:
                if error.status != FULL or asyncio.get_running_loop().time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_FULL_PAUSE_S)

    async def _ask(self, route: str, **fields: Any) -> Any:
        if not self._world:
            raise RuntimeError(f"there is no world for {route} yet; reset the environment first")
        try:
            return await self._connection.ask(route, {**self._world, **fields})
        except ServerLost as error:
            self._server.mark_suspect()
            raise ServerLost(f"{error}; the episode's world is lost") from error


def first_shown(begun: Mapping[str, Any], shows_supervisor: bool = True) -> str:
    """The instruction, and the person the agent acts for.

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
    """Share of passed tests; 0 if only tests passed that also pass when nothing is done.

    >>> passed = [{"label": "no_op_pass"}, {"label": "no_op_fail"}]
    >>> share_passed({"num_tests": 4, "passes": passed}), share_passed({"num_tests": 4, "passes": passed[:1]})
    (0.5, 0.0)
    """
    passes = report["passes"]
    if all(test.get("label") == GUARD for test in passes):
        return 0.0
    return len(passes) / int(report["num_tests"])
