"""The sandboxed process as its owner sees it: started, listened to, stopped, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from typing import IO, Any

from roost.sandbox.execution import Fault
from roost.sandbox.inside.frames import LARGEST, LENGTH, packed
from roost.sandbox.interpreter import start_interpreter
from roost.sandbox.printed import Printed
from roost.sandbox.template import Forked, forked

FLOOD_BYTES = 32 << 20  # nobody reads that much; the process is ended
_DIES_WITHIN_S = 1.0

Process = Forked | subprocess.Popen[bytes]


class Gone(Exception):
    """The process closed its end of the connection, most likely by dying."""


class Malformed(Exception):
    """The process said what it never says by itself."""


class Child:
    """A process that runs what it is told. Its messages are not believed, and what it prints is bounded."""

    def __init__(self, process: Process, output: int, printed: Printed) -> None:
        self._process, self._output, self._printed = process, output, printed
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.fault: Fault | None = None  # why it was ended, where its owner did that

    @classmethod
    async def start(cls, stdin: IO[bytes] | int, printed: Printed) -> Child:
        """Start one; it waits to be told how to confine itself."""
        outer, inner = socket.socketpair()
        output, its_output = os.pipe()
        with inner, open(its_output, "wb") as its_end:  # noqa: PTH123 (a descriptor)
            try:
                process = forked(stdin, its_end, inner) or _interpreter(stdin, its_end, inner)
            except BaseException:
                outer.close()
                os.close(output)
                raise
        os.set_blocking(output, False)
        child = cls(process, output, printed)
        try:
            child._reader, child._writer = await asyncio.open_unix_connection(sock=outer)
        except BaseException:  # cancelled, most likely
            process.kill()
            process.wait()
            outer.close()
            os.close(output)
            raise
        asyncio.get_running_loop().add_reader(output, child._read)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def parent(self) -> int:
        """The process that it ends with."""
        return self._process.parent if isinstance(self._process, Forked) else os.getpid()

    async def say(self, message: Any) -> None:
        """Send a message; a process that does not listen makes this wait."""
        self._writer.write(packed(message))
        with contextlib.suppress(ConnectionError):  # whoever hears next finds out
            await self._writer.drain()

    async def hear(self) -> Any:
        """Its next message, of which nothing is certain but that it is JSON of bounded size."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > LARGEST:
                raise Malformed(f"a message of {length} bytes, where {LARGEST} are the most")
            return json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Gone from error
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a message that is no JSON: {error}") from error

    def go_on(self, printed: Printed) -> None:
        """Let it run, and keep what it prints from now on here."""
        self._printed = printed
        self._process.send_signal(signal.SIGCONT)

    def pause(self) -> None:
        """Stop it with all its threads, and read what it printed before."""
        self._process.send_signal(signal.SIGSTOP)
        while self.fault is None and self._read():
            pass

    def kill(self, fault: Fault) -> None:
        """End it at once; the first reason counts."""
        self.fault = self.fault or fault
        self._process.kill()

    async def death(self) -> int | None:
        """The status of a process that seems to be dying; None where it lives on."""
        patience = _DIES_WITHIN_S
        while self._process.poll() is None and patience > 0:
            await asyncio.sleep(0.005)
            patience -= 0.005
        return self._process.returncode

    async def end(self) -> None:
        """End it, and let go of everything that belongs to it. Whoever is cancelled meanwhile, is so after that."""
        self._process.kill()
        while self._read():
            pass
        self._stop_reading()
        self._writer.close()
        pause_s, cancelled = 0.0005, None
        while self._process.poll() is None:
            try:
                await asyncio.sleep(pause_s)
            except asyncio.CancelledError as error:
                cancelled = error
            pause_s = min(pause_s * 2, 0.05)
        if cancelled is not None:
            raise cancelled

    def _read(self) -> bool:
        """Take a piece of what was printed; whether there was one."""
        if self._output < 0:
            return False
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        self._printed.add(data)
        if not data or self._printed.size > FLOOD_BYTES:
            self._stop_reading()
            if data:
                self.kill(Fault.FLOODED)
        return bool(data)

    def _stop_reading(self) -> None:
        if self._output >= 0:
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            self._output = -1


def _interpreter(stdin: IO[bytes] | int, output: IO[bytes], connection: socket.socket) -> subprocess.Popen[bytes]:
    program = "from roost.sandbox.inside.main import main; main(int(sys.argv[2]))"
    return start_interpreter(program, [connection.fileno()], stdin, output, connection)
