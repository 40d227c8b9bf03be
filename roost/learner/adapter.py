"""LoRA adapter of a model: add, disable, merge, and write it in PEFT format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from roost.config.train import AdapterSettings
from roost.placement.memory.shape import CONVERTED_BY_PEFT, is_named, unmatched

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
BASE, ADAPTER_PART = ".base_layer.", ".lora_"  # in the names of the weights of a layer that PEFT has wrapped
DENSE_PARTS = (".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")
HOLDER = "holder"  # of the model, while PEFT adds an adapter


def add_adapter(model: PreTrainedModel, settings: AdapterSettings, dtype: torch.dtype) -> None:
    """Add an adapter, which initially changes nothing; afterwards only the adapter is trained."""
    from peft import inject_adapter_in_model

    targets = adapted_layers(model, settings.lora_target_modules)
    model.requires_grad_(False)
    # Given the model itself, PEFT would see in a mixture's config that it has experts, and wrap these as well.
    inject_adapter_in_model(_lora(settings, targets), nn.ModuleDict({HOLDER: model}), ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def adapted_layers(model: PreTrainedModel, named: Sequence[str] = ()) -> list[str]:
    """Paths of the linear layers that get an adapter: those whose path ends with one of the names, or all but the last.

    Routers and routed experts are not linear layers. Raise ValueError if there is none, or none of a name.
    """
    last = model.get_output_embeddings()
    linear = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not last]
    if model.config.model_type in CONVERTED_BY_PEFT:
        linear = [path for path in linear if not path.endswith(DENSE_PARTS)]
    missing = unmatched(named, linear)
    if missing:
        is_mixture = any(".experts." in name for name, _ in model.named_parameters())
        why = ", and experts, and dense layers beside them, get no adapter" if is_mixture else ""
        has = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
        raise ValueError(
            f"lora_target_modules has {', '.join(missing)}, but no linear layer of the model is called so{why}; "
            f"leave them out; it has {has}"
        )
    if not linear:
        raise ValueError("the model has no linear layer for an adapter")
    return sorted(path for path in linear if any(is_named(path, name) for name in named)) if named else linear


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Context with the adapter disabled."""
    layers = [layer for _, layer in _layers(model)]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    try:
        for layer in layers:
            # PEFT's own switch would also freeze the adapter, which FSDP does not expect.
            layer.scaling[ADAPTER] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole weights by the names of the model's checkpoint, one at a time, with the adapter, if any, merged.

    Iterate on all ranks together, as each weight is gathered. Tied weights come once, under their first name.
    """
    layers = dict(_layers(model))
    for name, weight in _persistent(model):
        path, is_wrapped, last = name.rpartition(BASE)
        if is_wrapped:
            yield f"{path}.{last}", _merged(layers[path], weight) if last == "weight" else whole(weight)
        elif ADAPTER_PART not in name:
            yield name, whole(weight)


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of the adapter by PEFT's names; iterate on all ranks together."""
    for path, layer in _layers(model):
        yield f"base_model.model.{path}.lora_A.weight", whole(layer.lora_A[ADAPTER].weight)
        yield f"base_model.model.{path}.lora_B.weight", whole(layer.lora_B[ADAPTER].weight)


def write_adapter(folder: Path, weights: dict[str, Tensor], settings: AdapterSettings, model: str) -> None:
    """Write an adapter folder that PEFT and engines can load."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _lora(settings, sorted({name.split(".")[-3] for name in weights}))
    config.base_model_name_or_path = model
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def whole(weight: Tensor) -> Tensor:
    """Gather a weight if it is sharded."""
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _lora(settings: AdapterSettings, targets: list[str]) -> LoraConfig:
    from peft import LoraConfig  # only where there is an adapter

    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # PEFT annotates int, but takes floats
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by their names without it."""
    for path, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield path, module


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            yield name, weight


def _merged(layer: Any, weight: Tensor) -> Tensor:
    first, second = (whole(part[ADAPTER].weight).float() for part in (layer.lora_A, layer.lora_B))
    change = (second @ first) * layer.scaling[ADAPTER]
    base = whole(weight)
    merged: Tensor = base.float() + (change.T if layer.fan_in_fan_out else change)
    return merged.to(base.dtype)
