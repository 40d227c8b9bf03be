"""The group in which weights are broadcast, between real processes."""

import multiprocessing
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from roost.engines.weights.group import WeightGroup
from roost.engines.weights.payload import GroupInvitation
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
    context = multiprocessing.get_context("spawn")
    invitation = GroupInvitation("127.0.0.1", free_port(), 1, 3, "gloo")
    results = context.Queue()
    receivers = {1: receive, 2: receive_as_torch_does}
    engines = [
        context.Process(target=receiver, args=(invitation, rank, results)) for rank, receiver in receivers.items()
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
