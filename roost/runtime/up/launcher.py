"""`roost up` on a node: the head waits for the other nodes and runs the command; the others join its Ray."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roost.cluster.allocation import Allocation, AllocationError
from roost.config.findings import counted
from roost.procs.signals import REQUEUE_CODE
from roost.runtime.probe import interface_of
from roost.runtime.ray_connection import make_token_private
from roost.runtime.up.local import Command, LocalRay, RayFailed, job_environ, ray_options
from roost.runtime.up.rendezvous import MAX_MESSAGE, TRIES, Caller, OtherJob, Peer, Refused, answer, call, ports_of

Say = Callable[[str], None]

REPORT_AFTER = 15.0  # seconds until missing nodes are reported
REPORT_EVERY = 60.0
CALL_AGAIN = 0.5
TOKEN_LIMIT = 30.0  # seconds for a token file to appear on a shared disk
LOST_GRACE = 10.0  # seconds for the command to end after a node was lost
GOODBYE_LIMIT = 60.0  # seconds for the others to end
SAME_SIGNAL_S = 30.0  # a scheduler signals every node: repeats of a signal within this time are ignored
SAME_INTERRUPT_S = 2.0  # the same for SIGINT; shorter, as users press Ctrl-C again to end the command at once
# The signal that the command gets for each. A closed ssh connection sends SIGHUP, which would end it without a save.
SIGNALS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
TOKEN_FILE = Path(".ray/auth_token")  # in the home folder


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `roost up`."""

    command: tuple[str, ...]
    timeout: float  # seconds for all nodes to join
    grace: float  # seconds for the command to end after a SIGTERM
    port: int | None = None  # first port at which nodes look for the head
    ports: tuple[int, int] | None = None  # first and last port of the rendezvous of nodes and of Ray; None: any

    def rendezvous_ports(self, job: str) -> Sequence[int]:
        """Ports at which nodes look for the head."""
        return ports_of(job, self.port if self.port is not None or self.ports is None else self.ports[0])

    def ray_ports(self) -> tuple[int, int] | None:
        """First and last port of Ray."""
        return None if self.ports is None else (self.ports[0] + TRIES, self.ports[1])


@dataclass(frozen=True, slots=True)
class Ending:
    """Exit code of a job, and the cause if it was not its command."""

    code: int
    cause: str = ""


def run_up(allocation: Allocation, options: UpOptions, environ: Mapping[str, str], say: Say) -> int:
    """Run this node's part of the job to its end; return the exit code, which is the same on all nodes."""
    launcher = Head if allocation.rank == 0 else Follower
    return asyncio.run(launcher(allocation, options, environ, say).run())


def read_token(environ: Mapping[str, str]) -> str:
    """The Ray token that this job's nodes share; empty if there is none."""
    if environ.get("RAY_AUTH_TOKEN"):
        return environ["RAY_AUTH_TOKEN"].strip()
    file = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / TOKEN_FILE)
    try:
        return file.expanduser().read_text(encoding="utf-8").strip()
    except OSError:
        return ""


SHARE_TOKEN = (
    f"export the same RAY_AUTH_TOKEN on every node (openssl rand -hex 32), or let all nodes see ~/{TOKEN_FILE} of the "
    "head"
)


