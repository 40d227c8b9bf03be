"""Tensors in host memory, taken apart for a message and put together again."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any, Literal

DeviceRoute = Literal["stage", "ipc"]  # a copy in host memory, or the device's own memory seen by both processes
Bytes = bytes | bytearray | memoryview

IN_HEADER = 1024  # bytes; for less, a buffer of its own costs more than the copy


def tensor_parts(tensor: Any, is_trained: bool | None = None) -> tuple[Any, ...] | None:
    """The arguments of `host_tensor` for a tensor on the CPU, copied if it is not contiguous; None if it is not plain.

    Converts first and checks only if that fails: each check of a tensor takes a tenth of the conversion.
    """
    values = tensor.detach() if tensor.requires_grad else tensor
    numbers, dtype, integers = _numpy_dtype(values.dtype)
    try:
        if not values.is_contiguous():
            values = values.contiguous()
        array = (values if integers is None else values.view(integers)).numpy()
    except (TypeError, RuntimeError):
        if not is_plain(values):
            return None
        if values.is_conj() or values.is_neg():  # a lazy conjugate or negation: materialise it
            return tensor_parts(values.resolve_conj().resolve_neg(), is_trained)
        raise
    if is_trained is not None:
        return pickle.PickleBuffer(array), numbers, array.shape, dtype, is_trained
    if dtype is not None:
        return pickle.PickleBuffer(array), numbers, array.shape, dtype
    return pickle.PickleBuffer(array), numbers, array.shape


def is_plain(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided" and not tensor.is_nested and not tensor.is_quantized


@cache
def _numpy_dtype(dtype: Any) -> tuple[str, Any, Any]:
    """NumPy type string of a dtype.

    For one that NumPy lacks (bfloat16): that of integers of its size, the dtype, and the integer dtype.
    """
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype.str, None, None
    except TypeError:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        return torch.empty(0, dtype=integers).numpy().dtype.str, dtype, integers


def host_tensor(
    buffer: Bytes, numbers: str, shape: tuple[int, ...], dtype: Any = None, is_trained: bool | None = None
) -> Any:
    """A tensor on a buffer of numpy's `numbers`, read as `dtype`; a parameter if `is_trained` is given."""
    import numpy as np
    import torch

    # NumPy takes half the time of torch.frombuffer, which also refuses empty buffers.
    tensor = torch.from_numpy(np.ndarray(shape, numbers, buffer))
    if dtype is not None:
        tensor = tensor.view(dtype)
    return tensor if is_trained is None else torch.nn.Parameter(tensor, requires_grad=is_trained)
