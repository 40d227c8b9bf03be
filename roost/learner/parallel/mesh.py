"""The device mesh of a learner's ranks, and the groups of its dimensions.

Dimensions from the outermost to the innermost: replicate (HSDP), shard (FSDP), context (Ulysses), tensor. Ranks of a
context or tensor group are neighbours and compute the same samples. Experts of a mixture have a mesh of their own over
the same ranks: neighbours among the ranks of an FSDP group form an expert group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from roost.config.job import MeshSizes, ParallelSizes
from roost.learner.distributed import LIMIT_S, gathered, rank, to_local, world_size
from roost.learner.parallel.context import ContextGroup, all_rows, exchanged, own_rows
from roost.learner.sample import Sample
from roost.placement.memory.shape import EXPERT_FAMILIES

# torch gathers a weight that tensor parallelism and FSDP shard one dimension after the other, and warns that sums could
# depend on the order. An all-gather sums nothing.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "all_gather" not in record.getMessage()
)

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
    experts: DeviceMesh | None = None  # replicate (if above 1), fsdp, expert; None: experts are sharded like the rest

    @classmethod
    def of(cls, parallel: ParallelSizes, device: torch.device) -> LearnerMesh:
        """The mesh of all ranks; call it on all of them. Raise ValueError if the sizes do not fit their number."""
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
            expert_groups = {FSDP: _group(divided.movedim(1, -1)), EXPERT: _group(divided)}
            experts = _mesh({REPLICATE: groups[REPLICATE], **expert_groups}, divided, device)
        context, same_samples = None, groups[TENSOR]
        if sizes.context > 1:
            context_rank = rank() // sizes.tensor % sizes.context
            context = ContextGroup(sizes.context, context_rank, _group(grid.movedim(2, -1)))
            same_samples = context.group if sizes.tensor == 1 else _group(grid.flatten(2))
        return cls(sizes, _mesh(groups, ranks, device), context, same_samples, experts)

    @property
    def fsdp(self) -> DeviceMesh:
        """Mesh for `fully_shard`: the dimension fsdp, and replicate before it if there are replicas (HSDP)."""
        if self.devices is None:
            raise RuntimeError("a single process has no mesh")
        return _fsdp_of(self.devices)

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Mesh for `fully_shard` of the experts that a rank of an expert group has."""
        if self.experts is None:
            raise RuntimeError("experts are not divided")
        return _fsdp_of(self.experts)

    @property
    def tensor(self) -> DeviceMesh | None:
        """Dimension of tensor parallelism; None without it."""
        return self.devices[TENSOR] if self.devices is not None and self.sizes.tensor > 1 else None

    @property
    def is_first(self) -> bool:
        """Return True on the first of the ranks that compute the same samples."""
        return rank() % self.sizes.model == 0

    def gathered(self, samples: Sequence[Sample]) -> list[Sample]:
        """Samples of all ranks that compute the same ones; this rank's are the same objects."""
        if self.same_samples is None:
            return list(samples)
        return [sample for some in gathered(samples, self.same_samples) for sample in some]


def by_mesh(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights grouped by their mesh, because torch's operations on lists of tensors need a single mesh."""
    lists: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for weight in weights:
        lists.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
    return list(lists.values())


def total_norm(weights: Sequence[Sequence[nn.Parameter]]) -> Tensor:
    """Norm of the gradients of all weights over all shards; weights are grouped as by `by_mesh`."""
    grads = [[weight.grad for weight in each if weight.grad is not None] for each in weights]
    return torch.stack([_squares(each) for each in grads if each]).sum().sqrt() if any(grads) else torch.zeros(())


def _squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of gradients of one mesh, over all shards."""
    by_placement: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_placement.setdefault(tuple(grad.placements) if isinstance(grad, DTensor) else None, []).append(grad)
    summed = []
    for placements, some in by_placement.items():
        local = [to_local(each) for each in some]
        square = torch.nn.utils.get_total_norm(local).float().square()
        # Replicas of a dimension count once, but are summed below.
        for dimension, placement in enumerate(placements or ()):
            if placement.is_replicate():
                square = square / some[0].device_mesh.size(dimension)  # type: ignore[attr-defined]
        summed.append(square)
    total = torch.stack(summed).sum()
    if isinstance(grads[0], DTensor):
        for dimension in range(grads[0].device_mesh.ndim):
            dist.all_reduce(total, group=grads[0].device_mesh.get_group(dimension))
    return total


def _mesh(groups: dict[str, Any], ranks: Tensor, device: torch.device) -> DeviceMesh:
    """The mesh of all ranks, without the dimensions that have no group, whose size is 1."""
    dimensions = {name: group for name, group in groups.items() if group is not None}
    shape = [size for size, group in zip(ranks.shape, groups.values(), strict=True) if group is not None]
    return DeviceMesh.from_group(
        list(dimensions.values()), device.type, ranks.reshape(shape), mesh_dim_names=tuple(dimensions)
    )


def _fsdp_of(mesh: DeviceMesh) -> DeviceMesh:
    return mesh[(REPLICATE, FSDP)] if REPLICATE in (mesh.mesh_dim_names or ()) else mesh[FSDP]


def _group(ranks: Tensor) -> Any:
    """Create a process group for each row of the last dimension; return this rank's."""
    groups = ranks.reshape(-1, ranks.shape[-1]).tolist()
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=LIMIT_S))
    return own


EXPERT_DIM, ROW_DIM = 0, 1  # of experts' weights: expert groups divide the first, FSDP shards the second


