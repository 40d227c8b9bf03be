"""Split a manifest into buckets, which bounds the extra memory of an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from roost.engines.weights.parcel import TensorInfo

BUCKET_BYTES = 512 * 2**20
WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}


def size_of(tensor: TensorInfo) -> int:
    """Bytes of a tensor; dtypes not in WIDTHS (int8, float8_e4m3fn, bool) have one byte.

    >>> size_of(TensorInfo("a", "bfloat16", (3, 4)))
    24
    """
    return math.prod(tensor.shape) * WIDTHS.get(tensor.dtype, 1)


def cut(tensors: Iterable[TensorInfo], limit: int = BUCKET_BYTES) -> Iterator[tuple[TensorInfo, ...]]:
    """Split tensors in order into buckets of at most `limit` bytes; a larger tensor gets its own bucket.

    >>> rows = [TensorInfo(name, "float32", (size,)) for name, size in (("a", 2), ("b", 1), ("c", 9), ("d", 1))]
    >>> [[tensor.name for tensor in bucket] for bucket in cut(rows, limit=12)]
    [['a', 'b'], ['c'], ['d']]
    """
    bucket: list[TensorInfo] = []
    filled = 0
    for tensor in tensors:
        size = size_of(tensor)
        if bucket and filled + size > limit:
            yield tuple(bucket)
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield tuple(bucket)
