"""Sources of new weights: a module in this process, whole or sharded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from roost.engines.weights.payload import TensorInfo


class WeightSource(Protocol):
    """Weights of one policy version, by their names in a Hugging Face checkpoint."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Tensor infos in stream order."""
        ...

    @property
    def is_live(self) -> bool:
        """True if the streamed tensors are the weights themselves; otherwise each is gathered or cast on demand."""
        ...

    def stream(self) -> Iterator[torch.Tensor]:
        """Iterate over the tensors. If they are sharded, every rank of the learner must iterate over all of them."""
        ...


# Index into a weight: all of it, or some rows of one expert.
Index: TypeAlias = EllipsisType | tuple[int, slice]


class ModuleSource:
    """Weights of a module, gathered if sharded and cast if the engine's dtype differs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._weights = named_weights(module)
        self._parts = checkpoint_parts(module, self._weights)
        self._dtype = dtype

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(part, dtype_name(self._type_of(weight)), tuple(part_shape(weight.shape, index)))
            for name, weight in self._weights.items()
            for part, index in self._parts[name].items()
        )

    @property
    def is_live(self) -> bool:
        return all(
            not isinstance(weight, DTensor) and weight.dtype == self._type_of(weight) and weight.is_contiguous()
            for weight in self._weights.values()
        )

    def stream(self) -> Iterator[torch.Tensor]:
        for name, weight in self._weights.items():
            dtype = self._type_of(weight)
            # Cast before gathering: shards of master weights are twice as large as what engines take.
            own = weight.detach().to(dtype) if isinstance(weight, DTensor) else weight.detach()
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            for index in self._parts[name].values():
                yield whole[index].to(dtype).contiguous()

    def _type_of(self, weight: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and weight.is_floating_point() else weight.dtype


class WeightStream(ModuleSource):
    """Weights gathered by all ranks together. Every rank must call `finish`, or the others wait."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        super().__init__(module, dtype)
        self._streaming: Iterator[torch.Tensor] | None = None
        self._gathering = threading.Lock()

    def stream(self) -> Iterator[torch.Tensor]:
        self._streaming = super().stream()
        return self._rest(self._streaming)

    def finish(self) -> None:
        """Consume the rest of the stream. Thread-safe: another thread may still be packing a bucket."""
        for _ in self._rest(self._streaming) if self._streaming is not None else self.stream():
            pass

    def _rest(self, streaming: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        while True:
            with self._gathering:
                weight = next(streaming, None)
            if weight is None:
                return
            yield weight


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a family's experts in a checkpoint, where each expert has separate weights."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"  # the layer's part with router and experts


FUSED_GATES, FUSED_DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"  # as transformers holds them
# Families whose experts transformers holds in one tensor per layer, unlike their checkpoints.
EXPERT_NAMES = {
    "mixtral": ExpertNames("w1", "w3", "w2", block="block_sparse_moe"),
    "qwen2_moe": ExpertNames(),
    "qwen3_moe": ExpertNames(),
}


def checkpoint_parts(module: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, dict[str, Index]]:
    """Names of each weight in the family's checkpoint: one, or for fused experts one per expert and projection."""
    config = getattr(module, "config", None)
    names = EXPERT_NAMES.get(getattr(config, "model_type", ""))
    if names is None:
        return {name: {name: ...} for name in weights}
    return {name: expert_parts(name, weight.shape, names) for name, weight in weights.items()}


def expert_parts(name: str, shape: torch.Size, names: ExpertNames) -> dict[str, Index]:
    """Checkpoint names of one weight of a mixture of experts, and the index of each in that weight.

    >>> list(expert_parts("0.mlp.experts.down_proj", torch.Size((2, 8, 4)), EXPERT_NAMES["mixtral"]))
    ['0.block_sparse_moe.experts.0.w2.weight', '0.block_sparse_moe.experts.1.w2.weight']
    """
    if name.endswith(FUSED_GATES):
        path, half = name.removesuffix(FUSED_GATES), shape[1] // 2
        rows = {names.gate: slice(0, half), names.up: slice(half, 2 * half)}
    elif name.endswith(FUSED_DOWN):
        path, rows = name.removesuffix(FUSED_DOWN), {names.down: slice(0, shape[1])}
    else:
        return {name.replace(".mlp.", f".{names.block}."): ...}
    return {
        f"{path}.{names.block}.experts.{expert}.{part}.weight": (expert, part_rows)
        for expert in range(shape[0])
        for part, part_rows in rows.items()
    }


def part_shape(shape: torch.Size, index: Index) -> torch.Size:
    return shape if isinstance(index, EllipsisType) else torch.Size((index[1].stop - index[1].start, *shape[2:]))


def named_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied weights appear under their first name, as in a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, weight in module.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            found[name] = weight
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as sent to engines.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
