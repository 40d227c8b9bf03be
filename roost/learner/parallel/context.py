"""Context parallelism (Ulysses): ranks split the tokens of a packed batch; for attention, each has all tokens of some
heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from roost.learner.sample import PAD, Packed

Counts: TypeAlias = list[int] | None  # by rank; None: all are equal


@dataclass(frozen=True, eq=False, slots=True)
class ContextGroup:
    """Ranks, each of which computes its share of the tokens of the same batches."""

    size: int
    rank: int  # of this process in the group
    group: Any

    def cut(self, packed: Packed) -> tuple[Packed, slice]:
        """This rank's tokens of a batch, and the slice of the batch's rows among them. Borders stay those of the batch.

        If the number of tokens does not divide, a sequence of padding is appended.
        """
        count = len(packed.token_ids)
        padding = -count % self.size
        share = (count + padding) // self.size
        own = slice(self.rank * share, (self.rank + 1) * share)
        rows = slice(*np.searchsorted(packed.rows, (own.start, own.stop)).tolist())
        tail = np.arange(padding)
        part = replace(
            packed,
            token_ids=np.concatenate([packed.token_ids, np.zeros_like(tail)])[own],
            positions=np.concatenate([packed.positions, tail])[own],
            borders=np.append(packed.borders, count + padding) if padding else packed.borders,
            rows=packed.rows[rows] - own.start,
            targets=packed.targets[rows],
            masks=None if packed.masks is None else packed.masks[rows],
            experts=None if packed.experts is None else _padded(packed.experts, padding)[own],
        )
        return part, rows

    def without_padding(self, count: int) -> int:
        """Number of this rank's tokens that are not padding, of a batch of `count` tokens.

        >>> [ContextGroup(4, rank, None).without_padding(5) for rank in range(4)]
        [2, 2, 1, 0]
        """
        share = -(-count // self.size)
        return min(share, max(0, count - self.rank * share))

    def by_heads(self, states: Tensor) -> Tensor:
        """From all heads of this rank's tokens to all tokens of this rank's heads, [1, heads, tokens, head size]."""
        states = states.squeeze(0)
        if len(states) < self.size:
            states = states.repeat_interleave(self.size // len(states), dim=0)
        heads, tokens, width = states.shape
        received = self._exchanged(states.reshape(self.size, heads // self.size, tokens, width))
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def by_tokens(self, states: Tensor) -> Tensor:
        """From all tokens of this rank's heads to all heads of this rank's tokens, [1, tokens, heads, head size]."""
        _, tokens, heads, width = states.shape
        received = self._exchanged(states.reshape(self.size, tokens // self.size, heads, width))
        return received.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)

    def all_rows(self, own: Tensor, rows: slice, count: int) -> Tensor:
        """Outputs of all rows of a batch, from those of each rank.

        In the backward pass each rank keeps the gradient of its own rows: it is whole, as every rank computes the loss
        of the whole batch.
        """
        return all_rows(own, rows, count, self.group)

    def _exchanged(self, parts: Tensor) -> Tensor:
        return exchanged(parts, self.group)


def _padded(experts: npt.NDArray[np.int16], tokens: int) -> npt.NDArray[np.int16]:
    return np.concatenate([experts, np.full((tokens, *experts.shape[1:]), PAD, np.int16)])


def exchanged(parts: Tensor, group: Any, sent: Counts = None, received: Counts = None) -> Tensor:
    """All-to-all over the first dimension; `sent` and `received` are the lengths of the parts by rank."""
    found: Tensor = _Exchange.apply(parts, group, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any, sent: Counts, received: Counts) -> Tensor:
        ctx.reverse = group, received, sent
        return _exchange(parts, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], *ctx.reverse), None, None, None


def _exchange(parts: Tensor, group: Any, sent: Counts, received: Counts) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts) if received is None else parts.new_empty(sum(received), *parts.shape[1:])
    dist.all_to_all_single(found, parts, received, sent, group=group)
    return found


def all_rows(own: Tensor, rows: slice, count: int, group: Any) -> Tensor:
    """All rows, from those of each rank of a group, all of which must compute the same gradient of them."""
    whole: Tensor = _AllRows.apply(own, rows, count, group)  # type: ignore[no-untyped-call]
    return whole


def own_rows(whole: Tensor, rows: slice, group: Any) -> Tensor:
    """This rank's rows of values that all ranks of a group have. The gradient has the rows of all ranks."""
    own: Tensor = _OwnRows.apply(whole, rows, group)  # type: ignore[no-untyped-call]
    return own


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: slice, count: int, group: Any) -> Tensor:
        ctx.rows = rows
        return _joined(own, rows, count, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.rows], None, None, None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: slice, group: Any) -> Tensor:
        ctx.reverse = rows, len(whole), group
        return whole[rows].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _joined(grads[0], *ctx.reverse), None, None


def _joined(own: Tensor, rows: slice, count: int, group: Any) -> Tensor:
    # All-reduce of a buffer in which each rank fills its rows: an all-gather needs equal numbers of rows.
    whole = own.new_zeros(count, *own.shape[1:])
    whole[rows] = own
    dist.all_reduce(whole, group=group)
    return whole
