"""Heads of a learner's model, policy or critic, and the loss of each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from roost.config.train import LossSettings
from roost.learner.losses import PolicyBatch, Totals, ValueBatch, policy_loss, value_loss
from roost.learner.packing import Packed, picked
from roost.learner.sample import Floats, Sample


class Head(StrEnum):
    """Type of a model's last layer."""

    POLICY = "policy"  # logits of the next token
    VALUE = "value"  # value before the next token: a critic


POLICY, VALUE = Head.POLICY, Head.VALUE


def part_of_loss(
    head: Head,
    outputs: tuple[Tensor, ...],
    samples: Sequence[Sample],
    packed: Packed,
    settings: LossSettings,
    totals: Totals,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and statistics of one micro-batch; both sum to those of the minibatch."""
    if not samples:
        return outputs[0].sum(), {}  # 0, but with a gradient of 0 for every weight
    compute = policy_part if head is Head.POLICY else value_part
    loss, stats = compute(outputs, samples, packed, settings, totals)
    return loss, {**stats, "loss": loss.detach()}


def policy_part(
    outputs: tuple[Tensor, ...], samples: Sequence[Sample], packed: Packed, settings: LossSettings, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss; `outputs` are log-probs and entropies, and with a teacher the divergence from it."""
    logprobs, entropy, *distilled = outputs
    device = logprobs.device
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=_of_all(samples, "old_logprobs", device),
        engine_logprobs=_tensor(picked(samples, [sample.logprobs for sample in samples]), device),
        advantages=_tensor(picked(samples, [sample.advantages for sample in samples]), device),
        sequence=torch.from_numpy(packed.sequence).to(device),
        turn=torch.from_numpy(packed.turn).to(device),
        entropy=entropy,
        reference_logprobs=_of_all(samples, "reference_logprobs", device),
        distillation=distilled[0] if distilled else None,
        rewards=_rewards(samples, packed, device),
    )
    return policy_loss(batch, settings, totals)


def value_part(
    outputs: tuple[Tensor, ...], samples: Sequence[Sample], packed: Packed, settings: LossSettings, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss; `outputs` are values."""
    (values,) = outputs
    old_values, returns = (_of_all(samples, name, values.device) for name in ("values", "returns"))
    if old_values is None or returns is None:
        raise ValueError("a critic learns from samples with values and returns")
    sequence = torch.from_numpy(packed.sequence).to(values.device)
    return value_loss(ValueBatch(values, old_values, returns, sequence), settings, totals)


def _of_all(samples: Sequence[Sample], name: str, device: torch.device) -> Tensor | None:
    """Optional field of all samples as a tensor, or None if no sample has it."""
    arrays: list[Floats] = [array for sample in samples if (array := getattr(sample, name)) is not None]
    if not arrays:
        return None
    if len(arrays) != len(samples):
        raise ValueError(f"{len(arrays)} of {len(samples)} samples have {name}; all must have them, or none")
    return _tensor(picked(samples, arrays), device)


def _rewards(samples: Sequence[Sample], packed: Packed, device: torch.device) -> Tensor | None:
    """The reward of each token's sample, if all samples have one."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return torch.tensor(rewards, device=device)[packed.sequence] if len(rewards) == len(samples) else None


def _tensor(array: Floats, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
