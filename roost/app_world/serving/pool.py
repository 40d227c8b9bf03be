"""Servers to play on: started when they are needed, started again when they are lost, each with its places."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from roost.app_world.serving.connection import Connection, ServerLost, ServerRefused
from roost.app_world.serving.hosts import Host


class PooledServer:
    """One server as its clients see it."""

    def __init__(self, host: Host, answer_limit_s: float, most_worlds: int | None = None) -> None:
        self.host = host
        self.name = f"roost_{secrets.token_hex(4)}"  # what it writes, if anything, goes under this name
        self.taken = 0
        self.places = 1
        self.takes_episodes = False
        self._answer_limit_s, self._most_worlds = answer_limit_s, most_worlds
        self._connection: Connection | None = None
        self._is_doubted = False
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def ready(self) -> Connection:
        """A connection to it; it is started where it does not run."""
        async with self._turn:
            if self._is_closed:
                raise ServerLost("the environments were closed; nothing more is played in them")
            connection = self._connection
            if connection is None or not await self._is_well(connection):
                connection = await self._start()
            return connection

    def doubt(self) -> None:
        """It did not answer: look at it before it is used again."""
        self._is_doubted = True

    async def close(self) -> None:
        """For good: it is not started again."""
        async with self._turn:
            self._is_closed = True
            await self._leave()
            await self.host.stop()

    async def _is_well(self, connection: Connection) -> bool:
        if not self.host.is_running:
            return False
        if self._is_doubted:
            try:
                await connection.about()
            except (ServerLost, ServerRefused):
                return False
            self._is_doubted = False
        return True

    async def _start(self) -> Connection:
        await self._leave()
        connection = Connection(await self.host.start(), self._answer_limit_s)
        try:
            about = await connection.about()
        except BaseException:
            await connection.close()
            raise
        self.takes_episodes = about.get("episodes") is True
        if self.takes_episodes:
            self.places = self._most_worlds or int(about.get("worlds", 1))
        self._connection, self._is_doubted = connection, False
        return connection

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class ServerPool:
    """Gives out places on servers, the emptiest first."""

    def __init__(self, servers: Sequence[PooledServer]) -> None:
        self._servers = list(servers)
        self._free: asyncio.Semaphore | None = None  # how many places there are is known once the servers are
        self._turn = asyncio.Lock()

    async def take(self) -> tuple[PooledServer, Connection]:
        """A place on a server that is well; waits while all are taken."""
        free = await self._places()
        await free.acquire()
        try:
            return await self._taken()
        except BaseException:
            free.release()
            raise

    def give_back(self, server: PooledServer) -> None:
        server.taken -= 1
        if self._free is not None:
            self._free.release()

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))

    async def _places(self) -> asyncio.Semaphore:
        async with self._turn:
            if self._free is None:
                begun = await asyncio.gather(*(server.ready() for server in self._servers), return_exceptions=True)
                for error in begun:
                    if isinstance(error, BaseException):
                        raise error
                self._free = asyncio.Semaphore(sum(server.places for server in self._servers))
            return self._free

    async def _taken(self) -> tuple[PooledServer, Connection]:
        """One that is lost would always be the emptiest, so the next one is tried before giving up."""
        lost: ServerLost | None = None
        for server in sorted(self._servers, key=lambda server: server.taken / server.places):
            if server.taken >= server.places:
                continue
            server.taken += 1
            try:
                return server, await server.ready()
            except ServerLost as error:
                lost = error
                server.taken -= 1
            except BaseException:
                server.taken -= 1
                raise
        raise lost or ServerLost("no server has a place left")
