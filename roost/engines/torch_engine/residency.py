"""Weights that leave the device and come back, in place: whoever holds a parameter still holds it afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Weights:
    """The parameters of a model, which are on the device, in host memory, or nowhere."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())  # tied ones once
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._device = next(iter(self._parameters.values())).device
        self._host: dict[str, Tensor] | None = None
        self._pinned: dict[str, Tensor] = {}
        self.are_here = True

    def named(self) -> dict[str, Tensor]:
        """The live parameters by their names in the checkpoint, to be read or written in place."""
        if not self.are_here:
            raise RuntimeError("the weights are asleep; wake them first")
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def move_to_host(self) -> None:
        if not self.are_here:
            return
        self._host = {name: self._host_copy(name, parameter) for name, parameter in self._parameters.items()}
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
        for name, parameter in self._parameters.items():
            if self._host is None:
                parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)
            else:
                parameter.data = self._host[name].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._host = None
        self.are_here = True

    def host_buffer(self, name: str) -> Tensor:
        """Host memory of a weight's size. A GPU's is pinned, which takes long, and kept for the next time."""
        if self._device.type == "cpu":
            return torch.empty(self._shapes[name], dtype=self._parameters[name].dtype)
        if name not in self._pinned:
            self._pinned[name] = torch.empty(self._shapes[name], dtype=self._parameters[name].dtype, pin_memory=True)
        return self._pinned[name]

    def _host_copy(self, name: str, parameter: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return parameter.data
        return self.host_buffer(name).copy_(parameter.data, non_blocking=True)

    def _leave(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        self.are_here = False
