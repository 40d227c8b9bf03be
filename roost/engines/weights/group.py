"""Process groups for weight broadcasts: the sender is rank 0, the engines' processes follow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from roost.engines.protocol import NotOffered
from roost.engines.weights.payload import GroupInvitation
from roost.net.bound_store import tcp_store

LIMIT_S = 300.0


class WeightGroup:
    """A process group separate from the learner's default one, in which rank 0 broadcasts."""

    def __init__(self, invitation: GroupInvitation, rank: int, device: torch.device, limit_s: float = LIMIT_S) -> None:
        limit = timedelta(seconds=limit_s)
        # An engine may arrive before the sender has opened its store; the store's timeout covers that.
        self._store = tcp_store(
            invitation.master_address, invitation.master_port, invitation.world_size, rank == 0, limit
        )
        store = _prefixed(self._store, invitation.name, device.type)
        self._device = device
        self._group = _process_group(invitation, store, rank, limit)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send the tensor (rank 0) or fill it (others); return when this side is done."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        placed = tensor if tensor.device == self._device else tensor.to(self._device)
        self._group.broadcast([placed.contiguous()], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._group.abort()


def _process_group(invitation: GroupInvitation, store: Store, rank: int, limit: timedelta) -> Any:
    if invitation.backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, invitation.world_size, limit)
    if invitation.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, invitation.world_size, options)
    raise ValueError(f"{invitation.backend} is not a backend for weights; use nccl, or gloo where there is no GPU")


def _prefixed(store: Store, name: str, device: str) -> Store:
    """Use torch's key prefixes for a named group, so that engines that create theirs through torch can join."""
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


class VllmWeightGroup:
    """Rank 0 of the group that vLLM's workers join; open it while the servers answer `join_group`."""

    def __init__(self, invitation: GroupInvitation, device: torch.device) -> None:
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise NotOffered(
                "weights are broadcast to vLLM through its own communicator: install vLLM beside the learner, or send "
                "the weights another way"
            ) from error
        group = StatelessProcessGroup.create(
            host=invitation.master_address, port=invitation.master_port, rank=0, world_size=invitation.world_size
        )
        self._device = device
        self._communicator: Any = PyNcclCommunicator(group, device=device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a tensor to every worker; return when it is sent."""
        stream = torch.cuda.current_stream(self._device)
        self._communicator.broadcast(tensor.to(self._device).contiguous(), src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        """Destroy the communicator; older vLLM releases free it with the object."""
        destroy = getattr(self._communicator, "destroy", None)
        if destroy is not None:
            destroy()
