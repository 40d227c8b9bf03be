"""LoRA adapters beside the weights: each request gets the base model or the adapter it names, in one batch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

PREFIX = "base_model.model."  # PEFT writes it before the name of every module
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
# What an adapter's config may hold without changing what it computes, or that is honoured.
HARMLESS = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "layers_to_transform",
    "layers_pattern", "megatron_core", "eva_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
UNUSED: tuple[Any, ...] = (None, False, "none", {}, [], "")  # how a config says that something is not wanted
PLAIN_STARTS = (True, "gaussian", "eva", "orthogonal", *UNUSED)  # other starts change the base weights as well


@dataclass(frozen=True, slots=True)
class Correction:
    """What an adapter adds to one linear layer: up(down(x)), with the scale already in `up`."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """A correction for each layer that it changes."""

    corrections: Mapping[str, Correction]


class Adapters:
    """The adapters that are loaded, and which rows of the current batch use which."""

    def __init__(self, module: nn.Module) -> None:
        self._linears = {
            name: each
            for name, each in module.named_modules()
            if isinstance(each, nn.Linear) and each is not module.get_output_embeddings()  # type: ignore[operator]
        }
        self._loaded: dict[str, Adapter] = {}
        self._loads = 0
        self._roots: dict[str, bytes] = {}
        self._hooks: dict[str, Any] = {}
        self._used: list[tuple[Adapter, Tensor | None]] = []  # with the rows, or None for all

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def root(self, name: str | None) -> bytes:
        """What the names of cached blocks start from: other weights make other keys, also under the same name."""
        return b"" if name is None else self._roots[name]

    def read(self, folder: str) -> Adapter:
        """An adapter as PEFT wrote it, in host memory; raises if it does not fit the model. For any thread."""
        scale = _scale(json.loads((Path(folder) / "adapter_config.json").read_text()), folder)
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        corrections = {}
        for key in [key for key in tensors if key.endswith(DOWN)]:
            name = key.removeprefix(PREFIX).removesuffix(DOWN)
            down, up = tensors.pop(key), tensors.pop(key.removesuffix(DOWN) + UP, torch.empty(0, 0))
            linear = self._linears.get(name)
            if linear is None:
                raise ValueError(f"{folder} adapts {name!r}, which is no linear layer of the model's body")
            _check_shapes(f"{folder}: {name}", down, up, linear)
            dtype = linear.weight.dtype
            corrections[name] = Correction(down.to(dtype), up.mul(scale).to(dtype))
        if tensors:
            raise ValueError(f"{folder} has tensors that are not supported: {sorted(tensors)[:4]}")
        if not corrections:
            raise ValueError(f"{folder} has no LoRA weights")
        return Adapter(corrections)

    def put(self, name: str, adapter: Adapter) -> None:
        """Move an adapter to the device, and use it under the name from the next step on. Between steps only."""
        moved = Adapter({layer: self._moved(layer, each) for layer, each in adapter.corrections.items()})
        self._loads += 1
        self._roots[name] = f"{name}#{self._loads}".encode()
        self._loaded[name] = moved
        for layer in adapter.corrections.keys() - self._hooks.keys():
            self._hooks[layer] = self._linears[layer].register_forward_hook(self._corrected(layer))

    def remove(self, name: str) -> None:
        if name not in self._loaded:
            raise ValueError(f"there is no adapter {name!r}; loaded are {list(self._loaded)}")
        del self._loaded[name], self._roots[name]
        in_use = {layer for adapter in self._loaded.values() for layer in adapter.corrections}
        for layer in self._hooks.keys() - in_use:
            self._hooks.pop(layer).remove()

    def select(self, names: Sequence[str | None], sizes: Sequence[int], device: torch.device) -> None:
        """Say for the next batch which sequence, with how many rows, uses which adapter."""
        if not self._loaded:
            self._used = []
        elif len(set(names)) == 1:
            self._used = [] if names[0] is None else [(self._loaded[names[0]], None)]
        else:
            owners = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
            self._used = []
            for name in dict.fromkeys(each for each in names if each is not None):
                is_user = torch.tensor([each == name for each in names])
                self._used.append((self._loaded[name], is_user[owners].nonzero().squeeze(-1).to(device)))

    def _moved(self, layer: str, correction: Correction) -> Correction:
        device = self._linears[layer].weight.device
        return Correction(correction.down.to(device), correction.up.to(device))

    def _corrected(self, layer: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for adapter, rows in self._used:
                correction = adapter.corrections.get(layer)
                if correction is None:
                    continue
                rows_in = inputs[0] if rows is None else inputs[0][:, rows]
                change = F.linear(F.linear(rows_in, correction.down), correction.up)
                output = output + change if rows is None else output.index_add_(1, rows, change)
            return output

        return hook


def _scale(config: Mapping[str, Any], folder: str) -> float:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} is a {config.get('peft_type')} adapter; only LORA is supported")
    for key, value in config.items():
        allowed = PLAIN_STARTS if key == "init_lora_weights" else UNUSED
        if key not in HARMLESS and value not in allowed:
            raise ValueError(f"{folder} sets {key} to {value!r}, which is not supported")
    rank, alpha = config["r"], config["lora_alpha"]
    return float(alpha / math.sqrt(rank)) if config.get("use_rslora") else float(alpha / rank)


def _check_shapes(where: str, down: Tensor, up: Tensor, linear: nn.Linear) -> None:
    wanted = (up.shape[1], linear.in_features), (linear.out_features, down.shape[0])
    if (tuple(down.shape), tuple(up.shape)) != wanted:
        raise ValueError(
            f"{where} has lora_A {tuple(down.shape)} and lora_B {tuple(up.shape)}, but the layer takes "
            f"{linear.in_features} and gives {linear.out_features} numbers"
        )
