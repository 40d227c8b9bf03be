"""Device tensors in a message: copied through host memory, or shared with another process by CUDA IPC."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.multiprocessing import reductions

from roost.transport.host_tensors import MIN_BUFFER, Bytes, DeviceRoute, host_tensor, tensor_parts

_DEVICE = 6  # position of the device index among the arguments of torch's `rebuild_cuda_tensor`


class DeviceNotVisible(RuntimeError):
    """A tensor is on a device that the receiving process cannot see."""


class DeviceTensors:
    """Serializes the device tensors of one message.

    Copies to host memory are asynchronous: call `finish` before reading the buffers.
    """

    def __init__(self, route: DeviceRoute) -> None:
        self._route = route
        self._copying: set[torch.device] = set()
        # By tensor id. A message that is pickled a second time must not share its tensors twice: an IPC handle that
        # nobody opens leaks the memory. The tensor is kept too, so that its id is not reused.
        self._done: dict[int, tuple[torch.Tensor, Any]] = {}

    def reduce(self, tensor: torch.Tensor, is_trained: bool | None) -> Any:
        """Function and arguments that rebuild the tensor; `is_trained` is None unless it is a parameter."""
        if id(tensor) not in self._done:
            reduced = self._staged(tensor, is_trained) if self._route == "stage" else _shared(tensor, is_trained)
            self._done[id(tensor)] = (tensor, reduced)
        return self._done[id(tensor)][1]

    def finish(self) -> None:
        """Wait for the copies that `reduce` started."""
        for device in self._copying:
            torch.cuda.current_stream(device).synchronize()
        self._copying.clear()

    def _staged(self, tensor: torch.Tensor, is_trained: bool | None) -> Any:
        tensor = _resolved(tensor)
        if tensor.is_cuda and tensor.nbytes >= MIN_BUFFER:
            host = _pinned_like(tensor)
            host.copy_(tensor, non_blocking=True)
            self._copying.add(tensor.device)
        else:
            host = tensor.cpu()  # small tensors are read while the header is written, before `finish`
        return staged_tensor, tensor_parts(host, is_trained)


def staged_tensor(
    buffer: Bytes,
    typestr: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None = None,
    is_trained: bool | None = None,
    device: Any = None,
) -> torch.Tensor:
    """Tensor received through host memory, copied to the device if one is given."""
    tensor: torch.Tensor = host_tensor(buffer, typestr, shape, dtype)
    if device is not None:
        tensor = tensor.to(device)  # blocks until copied: the buffer may be reused
    return _as_sent(tensor, is_trained)


def opened_tensor(uuid: str, arguments: tuple[Any, ...], is_trained: bool | None = None) -> torch.Tensor:
    """Tensor in another process's memory. Its device is found by UUID, as indices differ between processes."""
    index = _index_of(uuid)
    rebuild: Any = reductions.rebuild_cuda_tensor
    tensor: torch.Tensor = rebuild(*arguments[:_DEVICE], index, *arguments[_DEVICE + 1 :])
    return _as_sent(tensor, is_trained)


def _as_sent(tensor: torch.Tensor, is_trained: bool | None) -> torch.Tensor:
    return tensor if is_trained is None else torch.nn.Parameter(tensor, requires_grad=is_trained)


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Empty host tensor of the same shape; pinned if possible, which makes the copy twice as fast."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _shared(tensor: torch.Tensor, is_trained: bool | None) -> Any:
    if not tensor.is_cuda:
        raise ValueError(
            f"a tensor on {tensor.device} cannot be opened by another process: only CUDA devices can, "
            "send it with device_route='stage'"
        )
    reduce: Any = reductions.reduce_tensor
    _, arguments = reduce(_resolved(tensor))
    return opened_tensor, (_uuid(arguments[_DEVICE]), arguments, is_trained)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with lazy conjugates and negations computed: its memory and torch's IPC arguments lack them."""
    return tensor.detach().resolve_conj().resolve_neg()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(uuid: str) -> int:
    seen = [_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid in seen:
        return seen.index(uuid)
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise DeviceNotVisible(
        f"the tensor is on device {uuid}, and this process sees {', '.join(seen) or 'no device'} "
        f"(CUDA_VISIBLE_DEVICES={'not set' if variable is None else repr(variable)}): "
        "make that device visible to it, or send with device_route='stage'"
    )
