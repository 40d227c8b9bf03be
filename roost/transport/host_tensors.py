"""Convert tensors in host memory to buffers of a message and back."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any, Literal

DeviceRoute = Literal["stage", "ipc"]  # a copy in host memory, or device memory shared by both processes
Bytes = bytes | bytearray | memoryview

MIN_BUFFER = 1024  # bytes; smaller data goes into the header, because a separate buffer costs more than the copy


def tensor_parts(tensor: Any, is_trained: bool | None = None) -> tuple[Any, ...] | None:
    """Arguments of `host_tensor` for a CPU tensor, copied if it is not contiguous; None if it is not plain.

    Converts first and checks only on failure, because each check takes a tenth of the time of the conversion.
    """
    values = tensor.detach() if tensor.requires_grad else tensor
    typestr, dtype, integers = _numpy_dtype(values.dtype)
    try:
        if not values.is_contiguous():
            values = values.contiguous()
        array = (values if integers is None else values.view(integers)).numpy()
    except (TypeError, RuntimeError):
        if not is_plain(values):
            return None
        if values.is_conj() or values.is_neg():  # lazy
            return tensor_parts(values.resolve_conj().resolve_neg(), is_trained)
        raise
    if is_trained is not None:
        return pickle.PickleBuffer(array), typestr, array.shape, dtype, is_trained
    if dtype is not None:
        return pickle.PickleBuffer(array), typestr, array.shape, dtype
    return pickle.PickleBuffer(array), typestr, array.shape


def is_plain(tensor: Any) -> bool:
    """Return True if a tensor is dense: not sparse, nested or quantized."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_nested and not tensor.is_quantized


@cache
def _numpy_dtype(dtype: Any) -> tuple[str, Any, Any]:
    """NumPy type string of a dtype, and two times None.

    For a dtype that NumPy lacks, such as bfloat16: the type string of integers of its size, the dtype itself, and the
    integer dtype.
    """
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype.str, None, None
    except TypeError:
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        return torch.empty(0, dtype=integers).numpy().dtype.str, dtype, integers


def host_tensor(
    buffer: Bytes, typestr: str, shape: tuple[int, ...], dtype: Any = None, is_trained: bool | None = None
) -> Any:
    """View of a buffer of NumPy type `typestr`, as a tensor of `dtype`; a Parameter if `is_trained` is given."""
    import numpy as np
    import torch

    # NumPy takes half the time of torch.frombuffer, which also refuses empty buffers.
    tensor = torch.from_numpy(np.ndarray(shape, typestr, buffer))
    if dtype is not None:
        tensor = tensor.view(dtype)
    return tensor if is_trained is None else torch.nn.Parameter(tensor, requires_grad=is_trained)
