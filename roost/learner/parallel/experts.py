"""Expert parallelism: experts of a mixture are divided over ranks, and tokens sent to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from roost.config.job import MeshSizes
from roost.learner.parallel.context import all_rows, exchanged, own_rows
from roost.learner.parallel.mesh import EXPERT, LearnerMesh
from roost.placement.memory.model import EXPERT_FAMILIES

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
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


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
