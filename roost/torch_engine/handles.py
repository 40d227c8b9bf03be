"""Tensors of another process on the same device, opened from the handles that torch's reductions give."""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch

from roost.engines.weights.parcel import DEVICE_ARGUMENT

# What a handle is made of. Anything else in a message is refused, so that it cannot run code here.
ALLOWED = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch.nn.parameter", "Parameter"),
}


def read_handles(text: str) -> Any:
    """Handles as they travel: a list of one per tensor, or one for a packed buffer."""
    return _HandleReader(io.BytesIO(base64.b64decode(text))).load()


def open_handle(handle: dict[str, tuple[Any, ...]], device: torch.device) -> torch.Tensor:
    """The tensor behind a handle, on the device that both processes use."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid not in handle:
        raise ValueError(
            f"the weights lie on {', '.join(handle)}, and this engine is on {uuid}; send them by broadcast"
        )
    arguments = list(handle[uuid])
    arguments[DEVICE_ARGUMENT] = device.index if device.index is not None else torch.cuda.current_device()
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return tensor


class _HandleReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.split(".")[0] == "torch" else None
        if (module, name) in ALLOWED or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a tensor's handle")