class NodeLauncher:
    """Launcher of one node: starts its Ray, handles its signals, and ends with the job."""

    def __init__(self, allocation: Allocation, options: UpOptions, environ: Mapping[str, str], say: Say) -> None:
        self._allocation, self._options = allocation, options
        self._print = say
        self._environ = job_environ(environ, allocation)
        self._job = allocation.job or allocation.head or ""
        self._ray = LocalRay()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending: asyncio.Future[Ending]
        self._started = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        for number, passed_on in SIGNALS.items():
            loop.add_signal_handler(number, self.signalled, passed_on)
        try:
            self._spawn(self._work())
            ending = await self._ending
            await self._end(ending)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._ray.stop()
            await self._leave()
        return ending.code

    def end(self, code: int, cause: str = "") -> None:
        """End the job; the first cause counts, and is printed at once, before errors that follow from it."""
        if not self._ending.done():
            if cause:
                self._say(cause)
            self._ending.set_result(Ending(code, cause))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone after a SIGHUP
            self._print(text)

    def signalled(self, number: signal.Signals) -> None:
        raise NotImplementedError

    async def _work(self) -> None:
        raise NotImplementedError

    async def _end(self, ending: Ending) -> None:
        raise NotImplementedError

    async def _leave(self) -> None:
        raise NotImplementedError

    def _spawn(self, work: Awaitable[None]) -> None:
        """Run work concurrently; an error ends the job."""

        async def guarded() -> None:
            try:
                await work
            except (OSError, ValueError, RayFailed) as error:
                self._failed(str(error))
            except Exception as error:  # otherwise the job would wait forever
                self._failed(f"{type(error).__name__}: {error}")

        self._tasks.add(asyncio.create_task(guarded()))

    def _failed(self, cause: str) -> None:
        self.end(1, cause)

    async def _start_ray(self, address: str | None, head: str | None) -> None:
        """Start Ray on this node; its exit ends the job."""
        ports = self._options.ray_ports()
        make_options = partial(ray_options, self._allocation, address, head, self._environ, self._say, ports=ports)
        await self._ray.start(make_options, self._environ, self._say)
        network = f" at {address} ({interface_of(address)})" if address is not None else ""
        self._say(f"Ray runs on {self._allocation.name(self._allocation.rank)}{network}")
        self._spawn(self._watch_ray())

    async def _watch_ray(self) -> None:
        self._failed(await self._ray.ended())

    def _ended_at_start(self, number: signal.Signals) -> None:
        code = REQUEUE_CODE if number == signal.SIGUSR1 else 128 + number
        self.end(code, f"{number.name} ended the job before its command started")

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._started


