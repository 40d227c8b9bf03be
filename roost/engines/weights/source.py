"""Sources of new weights: a module in this process, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

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


class ModuleSource:
    """Weights of a module, gathered if sharded and cast if the engine's dtype differs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._weights = named_weights(module)
        self._dtype = dtype

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(name, dtype_name(self._type_of(weight)), tuple(weight.shape))
            for name, weight in self._weights.items()
        )

    @property
    def is_live(self) -> bool:
        return all(
            not isinstance(weight, DTensor) and weight.dtype == self._type_of(weight) and weight.is_contiguous()
            for weight in self._weights.values()
        )

    def stream(self) -> Iterator[torch.Tensor]:
        for weight in self._weights.values():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            yield whole.detach().to(self._type_of(weight)).contiguous()

    def _type_of(self, weight: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and weight.is_floating_point() else weight.dtype


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
