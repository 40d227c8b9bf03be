"""An object as a small header and raw buffers: tensors, arrays and long strings travel beside the pickle, not in it.

Nothing is copied that need not be. `pack` gives views of the memory of the object, so it must not be altered before the
buffers have been written; `unpack` gives views of the buffers. Whoever reads them should place each on a multiple of
64 bytes, as tensors like it. A header is a pickle, which can run any code: take one only from processes of the job.
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

from roost.transport.host_tensors import IN_HEADER, Bytes, DeviceRoute, host_tensor, is_plain, tensor_parts

if TYPE_CHECKING:
    from roost.transport.device_tensors import DeviceTensors

# Pickle hands strings of 64 KiB and more to its file unbroken, and everything else in frames of less than twice that.
LONG_STRING = 128 * 1024
_PICKLE, _SPLICED = 0x80, 0x01  # the first byte of a header: any pickle's, or that of a stream with strings left out
_COUNT, _CUT = struct.Struct("<BI"), struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Packed:
    """An object ready to be sent: the buffers are flat views of its own memory, and keep that memory alive."""

    header: bytes
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers)


def pack(obj: Any, device_route: DeviceRoute = "stage") -> Packed:
    """Take an object apart into a header and the buffers that go beside it.

    Buffers of their own have: numpy arrays and torch tensors of a kilobyte and more, and strings (`bytes`, `bytearray`,
    `str`) of more than 128 KiB, however deep they lie. What is not contiguous is copied first, and arrives contiguous.

    A tensor stands for its values, dtype and shape. It arrives without gradient, graph or attributes, and apart from
    tensors that were views of the same memory; the same tensor met twice arrives as one. A `Parameter` stays one, with
    its `requires_grad`. Tensors of other layouts and classes (sparse, quantised, DTensor) are pickled as torch does it.

    Tensors on a device take `device_route`. `"stage"`: through host memory, to any process. `"ipc"`: nothing moves, and
    the receiver sees the sender's memory; it must be another process that sees the same device, and each receiver needs
    a message packed for it, which it unpacks once. The memory is given back when the last side has dropped the tensor.

    Lambdas, local classes and what `__main__` defines are sent by value, with cloudpickle.

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
    # Each is what pickle raises for something it cannot send by name; if it meant anything else, it is raised again.
    except (pickle.PicklingError, AttributeError, TypeError):
        parts = _Parts()
        _by_value_pickler()(parts, devices).dump(obj)
    devices.finish()
    return parts.packed()


def unpack(header: Bytes, buffers: Sequence[Bytes], device: Any = None) -> Any:
    """Put an object together again; its arrays and tensors are views of the buffers.

    They can be written to where the buffer can. Torch knows no tensor that cannot be written to: on a read-only buffer
    it warns, once, and writing to that tensor is the caller's mistake to avoid. Tensors that came through host memory
    from a device are copied to `device`, and stay on the CPU without one.

    >>> message = pack([1, "two", None])
    >>> unpack(message.header, message.buffers)
    [1, 'two', None]
    """
    if header[0] == _PICKLE and device is None:
        return pickle.loads(header, buffers=buffers)
    stream, beside = _opened(header, buffers)
    return _Unpickler(stream, beside, device).load()


class _Parts:
    """Collects a message, as the file that a pickler writes to and as the taker of its buffers."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.stream: list[bytes] = []
        self.cuts: list[tuple[int, int]] = []  # where in the stream a string is missing, and which buffer it is
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
        """Take a buffer that goes beside the header; true if it is to go inside."""
        raw = buffer.raw()
        if raw.nbytes < IN_HEADER:
            return True
        self.buffers.append(raw)
        return False

    def packed(self) -> Packed:
        if not self.cuts:
            return Packed(b"".join(self.stream), tuple(self.buffers))
        index = [_COUNT.pack(_SPLICED, len(self.cuts)), *(_CUT.pack(*cut) for cut in self.cuts)]
        return Packed(b"".join([*index, *self.stream]), tuple(self.buffers))


def _opened(header: Bytes, buffers: Sequence[Bytes]) -> tuple[io.BufferedIOBase, Sequence[Bytes]]:
    """The stream of a header with its strings back in, and the other buffers."""
    if header[0] == _PICKLE:
        return io.BytesIO(header), buffers
    if header[0] != _SPLICED:
        raise pickle.UnpicklingError(f"a message's header begins with 0x80 or 0x01, this one with {header[0]:#04x}")
    count = _COUNT.unpack_from(header)[1]
    first = _COUNT.size + count * _CUT.size
    cuts = list(_CUT.iter_unpack(memoryview(header)[_COUNT.size : first]))
    stream = memoryview(header)[first:]
    bounds = [0, *(position for position, _ in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(bounds)]
    strings = [memoryview(buffers[number]) for _, number in cuts]
    # One piece more than strings: they take turns, and the stream ends with a piece of its own.
    turns = [part for both in zip(pieces, strings, strict=False) for part in both] + pieces[-1:]
    used = {number for _, number in cuts}
    beside = [buffer for number, buffer in enumerate(buffers) if number not in used]
    return io.BufferedReader(_Pieces(turns)), beside


class _Pieces(io.RawIOBase):
    """Reads pieces of memory one after the other, as if they were one."""

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
    """The device tensors of one message, whichever pickler meets them; torch is asked only once there is one."""

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
        is_time = array.dtype.kind in "mM"  # no buffer can be had of these, only of the numbers they are
        if array.dtype.hasobject or (array.flags.forc and not is_time):
            return NotImplemented  # pickled item by item, or put beside the header by numpy itself
        flat = array if array.flags.c_contiguous else array.copy(order="C")
        return _array, (pickle.PickleBuffer(flat.view("i8") if is_time else flat), array.dtype, array.shape)


def _array(buffer: Bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.ndarray(shape, dtype, buffer)


class _Pickler(pickle.Pickler):
    """Pickles by name what has one that another process can find."""

    def __init__(self, parts: _Parts, devices: _Devices) -> None:
        super().__init__(parts, protocol=5, buffer_callback=parts.take)
        self._by_class = _Reductions(devices).by_class

    def reducer_override(self, obj: Any) -> Any:
        reduce = self._by_class.get(type(obj))
        if reduce is not None:
            return reduce(obj)
        # Another process has another __main__, where the name is missing, or is something else.
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in __main__")
        return NotImplemented


@cache
def _by_value_pickler() -> Any:
    """The pickler for the rest; made when first needed, since few messages are worth importing Ray for."""
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
    """Puts what came through host memory on a device."""

    def __init__(self, stream: io.BufferedIOBase, buffers: Sequence[Bytes], device: Any) -> None:
        super().__init__(stream, buffers=buffers)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if self._device is not None and (module, name) == ("roost.transport.device_tensors", "staged_tensor"):
            return partial(found, device=self._device)
        return found