def expert_modules(model: nn.Module) -> Iterator[Any]:
    """Modules with the experts of a layer, whose weights have a first dimension of experts."""
    for module in model.modules():
        if hasattr(module, "num_experts") and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            yield module


def check_experts(model: nn.Module, mesh: MeshSizes) -> None:
    """Raise ValueError if the model has no experts, or experts that cannot be divided over the mesh."""
    size = mesh.expert
    modules = list(expert_modules(model))
    if modules and size % mesh.tensor:
        raise ValueError(
            f"experts cannot be divided by tensor size {mesh.tensor}; write an expert size that is a multiple of it"
        )
    if size == 1:
        return
    if not modules or getattr(getattr(model, "config", None), "model_type", "") not in EXPERT_FAMILIES:
        raise ValueError(
            f"{type(model).__name__} has no experts that Roost divides ({', '.join(EXPERT_FAMILIES)}); "
            "write expert size 1"
        )
    for experts in modules:
        if experts.num_experts % size:
            raise ValueError(f"expert size {size} does not divide the model's {experts.num_experts} experts")
        rows = {weight.shape[ROW_DIM] for weight in experts.parameters()}
        uneven = [count for count in sorted(rows) if count % mesh.expert_shards]
        if uneven:
            raise ValueError(
                f"FSDP over {mesh.expert_shards} ranks cannot divide the {uneven[0]} rows of each expert; "
                f"write a larger expert size than {size}"
            )


def divide_experts(module: nn.Module, mesh: LearnerMesh, types: MixedPrecisionPolicy) -> None:
    """Divide and shard the experts inside a module whose weights are whole on all ranks, unless it is done already."""
    if mesh.experts is None:
        return
    group = mesh.experts[EXPERT]
    for experts in list(expert_modules(module)):
        if any(isinstance(weight, DTensor) for weight in experts.parameters()):
            continue
        for name, weight in list(experts.named_parameters(recurse=False)):
            own = distribute_tensor(weight.data, group, [Shard(EXPERT_DIM)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(own, weight.requires_grad))
        experts.num_experts //= group.size()
        dispatch = partial(_dispatched, experts, group)
        experts.forward = dispatch if mesh.tensor is None else partial(_split_and_dispatched, dispatch, mesh.tensor)
        fully_shard(experts, mesh=mesh.expert_fsdp, mp_policy=types, shard_placement_fn=lambda _: Shard(ROW_DIM))


class Local:
    """Proxy of a module that has this rank's shards as its weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return to_local(getattr(self._module, name))


def _split_and_dispatched(
    dispatch: Callable[..., Tensor], mesh: DeviceMesh, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Outputs for tokens that all ranks of a tensor group have: each rank dispatches a share of them."""
    group, count, ranks, own = mesh.get_group(), len(hidden_states), mesh.size(), mesh.get_local_rank()
    rows = slice(count * own // ranks, count * (own + 1) // ranks)
    states, weights = (own_rows(each, rows, group) for each in (hidden_states, top_k_weights))
    return all_rows(dispatch(states, top_k_index[rows], weights), rows, count, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes depend on the routing
def _dispatched(
    module: Any, mesh: DeviceMesh, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Outputs of the experts for this rank's tokens, each computed on the rank of its expert.

    All ranks of the group must call it, also those without tokens, and in the backward pass.
    """
    group, ranks, top_k = mesh.get_group(), mesh.size(), top_k_index.shape[-1]
    order = top_k_index.flatten().argsort(stable=True)  # by expert, and so by rank
    send_counts = torch.bincount(top_k_index.flatten(), minlength=ranks * module.num_experts)
    receive_counts = torch.empty_like(send_counts)  # from each rank for each expert here
    dist.all_to_all_single(receive_counts, send_counts, group=group)
    sent, received = torch.stack([send_counts, receive_counts]).view(2, ranks, -1).sum(-1).tolist()
    tokens = exchanged(hidden_states[order // top_k], group, sent, received)
    own = torch.arange(module.num_experts, device=tokens.device).repeat(ranks)
    own = own.repeat_interleave(receive_counts, output_size=sum(received))
    # Also without tokens: every rank needs outputs with a gradient for the backward pass.
    computed = grouped_mm_experts_forward(Local(module), tokens, own[:, None], tokens.new_ones(len(tokens), 1))
    returned = exchanged(computed, group, received, sent)[order.argsort()]
    weighted = returned.view(-1, top_k, hidden_states.shape[-1]) * top_k_weights[..., None]
    outputs: Tensor = weighted.sum(1).to(hidden_states.dtype)
    return outputs


def sum_over_replicas(model: nn.Module, is_due: bool) -> None:
    """Set whether the next backward passes sum gradients over replicas (HSDP), or accumulate them for a later pass."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_due)


def drop_accumulated(model: nn.Module) -> None:
    """Drop gradients that were accumulated for a later pass, in case an earlier call failed midway."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # one group until torch 2.10
            for group in [state._fsdp_param_group] if groups is None else groups:
                group._partial_reduce_output = None


def average_gradients(model: nn.Module, mesh: LearnerMesh) -> None:
    """Make the gradients of experts averages over all ranks, as other gradients are. Call it after all backward passes.

    FSDP averages them over the ranks that have the same experts, each of which gets the tokens of its expert group.
    Ranks of a tensor group have the same tokens, and dispatch each once.
    """
    if mesh.experts is not None:
        for experts in expert_modules(model):
            for weight in experts.parameters():
                if weight.grad is not None:
                    weight.grad.div_(mesh.sizes.expert // mesh.sizes.tensor)
