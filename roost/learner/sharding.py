"""A model spread over all ranks. Only the first rank reads the checkpoint, and no rank has more of it than a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from roost.learner.distributed import wait_for_all, world_size

READING_LIMIT_S = 4 * 3600.0  # for a checkpoint, on a slow disk


def shard(root: nn.Module, layers: Sequence[nn.Module], compute: torch.dtype, device: torch.device) -> None:
    """Shard a model that rank 0 has whole; the others have it without weights, on the device `meta`.

    Layer by layer: all ranks are given a layer's weights, and at once keep no more than their part of them.
    """
    wait_for_all(READING_LIMIT_S)
    mesh = init_device_mesh(device.type, (world_size(),))
    types = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*layers, root):
        for tensor in _brought(module, device):
            dist.broadcast(tensor, 0)
        fully_shard(module, mesh=mesh, mp_policy=types)


def _brought(module: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Bring what is not sharded yet to the device, with room for what is not there; tied weights stay tied."""
    brought: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            if not isinstance(weight, DTensor):
                if weight not in brought:
                    brought[weight] = nn.Parameter(_on(device, weight.data), weight.requires_grad)
                setattr(owner, name, brought[weight])
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer not in brought:
                brought[buffer] = _on(device, buffer)
            setattr(owner, name, brought[buffer])
    for tensor in brought.values():
        yield tensor.data


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()
