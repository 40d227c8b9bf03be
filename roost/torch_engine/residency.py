"""Weights that leave the device and come back, in place: whoever holds a tensor still holds it afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roost.engines.weights.source import named_weights


class Weights:
    """The parameters and saved buffers of a model, which are on the device, in host memory, or nowhere."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = named_weights(module)  # under the names that the learner sends them by
        self._shapes = {name: weight.shape for name, weight in self._weights.items()}
        self._device = next(iter(self._weights.values())).device
        self._host: dict[str, Tensor] | None = None
        self._pinned: dict[str, Tensor] = {}
        self.are_here = True

    def named(self) -> dict[str, Tensor]:
        """The live tensors by their names in the checkpoint, to be read or written in place."""
        if not self.are_here:
            raise RuntimeError("the weights are asleep; wake them first")
        return {name: weight.data for name, weight in self._weights.items()}

    def move_to_host(self) -> None:
        if not self.are_here:
            return
        self._host = {name: self._host_copy(name, weight) for name, weight in self._weights.items()}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies must be there before what they are of is let go
        self._leave()

    def drop(self) -> None:
        self._host = None
        self._leave()

    def bring_back(self) -> None:
        """Back to the device; what is in those that were dropped means nothing until they are written."""
        if self.are_here:
            return
        for name, weight in self._weights.items():
            if self._host is None:
                weight.data = torch.empty(self._shapes[name], dtype=weight.dtype, device=self._device)
            else:
                weight.data = self._host[name].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._host = None
        self.are_here = True

    def host_buffer(self, name: str) -> Tensor:
        """Host memory of a weight's size. A GPU's is pinned, which takes long, and kept for the next time."""
        if self._device.type == "cpu":
            return torch.empty(self._shapes[name], dtype=self._weights[name].dtype)
        if name not in self._pinned:
            self._pinned[name] = torch.empty(self._shapes[name], dtype=self._weights[name].dtype, pin_memory=True)
        return self._pinned[name]

    def _host_copy(self, name: str, weight: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return weight.data
        return self.host_buffer(name).copy_(weight.data, non_blocking=True)

    def _leave(self) -> None:
        for weight in self._weights.values():
            weight.data = torch.empty(0, dtype=weight.dtype, device=self._device)
        self.are_here = False
