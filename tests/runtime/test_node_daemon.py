"""How a node daemon watches the daemons of other nodes."""

import asyncio
import sys
from types import SimpleNamespace

from ray.exceptions import ActorDiedError, ActorUnavailableError

from roost.runtime.node_daemon import NodeDaemon


def test_a_node_is_watched_through_a_long_network_outage(monkeypatch):
    outage = sys.getrecursionlimit() + 100  # seconds without the network, one try each
    answers = iter([ActorUnavailableError("no network", b"0" * 16) for _ in range(outage)] + [ActorDiedError()])
    lost = []

    async def ask(method):
        raise next(answers)

    async def lose_node(node, why, directory):
        lost.append((node, why))

    async def no_sleep(seconds):
        pass

    monkeypatch.setattr("roost.runtime.node_daemon.asyncio.sleep", no_sleep)
    watching = NodeDaemon.__new__(NodeDaemon)
    watching._is_ending, watching._lose_node = False, lose_node
    daemon = SimpleNamespace(ask=SimpleNamespace(remote=ask))
    asyncio.run(watching._watch_node(3, daemon, None))
    assert [node for node, _ in lost] == [3]
