"""The sender's side of a broadcast to vLLM, which makes its groups in its own way; vLLM must be installed here, too."""

from __future__ import annotations

from typing import Any

import torch

from roost.engines.errors import NotOffered
from roost.engines.weights.parcel import GroupInvitation


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
        """Send a tensor to every worker; returns when it has left."""
        stream = torch.cuda.current_stream(self._device)
        self._communicator.broadcast(tensor.to(self._device).contiguous(), src=0, stream=stream)
        stream.synchronize()

    def close(self) -> None:
        """Give up the communicator; older releases have no way to, and let it go with the object."""
        destroy = getattr(self._communicator, "destroy", None)
        if destroy is not None:
            destroy()
