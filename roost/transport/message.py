"""Serialize an object to a small header and raw buffers: tensors, arrays and long strings stay out of the pickle.

Copies are avoided. `pack` returns views of the object's memory, so do not change the object before the buffers are
written. `unpack` returns views of the buffers; place each at a multiple of 64 bytes, for fast access to tensors. A
header is a pickle, which can run any code: unpack only headers from processes of the job.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any

from roost.transport.host_tensors import MIN_BUFFER, Bytes, DeviceRoute, host_tensor, is_plain, tensor_parts

if TYPE_CHECKING:
    from roost.transport.device_tensors import DeviceTensors

# Pickle writes strings of 64 KiB and more to its file in one piece, and everything else in frames of less than 128 KiB.
LONG_STRING = 128 * 1024
_PICKLE, _SPLICED = 0x80, 0x01  # first byte of a header: of any pickle, or of one with its long strings cut out
_COUNT, _CUT = struct.Struct("<BI"), struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Packed:
    """A serialized object. The buffers are flat views of the object's memory, and keep that memory alive."""

    header: bytes
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def pack(obj: Any, device_route: DeviceRoute = "stage") -> Packed:
    """Serialize an object to a header and buffers.

    NumPy arrays and torch tensors of 1 KiB and more, and strings (`bytes`, `bytearray`, `str`) of more than 128 KiB,
    get a buffer each, at any depth. Those that are not contiguous are copied, and arrive contiguous.

    Values, dtype and shape of a tensor are sent, but not its gradient, graph or attributes. Views of the same memory
    arrive as separate tensors; a tensor that occurs twice arrives as one. A `Parameter` stays one, with its
    `requires_grad`. Tensors of other layouts and classes (sparse, quantized, DTensor) are pickled by torch.

    `device_route` is the route of tensors on a device. `"stage"` copies them through host memory, to any process.
    `"ipc"` copies nothing: the receiver, another process that sees the same device, opens the sender's memory. Pack a
    message for each receiver, to be unpacked once. The memory is freed when both sides have dropped the tensor.

    Lambdas, local classes and definitions of `__main__` are sent by value, with cloudpickle.

    >>> import numpy as np
    >>> message = pack({"step": 3, "rewards": np.arange(1000.0)})
    >>> [buffer.nbytes for buffer in message.buffers], message.nbytes < 8200
    ([8000], True)
    >>> unpack(message.header, message.buffers)["rewards"][:3]
    array([0., 1., 2.])
    """
    if device_route not in ("stage", "ipc"):
        raise ValueError(f"a device route is 'stage' or 'ipc', not {device_route!r}")
    devices = _Devices(device_route)
    parts = _Parts()
    try:
        _Pickler(parts, devices).dump(obj)
    # Pickle raises these for objects it cannot send by name. An error with another cause is raised again below.
    except (pickle.PicklingError, AttributeError, TypeError):
        parts = _Parts()
        _by_value_pickler()(parts, devices).dump(obj)
    devices.finish()
    return parts.packed()


def unpack(header: Bytes, buffers: Sequence[Bytes], device: Any = None) -> Any:
    """Deserialize an object; its arrays and tensors are views of the buffers.

    They are writable if the buffer is. Torch has no read-only tensors: for a read-only buffer it warns once, and the
    caller must not write to the tensor. Tensors sent from a device through host memory are copied to `device`; without
    one they stay on the CPU.

    >>> message = pack([1, "two", None])
    >>> unpack(message.header, message.buffers)
    [1, 'two', None]
    """
    if header[0] == _PICKLE and device is None:
        return pickle.loads(header, buffers=buffers)
    stream, others = _opened(header, buffers)
    return _Unpickler(stream, others, device).load()


class _Parts:
    """Collects a message: the file that a pickler writes to, and its buffer callback."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.stream: list[bytes] = []
        self.cuts: list[tuple[int, int]] = []  # of each string cut out: its position in the stream and its buffer
        self.length = 0

    def write(self, chunk: bytes) -> int:
        if len(chunk) > LONG_STRING:
            self.cuts.append((self.length, len(self.buffers)))
            self.buffers.append(memoryview(chunk))
        else:
            self.stream.append(chunk)
            self.length += len(chunk)
        return len(chunk)

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Buffer callback of the pickler: keep a large buffer, return True to pickle a small one in the header."""
        raw = buffer.raw()
        if raw.nbytes < MIN_BUFFER:
            return True
        self.buffers.append(raw)
        return False

    def packed(self) -> Packed:
        if not self.cuts:
            return Packed(b"".join(self.stream), tuple(self.buffers))
        index = [_COUNT.pack(_SPLICED, len(self.cuts)), *(_CUT.pack(*cut) for cut in self.cuts)]
        return Packed(b"".join([*index, *self.stream]), tuple(self.buffers))


