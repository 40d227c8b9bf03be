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

# Shards of FSDP lie within those of a tensor group, so torch gathers them one dimension after the other, and warns that
# sums could differ by their order. Nothing is summed there.
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
    return torch.stack([_squares(each) for each in grads if each]).sum().sqrt() if any(grads) else torch.zeros(())


def _squares(grads: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of gradients of one mesh, over all shards: one sum over each of its dimensions."""
    by_placement: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_placement.setdefault(tuple(grad.placements) if isinstance(grad, DTensor) else None, []).append(grad)
    summed = []
    for placements, some in by_placement.items():
        local = [to_local(each) for each in some]
        square = torch.nn.utils.get_total_norm(local).float().square()
        # A copy on each rank of a dimension counts once.
        copies = [] if placements is None else [each.is_replicate() for each in placements]
        for dimension, is_copy in enumerate(copies):
            if is_copy:
                square = square / some[0].device_mesh.size(dimension)  # type: ignore[attr-defined]
        summed.append(square)
    total = torch.stack(summed).sum()
    if isinstance(grads[0], DTensor):
        for dimension in range(grads[0].device_mesh.ndim):
            dist.all_reduce(total, group=grads[0].device_mesh.get_group(dimension))
    return total


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


BY_EXPERT, BY_ROW = 0, 1  # dimensions of experts' weights: expert groups divide the first, FSDP the second


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
            f"experts are not divided by tensor size {mesh.tensor}; write an expert size that is a multiple of it"
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
        rows = {weight.shape[BY_ROW] for weight in experts.parameters()}
        uneven = [count for count in sorted(rows) if count % mesh.expert_shards]
        if uneven:
            raise ValueError(
                f"FSDP over {mesh.expert_shards} ranks cannot divide the {uneven[0]} rows of each expert; "
                f"write a larger expert size than {size}"
            )


def divide_experts(module: nn.Module, mesh: LearnerMesh, types: MixedPrecisionPolicy) -> None:
    """Divide and shard the experts inside a module, whose weights are whole on all ranks, unless it was done before."""
    if mesh.experts is None:
        return
    group = mesh.experts[EXPERT]
    for experts in list(expert_modules(module)):
        if any(isinstance(weight, DTensor) for weight in experts.parameters()):
            continue
        for name, weight in list(experts.named_parameters(recurse=False)):
            own = distribute_tensor(weight.data, group, [Shard(BY_EXPERT)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(own, weight.requires_grad))
        experts.num_experts //= group.size()
        dispatch = partial(_on_their_ranks, experts, group)
        experts.forward = dispatch if mesh.tensor is None else partial(_of_shares, dispatch, mesh.tensor)
        fully_shard(experts, mesh=mesh.expert_fsdp, mp_policy=types, shard_placement_fn=lambda _: Shard(BY_ROW))


class Local:
    """A module with this rank's tensors for its weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return to_local(getattr(self._module, name))


def _of_shares(
    dispatch: Callable[..., Tensor], mesh: DeviceMesh, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Outputs for tokens that all ranks of a tensor group have: each sends a share of them to their experts."""
    group, count, ranks, place = mesh.get_group(), len(hidden_states), mesh.size(), mesh.get_local_rank()
    rows = slice(count * place // ranks, count * (place + 1) // ranks)
    states, weights = (own_rows(each, rows, group) for each in (hidden_states, top_k_weights))
    return all_rows(dispatch(states, top_k_index[rows], weights), rows, count, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths that only the device knows
def _on_their_ranks(
    module: Any, mesh: DeviceMesh, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Outputs of the experts of this rank's tokens, each computed where its expert is.

    All ranks of the group take part, also without tokens, and in the backward pass.
    """
    group, ranks, top_k = mesh.get_group(), mesh.size(), top_k_index.shape[-1]
    order = top_k_index.flatten().argsort(stable=True)  # by expert, and so by rank
    going = torch.bincount(top_k_index.flatten(), minlength=ranks * module.num_experts)
    coming = torch.empty_like(going)  # of each rank for each expert here
    dist.all_to_all_single(coming, going, group=group)
    sent, received = torch.stack([going, coming]).view(2, ranks, -1).sum(-1).tolist()
    tokens = exchanged(hidden_states[order // top_k], group, sent, received)
    own = torch.arange(module.num_experts, device=tokens.device).repeat(ranks)
    own = own.repeat_interleave(coming, output_size=sum(received))
    # Grouped products, even of no tokens: their outputs have a gradient on every rank.
    computed = grouped_mm_experts_forward(Local(module), tokens, own[:, None], tokens.new_ones(len(tokens), 1))
    returned = exchanged(computed, group, received, sent)[order.argsort()]
    weighted = returned.view(-1, top_k, hidden_states.shape[-1]) * top_k_weights[..., None]
    outputs: Tensor = weighted.sum(1).to(hidden_states.dtype)
    return outputs


def sum_over_copies(model: nn.Module, is_due: bool) -> None:
    """Let the next backward passes sum gradients over copies of the model (HSDP), or keep sums of shards for later."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_due)


def forget_sums(model: nn.Module) -> None:
    """Drop sums that were kept for later, of passes that failed midway."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # one group until torch 2.10
            for group in [state._fsdp_param_group] if groups is None else groups:
                group._partial_reduce_output = None


def average_gradients(model: nn.Module, mesh: LearnerMesh) -> None:
    """Make the gradients of experts averages over all ranks, as others are; call it once after the backward passes.

    FSDP averages them over the ranks that have the same experts, to which the expert group has sent all its tokens.
    Ranks of a tensor group have the same tokens, and send each once.
    """
    if mesh.experts is not None:
        for experts in expert_modules(model):
            for weight in experts.parameters():
                if weight.grad is not None:
                    weight.grad.div_(mesh.sizes.expert // mesh.sizes.tensor)
