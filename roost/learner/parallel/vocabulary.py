"""Vocabulary parallelism: embedding, log-probs and entropy when each tensor-parallel rank has a range of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from roost.learner.distributed import to_local


@dataclass(frozen=True, eq=False, slots=True)
class VocabularyShard:
    """This rank's range of token ids. All ranks of the group compute the same rows."""

    group: Any
    start: int
    size: int

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def embedded(self, token_ids: Tensor, embedding: nn.Embedding) -> Tensor:
        """Embeddings of token ids, each looked up on the rank that has it."""
        local, is_own = self._own(token_ids)
        padding = None if embedding.padding_idx is None else embedding.padding_idx - self.start
        # As on a single rank, the padding token gets no gradient.
        is_own_padding = padding is not None and 0 <= padding < self.size
        own = F.embedding(local, to_local(embedding.weight), padding if is_own_padding else None)
        return self._sum(own.masked_fill(~is_own.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor, last: nn.Linear) -> Tensor:
        """Logits of this rank's tokens."""
        bias = None if last.bias is None else to_local(last.bias)
        return F.linear(_same(hidden, self.group), to_local(last.weight), bias)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of all tokens; each rank gets the gradient of its own."""
        gathered: Tensor = _Whole.apply(logits, self.group)  # type: ignore[no-untyped-call]
        return gathered

    def picked(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Values of token ids in each row, from the ranks that have them."""
        local, is_own = self._own(token_ids)
        return self._sum(logits.gather(-1, local).masked_fill(~is_own, 0.0))

    def logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, learns_entropy: bool, masks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and the entropy, as `forward.logprobs_and_entropy` computes them from whole logits.

        All ranks compute the same from a sum over ranks, so each has the whole gradient of the sum.
        """
        scaled = logits.float() / temperature
        shifted = scaled.sub_(self._highest(scaled.detach().amax(-1, keepdim=True)))
        exponentials = shifted.exp()
        log_sum = self._sum(exponentials.sum(-1)).log()
        chosen = self.picked(shifted, targets[:, None]).squeeze(-1)
        parts = shifted, exponentials, log_sum
        values, weights, log_total = parts if learns_entropy else (each.detach() for each in parts)
        entropy = log_total - self._sum(_dot(weights, values)) / log_total.exp()
        return chosen - (log_sum if masks is None else self._masked(shifted, masks, log_sum)), entropy

    def _masked(self, shifted: Tensor, masks: Tensor, log_sum: Tensor) -> Tensor:
        """Log-sum-exp over each row's ids; `log_sum`, that over all ids, for a row without any."""
        local, is_own = self._own(masks)  # padding is below 0, so no rank's
        found = shifted.gather(-1, local).masked_fill(~is_own, float("-inf"))
        highest = self._highest(found.detach().amax(-1, keepdim=True))
        has_ids = highest.isfinite()
        # Rows without ids get 0 in place of -inf, whose difference would be NaN.
        summed = self._sum((found - highest.where(has_ids, 0.0)).exp().sum(-1, keepdim=True))
        masked = summed.where(has_ids, 1.0).log() + highest.where(has_ids, 0.0)
        return torch.where(has_ids.squeeze(-1), masked.squeeze(-1), log_sum)

    def _own(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids relative to this rank's range, 0 for those of other ranks, and the mask of its own."""
        local = token_ids.long() - self.start
        is_own = (local >= 0) & (local < self.size)
        return local.where(is_own, 0), is_own

    def _highest(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def _sum(self, values: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(values, self.group)  # type: ignore[no-untyped-call]
        return total


def _dot(one: Tensor, two: Tensor) -> Tensor:
    """Dot product of each pair of rows, without a tensor of all products."""
    return torch.bmm(one[:, None], two[:, :, None]).flatten()


def _same(values: Tensor, group: Any) -> Tensor:
    """Values that all ranks have. Their gradient is summed over ranks, each of which uses them for its own ids."""
    return cast(Tensor, _Same.apply(values, group))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Sum over ranks. All ranks compute the same from it, so each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.place, ctx.size = dist.get_rank(group), part.shape[-1]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.place * ctx.size, ctx.size), None
