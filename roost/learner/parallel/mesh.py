"""The device mesh of a learner's ranks, and the groups of its dimensions.

Dimensions from the outermost to the innermost: replicate (HSDP), shard (FSDP), context (Ulysses), tensor. Ranks of a
context or tensor group are neighbours and compute the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from roost.config.job import MeshSizes, ParallelSizes
from roost.learner.distributed import LIMIT_S, rank, world_size
from roost.learner.parallel.context import ContextGroup
from roost.learner.sample import Sample

REPLICATE, FSDP, TENSOR = "replicate", "fsdp", "tensor"  # names of the mesh's dimensions


@dataclass(frozen=True, eq=False, slots=True)
class LearnerMesh:
    """The mesh as this rank sees it.

    FSDP shards weights over the shard and context dimensions together, which are one dimension of `devices`.
    """

    sizes: MeshSizes
    devices: DeviceMesh | None = None  # replicate (if above 1), fsdp, tensor (if above 1); None for a single process
    context: ContextGroup | None = None
    same_samples: Any = None  # group of the ranks that compute the same samples

    @classmethod
    def of(cls, parallel: ParallelSizes, device: torch.device) -> LearnerMesh:
        """The mesh of all ranks; call it on all of them. Raise ValueError if they cannot be divided so."""
        sizes = MeshSizes.of(parallel, world_size())
        if world_size() == 1:
            return cls(sizes)
        grid = torch.arange(world_size()).view(sizes.replicate, sizes.shard, sizes.context, sizes.tensor)
        dimensions = {
            REPLICATE: (sizes.replicate, grid.flatten(1, 2).movedim(0, -1)),
            FSDP: (sizes.fsdp, grid.flatten(1, 2).movedim(1, -1)),
            TENSOR: (sizes.tensor, grid),
        }
        groups = {name: _group(ranks) for name, (size, ranks) in dimensions.items() if size > 1 or name == FSDP}
        shape = [dimensions[name][0] for name in groups]
        devices = DeviceMesh.from_group(
            list(groups.values()), device.type, torch.arange(world_size()).view(shape), mesh_dim_names=tuple(groups)
        )
        context = _group(grid.movedim(2, -1)) if sizes.context > 1 else None
        place = rank() // sizes.tensor % sizes.context
        together = groups.get(TENSOR) if context is None else context
        if sizes.context > 1 and sizes.tensor > 1:
            together = _group(grid.flatten(2))
        return cls(sizes, devices, None if context is None else ContextGroup(sizes.context, place, context), together)

    @property
    def fsdp(self) -> DeviceMesh:
        """Dimensions that fully_shard takes: the sharded one, and before it the replicated one (HSDP) if there is."""
        if self.devices is None:
            raise RuntimeError("a single process has no mesh")
        return self.devices[(REPLICATE, FSDP)] if self.sizes.replicate > 1 else self.devices[FSDP]

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
        found: list[Sequence[Sample]] = [()] * self.sizes.model
        dist.all_gather_object(found, list(samples), group=self.same_samples)
        found[rank() % self.sizes.model] = samples
        return [sample for some in found for sample in some]


def _group(ranks: torch.Tensor) -> Any:
    """This rank's group among those of the last dimension."""
    groups = ranks.reshape(-1, ranks.shape[-1]).tolist()
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=LIMIT_S))
    return own
