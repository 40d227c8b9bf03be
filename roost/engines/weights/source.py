"""Where new weights come from: a module in this process, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from roost.engines.weights.parcel import TensorInfo


class WeightSource(Protocol):
    """Weights of one policy version, under their names in a Hugging Face checkpoint."""

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """What comes, in the order in which it comes."""
        ...

    @property
    def is_live(self) -> bool:
        """Whether the tensors are there anyway; otherwise each is made when it is asked for, and goes away after."""
        ...

    def stream(self) -> Iterator[torch.Tensor]:
        """The tensors, one by one. Where they are sharded, every rank of the learner must go through all of them."""
        ...


class ModuleSource:
    """The weights of a module, gathered where they are sharded and cast where the engine has another type."""

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
    """Parameters and saved buffers by name; of tied ones the first name counts, as in a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, weight in module.state_dict(keep_vars=True).items():
        if id(weight) not in seen:
            seen.add(id(weight))
            found[name] = weight
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """A type as it is written on the wire.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
