"""The node daemon: one small process per node that serves and watches its workers and reports their failures."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray

from roost.procs.child import last_lines, read_from
from roost.procs.exit_watch import ProcessWatch
from roost.procs.files import ScratchFolder
from roost.runtime import probe
from roost.runtime.membership import NodeReport
from roost.runtime.ray_errors import PROCESS_LOST, cause_of, first_line
from roost.trace.spans import Span
from roost.transport.context import LOG_LINES, Address, DaemonContact, Failure, FailureKind, PeerLost
from roost.transport.directory import Directory, GroupEntry
from roost.transport.exchange import Exchange
from roost.transport.shared_memory import BIG, INLINE_LIMIT, OutgoingBatch, WirePacket
from roost.transport.socket_server import SocketServer

KEPT_SPANS = 200_000  # of each worker


class WorkerEntry(NamedTuple):
    """A worker registered with its node daemon."""

    address: Address
    pid: int
    devices: tuple[int, ...]
    log_path: str
    max_restarts: int


class Assignment(NamedTuple):
    """Setup of a worker: the fields its daemon needs, and the whole pickled for the worker."""

    devices: tuple[int, ...]
    log_path: str
    max_restarts: int
    packed: bytes


class NodeDaemon:
    """Implementation behind the daemon's Ray actor. It runs in one event loop, so nothing here needs a lock."""

    def __init__(self, driver_dir: str, driver_mark: str, scratch: Path | None = None) -> None:
        self._rank = -1
        self._daemons: Sequence[Any] = ()
        self._lead: Any = None
        self._directory: Directory | None = None
        self._exchange: Exchange | None = None
        self._server: SocketServer | None = None
        self._workers: dict[Address, WorkerEntry] = {}
        self._deaths: dict[Address, int] = {}
        self._assignments: defaultdict[Address, asyncio.Future[Assignment]] = defaultdict(asyncio.Future)
        self._expected: set[Address] = set()  # workers being stopped: their exit is not a failure
        self._failures: dict[Address, Failure] = {}
        self._is_ending = False
        self._spans: dict[Address, tuple[tuple[int, ...], deque[Span]]] = {}  # with the devices of the worker
        self._dropped: dict[Address, int] = {}
        self._watch = ProcessWatch()
        self._scratch = ScratchFolder("daemon", scratch)
        self._folder = self._scratch.path
        # If this node sees the driver's folder (same machine or shared disk), workers write their logs there.
        self._sees_driver_dir = _contains(Path(driver_dir) / probe.MARK, driver_mark)
        self._log_dir = Path(driver_dir) if self._sees_driver_dir else self._folder / "logs"

    # Joining a job ------------------------------------------------------------------------------------------------

    async def report(self, driver_node: str, counted: Mapping[str, float]) -> NodeReport:
        """Probe this node."""
        return await asyncio.get_running_loop().run_in_executor(
            None, probe.report, ray.get_runtime_context().get_node_id(), driver_node, dict(counted), dict(os.environ)
        )

    async def clock(self) -> int:
        return time.time_ns()

    async def check_interpreter(self, path: str) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, probe.check_interpreter, path)

    async def robots(self, kind: str, configs: Sequence[Mapping[str, Any]], rank: int) -> tuple[Any, list[str]]:
        """Declared devices completed from this node's environment variables, and the problems found."""
        return await asyncio.get_running_loop().run_in_executor(
            None, probe.robots, kind, list(configs), rank, dict(os.environ)
        )

    async def join(self, rank: int, daemons: Sequence[Any], lead: int) -> DaemonContact:
        """Join the job with a rank and open the socket for workers."""
        self._rank, self._daemons, self._lead = rank, daemons, daemons[lead]
        if rank == lead:
            self._directory = directory = Directory()
            for node, daemon in enumerate(daemons):
                if node != lead:
                    asyncio.get_running_loop().create_task(self._watch_node(node, daemon, directory))
        self._exchange = Exchange(rank, self._ask_node, self._look_up, self._last_failure, len(daemons))
        self._server = SocketServer(self._folder / "daemon", self._exchange.serve, self._receive_one_way)
        return DaemonContact(rank, socket.gethostname(), os.getpid(), str(self._server.path))

    @property
    def _hub(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("the daemon has not joined a job")
        return self._exchange

    # Between daemons -----------------------------------------------------------------------------------------------

    async def serve_node(
        self, who: Sequence[Any], op: str, args: tuple[Any, ...], wire: Sequence[Sequence[Any]]
    ) -> tuple[Any, list[WirePacket]]:
        return await self._hub.serve_node(Address(*who), op, args, [WirePacket(*piece) for piece in wire])

    async def _ask_node(
        self, node: int, who: Address, op: str, args: tuple[Any, ...], outgoing: OutgoingBatch
    ) -> tuple[Any, list[WirePacket]]:
        pieces = await outgoing.packed(_in_object_store)
        try:
            value, back = await self._daemons[node].ask.remote("serve_node", tuple(who), op, args, pieces)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except PROCESS_LOST:
            raise PeerLost(f"node {node} is lost") from None
        return value, [WirePacket(*piece) for piece in back]

    async def directory(self, method: str, *args: Any) -> Any:
        """Call a method of the job's directory, which only the lead daemon has."""
        if self._directory is None:
            raise RuntimeError("this daemon does not host the directory")
        return await getattr(self._directory, method)(*args)

    async def _look_up(self, method: str, *args: Any) -> Any:
        if self._directory is not None:
            return await self.directory(method, *args)
        try:
            return await self._lead.ask.remote("directory", method, *args)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except PROCESS_LOST:
            raise PeerLost("the node that hosts the job's directory is lost") from None

    async def note(self, text: str) -> None:
        """Add a worker's note to the job's directory."""
        await self._look_up("add_note", text)

    async def wait_forever(self) -> None:
        """Never return: the pending call fails when this node is lost."""
        await asyncio.Event().wait()

    async def _watch_node(self, node: int, daemon: Any, directory: Directory) -> None:
        while True:
            try:
                await daemon.ask.remote("wait_forever")
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(1)  # the network may recover; if the node is lost, Ray reports the actor's death
            except (*PROCESS_LOST, ray.exceptions.RayTaskError) as error:
                if not self._is_ending:
                    await self._lose_node(node, f"node {node} is lost: {first_line(error, 'no answer')}", directory)
                return

    async def _lose_node(self, node: int, why: str, directory: Directory) -> None:
        now = time.time_ns()
        workers = [
            Address(group.name, rank)
            for group in directory.groups()
            for rank, on in enumerate(group.nodes)
            if on == node
        ]
        others = [daemon for rank, daemon in enumerate(self._daemons) if rank not in (node, self._rank)]
        for who in workers:
            self._hub.lose(who, why, False)
            for daemon in others:
                daemon.ask.remote("lose", tuple(who), why, False)
        summary = f"{why}; it ran {', '.join(map(str, workers)) or 'no worker'}"
        who = workers[0] if workers else Address(f"node {node}", 0)
        await directory.add_failure(Failure(who, FailureKind.NODE_LOST, summary, now, node))

    # Workers ------------------------------------------------------------------------------------------------------

    async def log_dir(self) -> str:
        return str(self._log_dir)

    async def lease_port(self) -> int:
        return self._hub.ports.lease()

    async def release_port(self, port: int) -> None:
        self._hub.ports.release(port)

    async def assign(self, entries: Sequence[Sequence[Any]]) -> None:
        """Set the assignments of this node's workers, before or after they enroll."""
        for who, *parts in entries:
            self._assignments[Address(*who)].set_result(Assignment(*parts))

    async def enroll(self, who: Sequence[Any], pid: int) -> bytes:
        """Register a worker that started or restarted; return its pickled setup once assigned."""
        address = Address(*who)
        assignment = await asyncio.shield(self._assignments[address])
        entry = WorkerEntry(address, pid, assignment.devices, assignment.log_path, assignment.max_restarts)
        before = self._workers.get(entry.address)
        if before is not None:
            self._ended(before)  # the new process enrolled before the old one's exit was noticed
        if entry.address in self._deaths:
            await self._call_all("restarted", tuple(entry.address))
        self._workers[entry.address] = entry
        self._watch.watch(entry.pid, lambda pid: self._ended(entry))
        return assignment.packed

    async def expect_end(self, addresses: Sequence[Sequence[Any]]) -> None:
        """Expect these workers to exit: they are about to be stopped."""
        self._expected.update(Address(*who) for who in addresses)

    async def forget(self, addresses: Sequence[Sequence[Any]]) -> None:
        """Remove all state of a closed group's workers."""
        workers = [Address(*parts) for parts in addresses]
        self._hub.forget(workers)
        for who in workers:
            self._expected.discard(who)
            self._workers.pop(who, None)
            if who in self._assignments:
                self._assignments.pop(who).cancel()
            self._deaths.pop(who, None)
            self._failures.pop(who, None)

    def _ended(self, entry: WorkerEntry) -> None:
        if self._is_ending or entry.address in self._expected or self._workers.get(entry.address) != entry:
            return
        del self._workers[entry.address]
        deaths = self._deaths[entry.address] = self._deaths.get(entry.address, 0) + 1
        failure = Failure(
            entry.address,
            FailureKind.DIED,
            f"its process {entry.pid} ended",
            time.time_ns(),
            self._rank,
            socket.gethostname(),
            entry.devices,
            log=last_lines(Path(entry.log_path), LOG_LINES),
            log_path=entry.log_path,
            will_restart=deaths <= entry.max_restarts,
        )
        asyncio.get_running_loop().create_task(self._report_death(failure))

    async def _report_death(self, failure: Failure) -> None:
        """Report a worker's death to the whole job."""
        self._failures[failure.address] = failure
        await self._call_all("lose", tuple(failure.address), failure.summary, failure.will_restart)
        await self._look_up("add_failure", failure)

    async def _call_all(self, method: str, *args: Any) -> None:
        """Call a method of all daemons; wait only for this one."""
        for rank, daemon in enumerate(self._daemons):
            if rank != self._rank:
                daemon.ask.remote(method, *args)
        await getattr(self, method)(*args)

    async def lose(self, who: Sequence[Any], why: str, will_restart: bool) -> None:
        self._hub.lose(Address(*who), why, will_restart)

    async def restarted(self, who: Sequence[Any]) -> None:
        self._hub.queues.restarted(Address(*who))

    async def last_failure(self, who: Sequence[Any]) -> str:
        failure = self._failures.get(Address(*who))
        return str(failure) if failure is not None else ""

    async def _last_failure(self, who: Address) -> str:
        try:
            node = GroupEntry(*await self._look_up("group", who.group, 0.0)).nodes[who.rank]
        except LookupError:
            return ""  # its group has been closed
        if node == self._rank:
            return await self.last_failure(who)
        try:
            return str(await asyncio.wait_for(self._daemons[node].ask.remote("last_failure", tuple(who)), 5))
        except (*PROCESS_LOST, TimeoutError):
            return f"node {node} does not answer"

    def _receive_one_way(self, who: Address, op: str, args: tuple[Any, ...]) -> None:
        """Handle a one-way message of a process."""
        match op:
            case "release":
                self._hub.release(who, *args)
            case "spans":
                entry = self._workers.get(who)
                kept = self._spans.setdefault(who, (entry.devices if entry else (), deque(maxlen=KEPT_SPANS)))[1]
                self._dropped[who] = args[1] + max(0, len(kept) + len(args[0]) - KEPT_SPANS)
                kept.extend(Span(*span) for span in args[0])

    async def failed(self, failure: Failure, log_begin: int) -> Failure:
        """Complete a worker's failure report with node, devices and its log since the call began, and record it."""
        entry = self._workers.get(failure.address)
        complete = replace(
            failure,
            node=self._rank,
            host=socket.gethostname(),
            devices=entry.devices if entry else (),
            log=last_lines(Path(entry.log_path), LOG_LINES, log_begin) if entry else "",
            log_path=entry.log_path if entry else "",
        )
        self._failures[failure.address] = complete
        await self._look_up("add_failure", complete)
        return complete

    # Collected by the driver --------------------------------------------------------------------------------------

    async def read_logs(self, offsets: Mapping[str, int]) -> dict[str, bytes]:
        """New log output since `offsets`, by path relative to the log folder; empty if the driver sees the folder."""
        if self._sees_driver_dir:
            return {}
        return {
            str(path.relative_to(self._log_dir)): text
            for path in sorted(self._log_dir.rglob("*.log"))
            if (text := read_from(path, offsets.get(str(path.relative_to(self._log_dir)), 0)))
        }

    async def spans(self) -> list[tuple[Address, tuple[int, ...], list[Span], int]]:
        """Spans of this node's workers since the job began, up to the number kept."""
        return [(who, held, list(kept), self._dropped.get(who, 0)) for who, (held, kept) in self._spans.items()]

    async def stop_watching(self) -> None:
        """Stop reporting exits as failures: the job is about to end."""
        self._is_ending = True

    async def close(self) -> None:
        """Close the socket, ports and shared memory, and remove the scratch folder."""
        if self._server is not None:
            self._server.close()
        if self._exchange is not None:
            self._exchange.ports.close()
            self._exchange.pool.close()
        self._scratch.remove()


async def _in_object_store(wire: list[WirePacket], num_nodes: int) -> Any:
    """Packets as a call argument; large ones, or those for several nodes, go into Ray's object store once."""
    pieces = [tuple(piece) for piece in wire]
    nbytes = sum(piece.nbytes for piece in wire)
    if nbytes >= BIG:
        return await asyncio.get_running_loop().run_in_executor(None, ray.put, pieces)
    return ray.put(pieces) if num_nodes > 1 and nbytes > INLINE_LIMIT else pieces


def _contains(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except OSError:
        return False