class Head(NodeLauncher):
    """Rank 0: the other nodes connect to it, and it runs the command."""

    def __init__(self, allocation: Allocation, options: UpOptions, environ: Mapping[str, str], say: Say) -> None:
        super().__init__(allocation, options, environ, say)
        self._peers: dict[int, Peer] = {}
        self._callers: dict[int, Caller] = {}
        self._joined: set[int] = set()
        self._address: str | None = None
        self._first_called, self._all_joined = asyncio.Event(), asyncio.Event()
        self._command = Command(options.command)
        self._forwarded: dict[signal.Signals, float] = {}  # time of the last one, by signal

    async def _work(self) -> None:
        nodes = self._allocation.nodes
        if nodes > 1:
            await self._listen()
            self._spawn(self._report_missing())
            await self._first_called.wait()
        await self._start_ray(self._address, None)
        self._joined.add(0)
        for peer in self._peers.values():
            peer.send(ray=self._ray.address)
        if nodes > 1:
            await self._all_joined.wait()
        words = " ".join(self._options.command)
        self._say(f"{counted(nodes, 'node')} joined after {self._waited:.0f} s; running {words}")
        self.end(await self._command.run({**self._environ, "RAY_ADDRESS": self._ray.address}))

    async def _listen(self) -> None:
        self._token = read_token(self._environ)
        if not self._token:
            await asyncio.to_thread(make_token_private)
            self._token = read_token(self._environ)
        for port in self._options.rendezvous_ports(self._job):
            try:
                self._server = await asyncio.start_server(self._accept, port=port, limit=MAX_MESSAGE)
            except OSError:
                continue
            self._say(f"waiting for {counted(self._allocation.nodes - 1, 'node')} to connect on port {port}")
            return
        taken = self._options.rendezvous_ports(self._job)
        raise OSError(f"ports {taken[0]} to {taken[-1]} are in use; choose others with --port")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        caller = await answer(peer, self._job, self._token)
        if caller is None:
            await peer.close()
            return
        refused = self._refused(caller)
        if refused:
            peer.send(refused=refused)
            await peer.close()
            return
        peer.send(welcome=True)
        self._peers[caller.rank], self._callers[caller.rank] = peer, caller
        if not self._first_called.is_set():
            # Other nodes reach this one at this address; its host name may resolve to loopback.
            self._address = peer.local_address
            self._first_called.set()
        if self._ray.address:
            peer.send(ray=self._ray.address)
        async for message in peer.messages():
            self._handle(caller, message)
        del self._peers[caller.rank]
        if not self._ending.done():
            self.end(1, f"{self._describe(caller)} is gone: its `roost up` was killed, or the machine does not answer")
        await peer.close()

    def _refused(self, caller: Caller) -> str:
        """Reason to refuse a node; empty if it may join."""
        if caller.nodes != self._allocation.nodes:
            return f"the head counts {self._allocation.nodes} nodes, this node {caller.nodes}"
        if not 0 < caller.rank < caller.nodes:
            return f"rank {caller.rank} is not one of the other nodes'"
        if caller.rank in self._peers:
            return f"rank {caller.rank} is taken by {self._describe(self._callers[caller.rank])}"
        return ""

    def _handle(self, caller: Caller, message: dict[str, Any]) -> None:
        if "joined" in message:
            self._joined.add(caller.rank)
            if len(self._joined) == self._allocation.nodes:
                self._all_joined.set()
        if "failed" in message:
            self.end(1, f"{self._describe(caller)}: {message['failed']}")
        if "signal" in message:
            self._forward(signal.Signals(message["signal"]), f"on {self._describe(caller)}", is_own=False)

    def _describe(self, caller: Caller) -> str:
        return f"node {caller.rank} ({caller.host})"

    async def _report_missing(self) -> None:
        """Report missing nodes periodically until all have joined; end the job after the timeout."""
        report_at = REPORT_AFTER
        while not self._all_joined.is_set():
            await asyncio.sleep(min(0.5, self._options.timeout / 10))
            if self._all_joined.is_set() or self._waited < min(report_at, self._options.timeout):
                continue
            missing = self._missing()
            if self._waited >= self._options.timeout:
                self.end(1, f"{missing} after {self._options.timeout:g} s; is `roost up` running there?")
                return
            self._say(f"{missing} after {self._waited:.0f} s; waiting up to {self._options.timeout:g} s")
            report_at += REPORT_EVERY

    def _missing(self) -> str:
        ranks = range(self._allocation.nodes)
        absent = [self._allocation.name(rank) for rank in ranks if rank and rank not in self._peers]
        if absent:
            return f"{', '.join(absent)} {'has' if len(absent) == 1 else 'have'} not connected"
        starting = [self._allocation.name(rank) for rank in ranks if rank not in self._joined]
        return f"Ray has not started on {', '.join(starting)}"

    # Signals ---------------------------------------------------------------------------------------------------------

    def signalled(self, number: signal.Signals) -> None:
        self._forward(number, "here", is_own=True)

    def _forward(self, number: signal.Signals, where: str, is_own: bool) -> None:
        """Pass a signal on to the command once: a second SIGTERM would abort the save that the first one requested.

        The head's own signal is passed on again after a while, because a user may send it to end the command; signals
        of the other nodes are not.
        """
        now = time.monotonic()
        same_s = SAME_INTERRUPT_S if number == signal.SIGINT else SAME_SIGNAL_S
        is_new = number not in self._forwarded or (is_own and now - self._forwarded[number] > same_s)
        if self._command.has_ended:
            return
        if not self._command.is_running:
            self._ended_at_start(number)
        elif is_new:
            self._forwarded[number] = now
            self._say(f"{number.name} {where}: passing it on to the command")
            self._command.send(number)
            if number != signal.SIGUSR1:
                self._spawn(self._end_command())

    async def _end_command(self) -> None:
        await asyncio.sleep(self._options.grace)
        self._say(f"the command did not end within {self._options.grace:g} s; ending it")
        self._command.stop(0.0)

    # The end ---------------------------------------------------------------------------------------------------------

    async def _end(self, ending: Ending) -> None:
        for peer in self._peers.values():
            peer.send(end=ending.code, cause=ending.cause)
        if self._command.is_running:
            self._command.stop(LOST_GRACE)
            while self._command.is_running:
                await asyncio.sleep(0.1)

    async def _leave(self) -> None:
        """Wait until the other nodes have ended; a scheduler may kill them when the first task exits."""
        deadline = time.monotonic() + GOODBYE_LIMIT
        while self._peers and time.monotonic() < deadline:
            await asyncio.sleep(0.1)


