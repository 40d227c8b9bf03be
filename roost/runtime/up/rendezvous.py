"""Rendezvous of the nodes of a job: ports derived from the job's id, a proof of the shared token, and JSON lines.

The head listens on the first free port of a small range; nodes try all of them. Both sides prove that they have the
token, which is never sent, so that neither other users nor other jobs of the same user can connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

FIRST_PORT, LAST_PORT = 20_000, 31_999  # above the ports that Ray gives to workers, below those of the system
TRIES = 16
MAX_MESSAGE = 1 << 16  # bytes
HANDSHAKE_LIMIT = 20.0  # seconds
HEARTBEAT_EVERY = 2.0
SILENCE_LIMIT = 60.0  # seconds without a message until the peer is lost; a dead machine does not close its connections


class Refused(ConnectionError):
    """The other side belongs to the job, but one of the two refuses the connection."""


class OtherJob(ConnectionError):
    """Something else listens on the port: another job, or not Roost."""


def ports_of(job: str, first: int | None = None) -> Sequence[int]:
    """Ports at which the nodes of a job look for its head.

    >>> list(ports_of("slurm-71-0-0"))[:3], list(ports_of("", first=7000))[:2]
    ([28392, 28393, 28394], [7000, 7001])
    """
    if first is None:
        number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4])
        first = FIRST_PORT + number % (LAST_PORT - FIRST_PORT - TRIES)
    return range(first, first + TRIES)


def proof(token: str, *facts: str | int) -> str:
    """Proof that the sender of these facts has the token."""
    return hmac.new(token.encode(), json.dumps(facts).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """A node's description of itself for the head."""

    rank: int
    nodes: int
    host: str


class Peer:
    """A connection between the launchers of two nodes, kept alive by heartbeats in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def local_address(self) -> str:
        """Address of this node on the network that leads to the other."""
        return str(self._writer.get_extra_info("sockname")[0]).removeprefix("::ffff:")

    def send(self, **message: Any) -> None:
        """Send a message; a closed connection is noticed by `messages`."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, limit: float) -> dict[str, Any] | None:
        """The next message; None if the connection is closed, or silent for `limit` seconds."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), limit)
        except (OSError, ValueError):  # a TimeoutError is an OSError
            return None
        if not line.endswith(b"\n"):
            return None
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Messages until the connection is closed or silent for too long."""
        heartbeats = asyncio.create_task(self._send_heartbeats())
        try:
            while (message := await self.receive(SILENCE_LIMIT)) is not None:
                if message:
                    yield message
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY)
            self.send()

    async def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), HANDSHAKE_LIMIT)
        self._writer.close()


async def call(host: str, port: int, job: str, caller: Caller, token: str) -> Peer:
    """Connect to the head of a job. Raise OtherJob if something else answers, Refused if the head refuses this node."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=MAX_MESSAGE), HANDSHAKE_LIMIT)
    peer, nonce = Peer(reader, writer), secrets.token_hex(16)
    try:
        peer.send(roost_up=1, job=job, nonce=nonce)
        answer = await peer.receive(HANDSHAKE_LIMIT)
        if answer is None or answer.get("job") != job:
            raise OtherJob(f"port {port} of {host} belongs to something else")
        theirs = str(answer.get("nonce"))
        if not hmac.compare_digest(str(answer.get("proof")), proof(token, "head", job, nonce, theirs)):
            raise Refused("the token of the head is not this node's")
        facts = (caller.rank, caller.nodes, caller.host)
        peer.send(caller=facts, proof=proof(token, "node", job, nonce, theirs, *facts))
        answer = await peer.receive(HANDSHAKE_LIMIT)
        if answer is None or not answer.get("welcome"):
            raise Refused(str((answer or {}).get("refused", "the head closed the connection")))
    except BaseException:
        writer.close()
        raise
    return peer


async def answer(peer: Peer, job: str, token: str) -> Caller | None:
    """The head's side of `call`; None if the caller is not a node of the job. `welcome` or `refused` follows."""
    asked = await peer.receive(HANDSHAKE_LIMIT)
    if asked is None or asked.get("roost_up") != 1 or asked.get("job") != job:
        peer.send(job="")
        return None
    theirs, nonce = str(asked.get("nonce")), secrets.token_hex(16)
    peer.send(job=job, nonce=nonce, proof=proof(token, "head", job, theirs, nonce))
    said = await peer.receive(HANDSHAKE_LIMIT)
    facts = said.get("caller") if said is not None else None
    if said is None or not isinstance(facts, list) or len(facts) != 3:
        return None
    if not hmac.compare_digest(str(said.get("proof")), proof(token, "node", job, theirs, nonce, *facts)):
        peer.send(refused="the token of this node is not the head's")
        return None
    return Caller(int(facts[0]), int(facts[1]), str(facts[2]))
