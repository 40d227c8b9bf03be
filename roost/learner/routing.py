"""Routers of a mixture of experts: replay of the engine's choices, load of the experts, and the load-balancing loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roost.learner.distributed import world_size

# Routers that choose the top k of a softmax; each returns logits, weights and numbers of the chosen experts.
SOFTMAX_ROUTERS = ("MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")

Routed: TypeAlias = tuple[Tensor, Tensor, Tensor]  # logits, weights and experts of each token


class Routers:
    """All routers of a model. Experts to be replayed are set before a forward pass, and stay for its backward pass."""

    def __init__(self, routers: list[Any]) -> None:
        self.layers, self.top_k, self.experts = len(routers), int(routers[0].top_k), int(routers[0].num_experts)
        self._replayed: Tensor | None = None
        self._tokens: int | None = None  # of the pass that count; None: all
        self._routed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # logits, experts and own choice by layer
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._routing(layer))

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Routers of a mixture; None for a dense model, and for a family whose routers are not known here."""
        found = [module for module in model.modules() if type(module).__name__ in SOFTMAX_ROUTERS]
        return cls(found) if found else None

    def replay(self, experts: Tensor | None, tokens: int | None = None) -> None:
        """Begin a pass with these experts, [tokens, layers, top_k]; where one is negative, the model chooses.

        Tokens after the first `tokens` are padding and do not count as load.
        """
        if experts is not None and tuple(experts.shape[1:]) != (self.layers, self.top_k):
            raise ValueError(
                f"samples have {experts.shape[2]} routed experts in each of {experts.shape[1]} layers, but the model "
                f"chooses {self.top_k} in each of {self.layers}"
            )
        self._routed.clear()
        self._replayed = None if experts is None else experts.long()
        self._tokens = tokens

    def statistics(self) -> Tensor:
        """Sums over the last pass: tokens of each expert, then replayed choices and those that differ, by layer."""
        rows = []
        for _, experts, own in self._passes():
            counts = torch.bincount(experts.flatten(), minlength=self.experts)
            known = torch.zeros(2, device=experts.device)
            if self._replayed is not None:
                is_own = (experts[:, :, None] == own[:, None, :]).any(-1)
                is_known = self._replayed[: self._tokens, 0] >= 0
                known = torch.stack([is_known.sum(), (~is_own & is_known).sum()])
            rows.append(torch.cat([counts.float(), known.float()]))
        return torch.stack(rows)

    def balance_loss(self, group: Any = None) -> tuple[Tensor, Tensor]:
        """Load-balancing loss of the last pass (Fedus et al. 2021, "Switch Transformers"); top_k if the load is even.

        The mean of the layers' losses, over the tokens of all ranks of a context group. Returns this rank's part, whose
        gradients sum to those of the whole, and the whole.
        """
        passes = self._passes()
        own = torch.stack([logits.float().softmax(-1).sum(0) for logits, _, _ in passes])
        counts = torch.stack([torch.bincount(each.flatten(), minlength=self.experts) for _, each, _ in passes]).float()
        sums = torch.stack([counts, own.detach(), torch.full_like(counts, len(passes[0][1]))])
        if group is not None:
            dist.all_reduce(sums, group=group)
        counts, whole, tokens = sums
        weights = self.experts * counts / tokens**2
        return (weights * own).sum(-1).mean(), (weights * whole).sum(-1).mean()

    def forget(self) -> None:
        """Drop the tensors of the last pass, to free device memory."""
        self._routed.clear()
        self._replayed = self._tokens = None

    def _passes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        routed = (self._routed[layer] for layer in range(self.layers))
        return [
            (logits[: self._tokens], experts[: self._tokens], own[: self._tokens]) for logits, experts, own in routed
        ]

    def _routing(self, layer: int) -> Callable[[Any, Any, Routed], Routed]:
        def route(router: Any, inputs: Any, output: Routed) -> Routed:
            logits, weights, own = output
            experts = own
            if layer in self._routed:
                # A recomputation may round differently and choose the other of two nearly tied experts: gradients would
                # come from other ranks than the tokens went to.
                experts = self._routed[layer][1]
            elif self._replayed is not None:
                wanted = self._replayed[:, layer]
                experts = torch.where(wanted >= 0, wanted, own)
            # Also in a pass without replay: a recomputation must save the same tensors as the pass that it repeats.
            weights = expert_weights(logits, experts, getattr(router, "norm_topk_prob", True)).to(weights.dtype)
            # Not the tensors of a recomputation, which would keep its whole graph in memory.
            self._routed.setdefault(layer, (logits, experts, own))
            return logits, weights, experts

        return route


def expert_weights(logits: Tensor, experts: Tensor, is_normalised: bool) -> Tensor:
    """Weights of given experts; gradients flow to the router as if it had chosen them.

    >>> expert_weights(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[0, 1]]), True).tolist()
    [[0.5, 0.5]]
    """
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if is_normalised else chosen


def load_metrics(statistics: Tensor) -> dict[str, float]:
    """Metrics from `Routers.statistics` summed over a minibatch; they are summed over ranks here.

    `experts/load_max`: tokens of the busiest expert over the mean. `experts/load_entropy`: normalized entropy of the
    shares, 1 if the load is even. Both are means over layers. `experts/replaced`: share of replayed choices that the
    learner's routers would not have made.

    >>> load_metrics(torch.tensor([[6.0, 2.0, 0.0, 0.0, 8.0, 2.0]]))
    {'experts/load_max': 3.0, 'experts/load_entropy': 0.4056..., 'experts/replaced': 0.25}
    """
    if world_size() > 1:
        statistics = statistics.clone()
        dist.all_reduce(statistics)
    counts, (replayed, differ) = statistics[:, :-2], statistics[:, -2:].sum(0)
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1) / math.log(max(2, counts.shape[-1]))
    found = {
        "experts/load_max": float(shares.amax(-1).mean() * counts.shape[-1]),
        "experts/load_entropy": float(entropy.mean()),
    }
    return found | ({"experts/replaced": float(differ / replayed)} if replayed else {})
