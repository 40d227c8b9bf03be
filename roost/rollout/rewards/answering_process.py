"""Programs that answer lines of JSON, several of them at a time, each killed when it takes too long."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from typing import Any

START_LIMIT_S = 120.0  # until a program is ready: what it imports may lie on a slow disk
USES = 2_000  # questions after which a program is started anew, as what libraries remember only grows


class ProcessLost(ConnectionError):
    """A program ended instead of answering."""


class NotStarted(RuntimeError):
    """A program did not come to be ready: no question is to blame."""


class AnsweringProcess:
    """One program. It says a line when it is ready, and answers one question after the other."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_ready = False
        self.asked = 0

    @classmethod
    async def start(cls, command: Sequence[str], limit_s: float = START_LIMIT_S) -> AnsweringProcess:
        # In a session of its own, so that ^C in a terminal ends the run in order and not its programs before it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        started = cls(process)
        try:
            async with asyncio.timeout(limit_s):
                await started._line()
        except (TimeoutError, ProcessLost) as error:
            raise NotStarted(f"{' '.join(command)} was not ready within {limit_s:g} s: {error}") from error
        finally:
            if not started._is_ready:
                await started.end()
        return started

    async def ask(self, question: Any, limit_s: float) -> Any:
        """The answer; TimeoutError or ProcessLost where there is none, and then the program is of no more use."""
        if self._process.stdin is None:
            raise RuntimeError("the program was started without a pipe")
        self.asked += 1
        async with asyncio.timeout(limit_s):
            try:
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
            except ConnectionError as error:
                raise ProcessLost("the program does not read") from error
            return json.loads(await self._line())

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _line(self) -> bytes:
        if self._process.stdout is None:
            raise RuntimeError("the program was started without a pipe")
        try:
            line = await self._process.stdout.readline()
        except ValueError as error:
            raise ProcessLost(f"the program says too much: {error}") from error
        if not line.endswith(b"\n"):
            raise ProcessLost(f"the program ended with {await self._process.wait()}")
        self._is_ready = True
        return line


class AnsweringProcesses:
    """So many programs at most, started when they are needed."""

    def __init__(self, command: Sequence[str], most: int) -> None:
        self._command = tuple(command)
        self._places = asyncio.Semaphore(most)
        self._idle: list[AnsweringProcess] = []
        self._is_closed = False

    async def ask(self, question: Any, limit_s: float) -> Any:
        """The answer of one of them; the limit counts from when one has taken the question."""
        async with self._places:
            if self._is_closed:
                raise ProcessLost("the programs were ended")
            process = self._idle.pop() if self._idle else await AnsweringProcess.start(self._command)
            is_sound = False
            try:
                answer = await process.ask(question, limit_s)
                is_sound = process.asked < USES and not self._is_closed
            finally:  # a late answer must not be taken for that to the next question, so also when this is cancelled
                if is_sound:
                    self._idle.append(process)
                else:
                    await process.end()
            return answer

    async def close(self) -> None:
        """End those that are idle now; the others when they have answered."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().end()
