"""A process's connection to the node daemon."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from roost.procs.exit_watch import is_alive
from roost.transport import message
from roost.transport.context import Address, DaemonContact, PeerLost, WaitedTooLong
from roost.transport.host_tensors import DeviceRoute
from roost.transport.shared_memory import (
    Packet,
    SegmentMaps,
    SegmentRef,
    Spares,
    from_frames,
    is_inline,
    needed,
    to_frames,
)

logger = logging.getLogger(__name__)
HELLO_LIMIT = 60.0  # seconds
HEARTBEAT = 500  # milliseconds between checks that the daemon is alive and for segments to release


class DaemonLink:
    """Sends requests from any thread; its own thread receives the answers."""

    def __init__(self, who: Address, daemon: DaemonContact) -> None:
        self.who, self.daemon = who, daemon
        self._maps = SegmentMaps()
        self._spares = Spares()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[tuple[Any, list[Packet]]]] = {}
        self._context = zmq.Context()
        self._sending = threading.Lock()
        self._identity = uuid.uuid4().bytes
        self._requests = self._socket(None)
        self._answers = self._socket(self._identity)
        self._is_closed = False
        # The daemon can answer only after the receiving socket has sent a message.
        hello: Future[tuple[Any, list[Packet]]] = Future()
        self._waiting[-1] = hello
        self._answers.send_multipart([self._identity, *self._frames(-1, "hello", ())])
        self._reader = threading.Thread(target=self._read, name="roost-link", daemon=True)
        self._reader.start()
        try:
            hello.result(HELLO_LIMIT)
        except BaseException as error:
            self.close()
            if not isinstance(error, TimeoutError):
                raise
            raise WaitedTooLong(
                f"the daemon of node {daemon.node} (pid {daemon.pid} on {daemon.host}) did not answer {who} within "
                f"{HELLO_LIMIT:g} s; see its log, Ray's worker-*-{daemon.pid}.err, on that machine"
            ) from None

    def _socket(self, identity: bytes | None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 1000)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(f"ipc://{self.daemon.socket}")
        return socket

    def request(self, op: str, *args: Any, packets: Sequence[Packet] = ()) -> Future[tuple[Any, list[Packet]]]:
        """Send a request to the daemon; return a future of its answer."""
        number = next(self._numbers)
        future: Future[tuple[Any, list[Packet]]] = Future()
        self._waiting[number] = future
        try:
            self._send(self._frames(number, op, args, packets))
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return future

    def cancel(self, future: Future[tuple[Any, list[Packet]]]) -> None:
        """Cancel a request, here and at the node daemon."""
        number = next((number for number, waiting in list(self._waiting.items()) if waiting is future), None)
        if number is not None and self._waiting.pop(number, None) is not None:
            future.set_exception(WaitedTooLong("the request was cancelled"))
            with contextlib.suppress(PeerLost):
                self.tell("cancel", number)

    def _frames(
        self, number: int | None, op: str, args: tuple[Any, ...], packets: Sequence[Packet] = ()
    ) -> list[bytes | memoryview]:
        """Frames of a message: a header that the daemon can always read, the arguments, then the packets."""
        labels, frames = to_frames(packets)
        return [pickle.dumps((number, tuple(self.who), op, labels), 5), pickle.dumps(args, 5), *frames]

    def ask(self, op: str, *args: Any) -> Any:
        """Send a request without packets and wait for its answer."""
        return self.request(op, *args).result()[0]

    def tell(self, op: str, *args: Any) -> None:
        """Send a one-way message."""
        self._send(self._frames(None, op, args))

    def pack(self, value: object, device_route: DeviceRoute = "stage") -> Packet:
        """Pack a value for sending; large buffers are written to shared memory."""
        packed = message.pack(value, device_route)
        if is_inline(packed.nbytes):
            return Packet(packed.header, tuple(bytes(buffer) for buffer in packed.buffers))
        size = needed([len(buffer) for buffer in packed.buffers])
        segment = self._spares.take(size) or SegmentRef(*self.ask("allocate", size))
        return Packet(packed.header, (), segment, self._maps.write(segment, packed.buffers))

    def send(self, op: str, *args: Any, packet: Packet) -> Future[tuple[Any, list[Packet]]]:
        """Send a request with a packet; the answer may bring a segment for the next one."""
        future = self.request(op, *args, packets=[packet])
        if packet.segment is not None:
            future.add_done_callback(self._keep_spare)
        return future

    def _keep_spare(self, future: Future[tuple[Any, list[Packet]]]) -> None:
        spare = None if future.exception() is not None else future.result()[0]
        surplus = self._spares.keep(SegmentRef(*spare)) if spare is not None else None
        if surplus is not None:
            self._maps.released.append(surplus.number)

    def unpack(self, packet: Packet, device: Any = None) -> Any:
        """Value of a packet. Its tensors are views of shared memory, or copies if others receive the packet too."""
        if packet.segment is None:
            return message.unpack(packet.header, [bytearray(buffer) for buffer in packet.inline], device)
        views = self._maps.read(packet.segment, packet.places)
        if packet.is_shared:
            return message.unpack(packet.header, [bytearray(view) for view in views], device)
        return message.unpack(packet.header, views, device)

    def close(self) -> None:
        self._is_closed = True
        self._reader.join(5)
        self._context.destroy(linger=500)

    def _send(self, frames: list[Any]) -> None:
        if self._is_closed:
            raise PeerLost("this process has left its job")
        with self._sending:
            self._report_released()
            self._requests.send_multipart([self._identity, *frames])

    def _report_released(self) -> None:
        """Report segments that are no longer used to the daemon."""
        released = self._maps.take_released()
        if released:
            self._requests.send_multipart([self._identity, *self._frames(None, "release", (released,))])

    def _read(self) -> None:
        poller = zmq.Poller()
        poller.register(self._answers, zmq.POLLIN)
        while not self._is_closed:
            if not poller.poll(HEARTBEAT):
                self._heartbeat()
                continue
            frames = self._answers.recv_multipart()
            try:
                self._take(frames)
            except Exception:  # other answers must still be read
                logger.exception("an answer of %d frames was dropped", len(frames))
        self._fail_all(PeerLost("this process has left its job"))

    def _take(self, frames: Sequence[bytes]) -> None:
        head, body, *rest = frames
        number, is_ok, labels = pickle.loads(head)
        packets = from_frames(labels, rest)
        future = self._waiting.pop(number, None)
        try:
            value = pickle.loads(body)
        except Exception as error:
            is_ok, value = False, ValueError(f"the daemon's answer cannot be read: {type(error).__name__}: {error}")
        if future is not None and is_ok:
            future.set_result((value, packets))
            return
        # Nobody takes what came with the answer.
        segments = [packet.segment for packet in packets] + [value if isinstance(value, SegmentRef) else None]
        self._maps.released.extend(segment.number for segment in segments if segment is not None)
        if future is not None:
            future.set_exception(value)

    def _heartbeat(self) -> None:
        if self._waiting and not is_alive(self.daemon.pid):
            self._fail_all(PeerLost(f"the daemon of node {self.daemon.node} is gone"))
        elif self._maps.released:
            with self._sending:
                self._report_released()

    def _fail_all(self, error: Exception) -> None:
        for number in list(self._waiting):
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_exception(error)
