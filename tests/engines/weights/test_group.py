"""The group in which weights are broadcast, between real processes."""

import asyncio
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from roost.engines.protocol import EngineLost, UpdateFailed
from roost.engines.weights import update
from roost.engines.weights.carriers import WeightGroup
from roost.engines.weights.payload import GroupInvitation
from roost.engines.weights.source import ModuleSource
from roost.engines.weights.update import BroadcastSender
from tests.forked import FORKED
from tests.limits import HANG_S

CPU = torch.device("cpu")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def receive(invitation, rank, results):
    group = WeightGroup(invitation, rank, CPU)
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    group.broadcast(tensor)
    results.put(tensor.tolist())


def receive_as_torch_does(invitation, rank, results):
    """As engines do that make the group through torch's own functions, SGLang among them."""
    store = dist.TCPStore(invitation.master_address, invitation.master_port, invitation.world_size, is_master=False)
    group, _ = dist.distributed_c10d._new_process_group_helper(
        invitation.world_size,
        rank,
        [],
        dist.Backend(invitation.backend),
        dist.PrefixStore(invitation.name, store),
        group_name=invitation.name,
        timeout=timedelta(seconds=HANG_S),
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(invitation.world_size)}
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    dist.broadcast(tensor, src=0, group=group)
    results.put(tensor.tolist())


def test_a_broadcast_reaches_every_engine():
    """In one group: an engine with our own class, and one with torch's functions."""
    invitation = GroupInvitation("127.0.0.1", free_port(), 1, 3, "gloo")
    results = FORKED.Queue()
    receivers = {1: receive, 2: receive_as_torch_does}
    engines = [
        FORKED.Process(target=receiver, args=(invitation, rank, results)) for rank, receiver in receivers.items()
    ]
    for engine in engines:
        engine.start()
    group = WeightGroup(invitation, 0, CPU, limit_s=HANG_S)
    group.broadcast(torch.arange(5, dtype=torch.bfloat16))
    assert [results.get(timeout=HANG_S) for _ in engines] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    for engine in engines:
        engine.join(60)
        assert engine.exitcode == 0
    group.close()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="carrier_pigeon is not a backend for weights; use nccl, or gloo"):
        WeightGroup(GroupInvitation("127.0.0.1", free_port(), 1, 1, "carrier_pigeon"), 0, CPU)


class Dead:
    """An engine that fails at one moment, as one does whose process is gone."""

    def __init__(self, url, moment=""):
        self.url, self._moment, self.abandoned = url, moment, False

    async def _at(self, moment):
        if moment == self._moment:
            raise EngineLost(f"{self.url} is gone")

    async def join_group(self, invitation):
        await self._at("join")

    async def leave_group(self):
        pass

    async def start_update(self, manifest):
        await self._at("start")

    async def take(self, payload):
        await self._at("take")

    async def finish_update(self, version):
        pass

    async def abandon_update(self):
        self.abandoned = True


def test_a_group_does_not_wait_for_an_engine_that_cannot_join():
    """The group itself would wait until its time limit, and with it the weight sync."""
    ended, closed = threading.Event(), threading.Event()

    class Opened:
        def close(self):
            closed.set()

    def open_group(invitation, device):
        ended.wait()
        return Opened()

    async def scenario():
        sender = BroadcastSender(None, "127.0.0.1", free_port, CPU, open_group=open_group)
        try:
            async with asyncio.timeout(HANG_S):
                with pytest.raises(EngineLost, match="b is gone"):
                    await sender.send([Dead("a"), Dead("b", "join")], 1)
                ended.set()
                while not closed.is_set():  # what opens late is closed
                    await asyncio.sleep(0.01)
        finally:
            ended.set()

    asyncio.run(scenario())


def test_a_broadcast_is_given_up_after_an_engine_failed(monkeypatch):
    monkeypatch.setattr(update, "PACKING_LIMIT_S", 0.05)
    released = threading.Event()

    class Waits:
        """Carries weights to all engines at once, and waits for each."""

        is_packed = False

        def pack(self, infos, stream, is_last):
            return object()

        def transfer(self, payload):
            released.wait()

        def release(self, payload):
            pass

        def close(self):
            released.set()

    async def scenario():
        alive = Dead("a")
        source = ModuleSource(torch.nn.Linear(2, 2))
        async with asyncio.timeout(HANG_S):
            with pytest.raises(UpdateFailed, match="the broadcast does not end without b"):
                await update.send([alive, Dead("b", "take")], source, 1, Waits())
        return alive.abandoned

    try:
        assert asyncio.run(scenario())
    finally:
        released.set()
