"""Weights that another learner gave, put in place of a model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

BUCKET_BYTES = 1 << 28


def replace_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a model, which may be sharded; raises if one is missing, left over or of another shape."""
    own = model.state_dict(keep_vars=True)
    missing = {id(weight): name for name, weight in own.items()}  # of tied weights one name comes
    with torch.no_grad():
        for name, given in weights:
            if name not in own or own[name].shape != given.shape:
                raise ValueError(f"{name} of shape {tuple(given.shape)} is not among the model's weights")
            _fill(own[name], given)
            missing.pop(id(own[name]), None)
    if missing:
        raise ValueError(f"no weights came for {', '.join(sorted(missing.values()))}")


def in_buckets(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in lists of about so many bytes, to be sent one after the other.

    >>> [[name for name, _ in bucket] for bucket in in_buckets([(n, torch.zeros(2)) for n in "abc"], size=16)]
    [['a', 'b'], ['c']]
    """
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, weight in weights:
        bucket.append((name, weight))
        filled += weight.nbytes
        if filled >= size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _fill(weight: Tensor, given: Tensor) -> None:
    given = given.to(weight.device, weight.dtype)
    if isinstance(weight, DTensor):
        # Every rank has all of it, so that none needs to be told its part by another.
        given = distribute_tensor(given, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(given)
