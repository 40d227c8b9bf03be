"""The device mesh of a learner's ranks, and the groups of its dimensions.

Dimensions from the outermost to the innermost: replicate (HSDP), shard (FSDP), context (Ulysses), tensor. Ranks of a
context or tensor group are neighbours and compute the same samples. Experts of a mixture have a mesh of their own over
the same ranks: neighbours among the ranks of an FSDP group form an expert group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from roost.config.job import MeshSizes, ParallelSizes
from roost.learner.distributed import LIMIT_S, gathered, rank, world_size
from roost.learner.parallel.context import ContextGroup
from roost.learner.sample import Sample

REPLICATE, FSDP, TENSOR, EXPERT = "replicate", "fsdp", "tensor", "expert"  # names of the meshes' dimensions


@dataclass(frozen=True, eq=False, slots=True)
class LearnerMesh:
    """The mesh as this rank sees it.

    FSDP shards weights over the shard and context dimensions together, which are one dimension of `devices`.
    """

    sizes: MeshSizes
    devices: DeviceMesh | None = None  # replicate (if above 1), fsdp, tensor (if above 1); None for a single process
    context: ContextGroup | None = None
    same_samples: Any = None  # group of the ranks that compute the same samples
    experts: DeviceMesh | None = None  # replicate (if above 1), fsdp, expert; None where experts are as other weights

    @classmethod
    def of(cls, parallel: ParallelSizes, device: torch.device) -> LearnerMesh:
        """The mesh of all ranks; call it on all of them. Raise ValueError if they cannot be divided so."""
        sizes = MeshSizes.of(parallel, world_size())
        if world_size() == 1:
            return cls(sizes)
        grid = torch.arange(world_size()).view(sizes.replicate, sizes.shard, sizes.context, sizes.tensor)
        ranks = grid.flatten(1, 2)
        groups = {
            REPLICATE: _group(ranks.movedim(0, -1)) if sizes.replicate > 1 else None,
            FSDP: _group(ranks.movedim(1, -1)),
            TENSOR: _group(ranks) if sizes.tensor > 1 else None,
        }
        experts = None
        if sizes.expert > 1:
            divided = grid.flatten(1).unflatten(1, (-1, sizes.expert))
            over = {FSDP: _group(divided.movedim(1, -1)), EXPERT: _group(divided)}
            experts = _mesh({REPLICATE: groups[REPLICATE], **over}, divided, device)
        context = _group(grid.movedim(2, -1)) if sizes.context > 1 else None
        place = rank() // sizes.tensor % sizes.context
        together = groups[TENSOR] if context is None else context
        if sizes.context > 1 and sizes.tensor > 1:
            together = _group(grid.flatten(2))
        of_context = None if context is None else ContextGroup(sizes.context, place, context)
        return cls(sizes, _mesh(groups, ranks, device), of_context, together, experts)

    @property
    def fsdp(self) -> DeviceMesh:
        """Dimensions that fully_shard takes: the sharded one, and before it the replicated one (HSDP) if there is."""
        if self.devices is None:
            raise RuntimeError("a single process has no mesh")
        return _fsdp_of(self.devices)

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The same for experts, of which FSDP shards what a rank of an expert group has."""
        if self.experts is None:
            raise RuntimeError("experts are not divided")
        return _fsdp_of(self.experts)

    @property
    def tensor(self) -> DeviceMesh | None:
        """Dimension of tensor parallelism; None without it."""
        return self.devices[TENSOR] if self.devices is not None and self.sizes.tensor > 1 else None

    @property
    def is_first(self) -> bool:
        """Return True on one of the ranks that compute the same samples."""
        return rank() % self.sizes.model == 0

    def gathered(self, samples: Sequence[Sample]) -> list[Sample]:
        """Samples of all ranks that compute the same ones; this rank's are the same objects."""
        if self.same_samples is None:
            return list(samples)
        return [sample for some in gathered(samples, self.same_samples) for sample in some]


def by_mesh(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights in lists of one mesh each, because torch computes on no list of several."""
    lists: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for weight in weights:
        lists.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
    return list(lists.values())


def total_norm(weights: Sequence[Sequence[nn.Parameter]]) -> Tensor:
    """Norm of all gradients, over all shards, of weights as `by_mesh` returns them."""
    grads = [[weight.grad for weight in each if weight.grad is not None] for each in weights]
    norms = [torch.nn.utils.get_total_norm(each) for each in grads]
    return torch.nn.utils.get_total_norm([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])


def _mesh(groups: dict[str, Any], ranks: Tensor, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks with the dimensions that have groups; those without have one rank."""
    dimensions = {name: group for name, group in groups.items() if group is not None}
    shape = [size for size, group in zip(ranks.shape, groups.values(), strict=True) if group is not None]
    return DeviceMesh.from_group(
        list(dimensions.values()), device.type, ranks.reshape(shape), mesh_dim_names=tuple(dimensions)
    )


def _fsdp_of(mesh: DeviceMesh) -> DeviceMesh:
    return mesh[(REPLICATE, FSDP)] if REPLICATE in (mesh.mesh_dim_names or ()) else mesh[FSDP]


def _group(ranks: Tensor) -> Any:
    """This rank's group among those of the last dimension."""
    groups = ranks.reshape(-1, ranks.shape[-1]).tolist()
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=LIMIT_S))
    return own
