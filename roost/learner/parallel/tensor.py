"""Tensor parallelism: layers divided over ranks by the plan that transformers has for the model's family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from roost.learner.parallel.mesh import Local, expert_modules
from roost.learner.parallel.vocabulary import VocabularyShard
from roost.learner.routing import SOFTMAX_ROUTERS

COLUMNS, ROWS, HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"  # transformers' names
VOCABULARY, WHOLE = "vocabulary", "replicated"  # the embedding and the last layer; layers that are not divided
ROUTER = "router"  # a layer that is not divided, with several outputs
EXPERTS = (".experts", ".experts.gate_up_proj", ".experts.down_proj")  # divided by expert, not by transformers' plan
HEAD_DIMENSION = 2  # of inputs of query and key norms, [1, tokens, heads, head size]


class TensorPlan:
    """How each layer of a model is divided over the ranks of a tensor-parallel group."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        """Raise ValueError if the model cannot be divided over the mesh."""
        self._mesh = mesh
        self._styles = dict(_styles(model))
        check_even(model, self._styles, mesh.size())
        self._shared = {id(module) for module in _parents(model, self._styles)}
        self._divided: dict[nn.Parameter, nn.Parameter] = {}  # of the vocabulary; a tied weight is divided once
        size = model.get_input_embeddings().weight.shape[0] // mesh.size()
        self.vocabulary = VocabularyShard(mesh.get_group(), size * mesh.get_local_rank(), size)

    def apply(self, module: nn.Module) -> None:
        """Divide the layers of a module whose weights are whole on all ranks; layers divided before are skipped."""
        for owner in module.modules():
            style = self._styles.get(id(owner))
            if style is None or any(isinstance(weight, DTensor) for weight in owner.parameters(recurse=False)):
                continue
            if style == VOCABULARY:
                self._divide_vocabulary(owner)
            elif style == ROUTER:
                _replicate(owner, self._mesh)
                owner.forward = partial(type(owner).forward, Local(owner))
            else:
                parallelize_module(owner, self._mesh, _style(style), src_data_rank=None)
        for parent in module.modules():
            if id(parent) in self._shared:
                self._shared.remove(id(parent))
                parent.register_forward_pre_hook(partial(_share_input, mesh=self._mesh), with_kwargs=True)

    def _divide_vocabulary(self, owner: nn.Module) -> None:
        for name, weight in list(owner.named_parameters(recurse=False)):
            if weight not in self._divided:
                local = distribute_tensor(weight.data, self._mesh, [Shard(0)], src_data_rank=None)
                self._divided[weight] = nn.Parameter(local, weight.requires_grad)
            setattr(owner, name, self._divided[weight])
        if isinstance(owner, nn.Embedding):
            owner.forward = partial(self.vocabulary.embedded, embedding=owner)  # type: ignore[method-assign]


def _styles(model: PreTrainedModel) -> Iterator[tuple[int, str]]:
    """Style of each layer that has weights, by its identity."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; leave out its tensor size"
        )
    experts = {id(module) for module in expert_modules(model)}
    plan = {pattern: style for pattern, style in plan.items() if not pattern.endswith(EXPERTS)}
    unknown = sorted(set(plan.values()) - {COLUMNS, ROWS, HEADS})
    if unknown:
        raise ValueError(f"layers of {type(model).__name__} are divided by {unknown}, which is not supported")
    embedding = model.get_input_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:  # such as Gemma's, which scales embeddings
        raise ValueError(f"{type(embedding).__name__} of {type(model).__name__} cannot be divided by tensor size")
    vocabulary = (id(embedding), id(model.get_output_embeddings()))
    paths = {id(layer): path for path, layer in model.base_model.named_modules()}
    in_adapted: set[int] = set()  # modules inside layers with an adapter
    for layer in model.modules():
        path = paths.get(id(layer), "")
        style = next((style for pattern, style in plan.items() if fnmatchcase(path, pattern)), WHOLE)
        if hasattr(layer, "base_layer"):
            yield from _adapter_styles(layer, style)
            in_adapted |= {id(part) for part in layer.modules()}
        elif id(layer) not in in_adapted | experts and any(True for _ in layer.parameters(recurse=False)):
            is_router = type(layer).__name__ in SOFTMAX_ROUTERS
            yield id(layer), VOCABULARY if id(layer) in vocabulary else ROUTER if is_router else style


def _adapter_styles(layer: Any, style: str) -> Iterator[tuple[int, str]]:
    """Styles of a layer with an adapter: its first matrix has the layer's inputs, its second the layer's outputs."""
    yield id(layer.base_layer), style
    for first in layer.lora_A.values():
        yield id(first), ROWS if style == ROWS else WHOLE
    for second in layer.lora_B.values():
        yield id(second), COLUMNS if style == COLUMNS else WHOLE


def check_even(model: nn.Module, styles: Mapping[int, str], ranks: int) -> None:
    """Raise ValueError for a layer that the ranks cannot divide evenly, whose first all-reduce would fail."""
    dimensions = {COLUMNS: 0, ROWS: 1}
    for path, layer in model.named_modules():
        dimension = dimensions.get(styles.get(id(layer), WHOLE))
        size = 0 if dimension is None else layer.get_parameter("weight").shape[dimension]
        if size % ranks:
            raise ValueError(f"tensor size {ranks} does not divide the {size} units of {path}")


def _parents(model: PreTrainedModel, styles: Mapping[int, str]) -> Iterator[nn.Module]:
    """Modules with column-parallel layers, which share one input."""
    for parent in model.modules():
        children = list(parent.children())
        inner = [getattr(child, "base_layer", child) for child in children]
        if any(styles.get(id(child)) == COLUMNS for child in inner) and not hasattr(parent, "base_layer"):
            yield parent


def _style(name: str) -> ParallelStyle:
    styles: dict[str, ParallelStyle] = {
        COLUMNS: ColwiseParallel(),
        ROWS: RowwiseParallel(),
        HEADS: SequenceParallel(sequence_dim=HEAD_DIMENSION, use_local_output=True),
        WHOLE: Replicated(),
    }
    return styles[name]


class Replicated(ParallelStyle):
    """A layer that is not divided: all ranks have its weights and compute the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate(module, device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (_as_replicated(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda *call: call[-1].to_local())
        return module


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, weight in list(module.named_parameters(recurse=False)):
        copy = distribute_tensor(weight.data, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(copy, weight.requires_grad))


def _share_input(
    _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], mesh: DeviceMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give one DTensor to all layers, so that the gradient of their input is summed over ranks once."""
    if inputs:
        return (_as_replicated(inputs[0], mesh), *inputs[1:]), options
    return inputs, options | {"hidden_states": _as_replicated(options["hidden_states"], mesh)}


def _as_replicated(values: Any, mesh: DeviceMesh) -> Any:
    placements: list[Placement] = [Replicate()]
    if isinstance(values, Tensor) and not isinstance(values, DTensor):
        return DTensor.from_local(values, mesh, placements, run_check=False)
    return values