def _opened(header: Bytes, buffers: Sequence[Bytes]) -> tuple[io.BufferedIOBase, Sequence[Bytes]]:
    """The pickle of a header with its long strings inserted, and the other buffers."""
    if header[0] == _PICKLE:
        return io.BytesIO(header), buffers
    if header[0] != _SPLICED:
        raise pickle.UnpicklingError(f"the header of a message must begin with 0x80 or 0x01, not {header[0]:#04x}")
    count = _COUNT.unpack_from(header)[1]
    first = _COUNT.size + count * _CUT.size
    cuts = list(_CUT.iter_unpack(memoryview(header)[_COUNT.size : first]))
    stream = memoryview(header)[first:]
    bounds = [0, *(position for position, _ in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(bounds)]
    strings = [memoryview(buffers[number]) for _, number in cuts]
    # There is one piece more than strings: they alternate, and the last piece ends the stream.
    alternating = [part for both in zip(pieces, strings, strict=False) for part in both] + pieces[-1:]
    used = {number for _, number in cuts}
    others = [buffer for number, buffer in enumerate(buffers) if number not in used]
    return io.BufferedReader(_Pieces(alternating)), others


class _Pieces(io.RawIOBase):
    """Reads pieces of memory in order, as one stream."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in reversed(pieces) if piece.nbytes]

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop()
        count = min(len(target), piece.nbytes)
        target[:count] = piece[:count]
        if count < piece.nbytes:
            self._pieces.append(piece[count:])
        return count


class _Devices:
    """Serializes the device tensors of one message for both picklers; imports torch at the first one."""

    def __init__(self, route: DeviceRoute) -> None:
        self._route = route
        self._tensors: DeviceTensors | None = None

    def reduce(self, tensor: Any, is_trained: bool | None) -> Any:
        if self._tensors is None:
            from roost.transport.device_tensors import DeviceTensors

            self._tensors = DeviceTensors(self._route)
        return self._tensors.reduce(tensor, is_trained)

    def finish(self) -> None:
        if self._tensors is not None:
            self._tensors.finish()


class _Reductions:
    """Reducers of arrays and tensors by class; NotImplemented for those left to pickle."""

    def __init__(self, devices: _Devices) -> None:
        self._devices = devices
        self.by_class: dict[Any, Callable[[Any], Any]] = {}
        # A process that holds a tensor or an array has imported its library.
        numpy: Any = sys.modules.get("numpy")
        torch: Any = sys.modules.get("torch")
        if hasattr(numpy, "ndarray"):
            self.by_class[numpy.ndarray] = self._array
        if hasattr(torch, "Tensor") and hasattr(torch, "nn"):
            self.by_class[torch.Tensor] = self._tensor
            self.by_class[torch.nn.Parameter] = self._parameter

    def _tensor(self, tensor: Any, is_trained: bool | None = None) -> Any:
        if tensor.is_cpu:
            parts = tensor_parts(tensor, is_trained)
            return NotImplemented if parts is None else (host_tensor, parts)
        if tensor.is_meta or not is_plain(tensor):
            return NotImplemented
        return self._devices.reduce(tensor, is_trained)

    def _parameter(self, parameter: Any) -> Any:
        return self._tensor(parameter, parameter.requires_grad)

    @staticmethod
    def _array(array: Any) -> Any:
        is_time = array.dtype.kind in "mM"  # dates and times have no buffer interface; their integers do
        if array.dtype.hasobject or (array.flags.forc and not is_time):
            return NotImplemented  # pickled item by item, or made a buffer by NumPy itself
        flat = array if array.flags.c_contiguous else array.copy(order="C")
        return _array, (pickle.PickleBuffer(flat.view("i8") if is_time else flat), array.dtype, array.shape)


def _array(buffer: Bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.ndarray(shape, dtype, buffer)


class _Pickler(pickle.Pickler):
    """Pickles classes and functions by name; raises for those that another process cannot import."""

    def __init__(self, parts: _Parts, devices: _Devices) -> None:
        super().__init__(parts, protocol=5, buffer_callback=parts.take)
        self._by_class = _Reductions(devices).by_class

    def reducer_override(self, obj: Any) -> Any:
        reduce = self._by_class.get(type(obj))
        if reduce is not None:
            return reduce(obj)
        # Another process has another __main__, where the name is missing or has another meaning.
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
        return NotImplemented


@cache
def _by_value_pickler() -> Any:
    """Pickler class for objects that cannot be sent by name; created on first use, because it imports Ray."""
    from ray import cloudpickle

    by_value: Any = cloudpickle.CloudPickler

    class ByValuePickler(by_value):  # type: ignore[misc]
        def __init__(self, parts: _Parts, devices: _Devices) -> None:
            super().__init__(parts, protocol=5, buffer_callback=parts.take)
            self._by_class = _Reductions(devices).by_class

        def reducer_override(self, obj: Any) -> Any:
            reduce = self._by_class.get(type(obj))
            return reduce(obj) if reduce is not None else super().reducer_override(obj)

    return ByValuePickler


class _Unpickler(pickle.Unpickler):
    """Unpickler that copies tensors staged in host memory to a device."""

    def __init__(self, stream: io.BufferedIOBase, buffers: Sequence[Bytes], device: Any) -> None:
        super().__init__(stream, buffers=buffers)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if self._device is not None and (module, name) == ("roost.transport.device_tensors", "staged_tensor"):
            return partial(found, device=self._device)
        return found