class Follower(NodeLauncher):
    """Any other rank: connects to the head, starts Ray, and waits until the job ends."""

    _peer: Peer | None = None

    async def _work(self) -> None:
        head = self._allocation.head
        if head is None:
            raise AllocationError("no variable has the address of rank 0: export ROOST_HEAD_ADDRESS=HOST on every node")
        self._peer = await self._call(head)
        async for message in self._peer.messages():
            self._handle(message)
        self.end(1, f"the head at {head} is gone: its `roost up` was killed, or the machine does not answer")

    async def _call(self, head: str) -> Peer:
        """Connect to the head; retry until it answers."""
        ports = self._options.rendezvous_ports(self._job)
        rank, hosts = self._allocation.rank, self._allocation.hosts
        caller = Caller(rank, self._allocation.nodes, hosts[rank] if hosts else socket.gethostname())
        report_at, problem = REPORT_AFTER, ""
        while self._waited < self._options.timeout:
            for port in ports:
                try:
                    return await self._call_port(head, port, caller)
                except OtherJob:
                    continue
                except Refused:
                    raise
                except OSError as error:
                    problem = str(error)
            if self._waited >= report_at:
                self._say(f"the head at {head} has not answered for {self._waited:.0f} s: {problem}")
                report_at += REPORT_EVERY
            await asyncio.sleep(CALL_AGAIN)
        raise ConnectionError(f"the head at {head} did not answer within {self._options.timeout:g} s: {problem}")

    async def _call_port(self, head: str, port: int, caller: Caller) -> Peer:
        try:
            return await call(head, port, self._job, caller, await self._wait_for_token())
        except Refused as error:
            lacks_help = "token" in str(error) and SHARE_TOKEN not in str(error)
            raise Refused(f"{error}; {SHARE_TOKEN}" if lacks_help else str(error)) from None

    async def _wait_for_token(self) -> str:
        while not (token := read_token(self._environ)):
            if self._waited > TOKEN_LIMIT:
                raise Refused(f"this node has no token; {SHARE_TOKEN}")
            await asyncio.sleep(CALL_AGAIN)
        return token

    def _handle(self, message: dict[str, Any]) -> None:
        if "ray" in message:
            self._spawn(self._join(str(message["ray"])))
        if "end" in message:
            self.end(int(message["end"]), str(message["cause"]))

    async def _join(self, ray_address: str) -> None:
        if self._peer is not None:
            await self._start_ray(self._peer.local_address, ray_address)
            self._peer.send(joined=True)

    def _failed(self, cause: str) -> None:
        if self._peer is not None and not self._ending.done():
            self._peer.send(failed=cause)
        self.end(1, cause)

    def signalled(self, number: signal.Signals) -> None:
        """Pass a signal on to the head, whose command saves its state; this node ends with the job."""
        if self._peer is None:
            self._ended_at_start(number)
        else:
            self._peer.send(signal=int(number))

    async def _end(self, ending: Ending) -> None:
        pass

    async def _leave(self) -> None:
        if self._peer is not None:
            await self._peer.close()
