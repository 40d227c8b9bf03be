"""Forward pass of a packed batch to log-probs or values of predicted tokens, without holding all logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from roost.config.data import Distillation
from roost.config.train import ImportanceSamplingLevel, LossSettings, OldLogprobs
from roost.learner.attention import ARGUMENT, Segments
from roost.learner.losses import PolicyBatch, Totals, ValueBatch, distillation_losses, policy_loss, value_loss
from roost.learner.parallel.context import ContextGroup
from roost.learner.parallel.vocabulary import VocabularyShard
from roost.learner.routing import Routers
from roost.learner.sample import PAD, Floats, Packed, Sample, apart_from_engine, picked
from roost.vision.processor import Processor
from roost.vision.tower import ImageRows, embedded, image_rows


@dataclass(frozen=True, eq=False, slots=True)
class History:
    """Tokens before each target, for logit processors. A rank of a context group needs those of other ranks, too."""

    token_ids: Tensor  # of the whole batch
    spans: Tensor  # [rows, 3]: start of the row's sequence, the row, and the target's place in its turn

    @classmethod
    def of(cls, packed: Packed, own: slice, device: torch.device) -> History:
        spans = np.stack([packed.borders[packed.sequence], packed.rows, packed.place], axis=-1)[own]
        return cls(torch.from_numpy(packed.token_ids).to(device), torch.from_numpy(spans).to(device))


@dataclass(frozen=True, slots=True)
class LogitProcessors:
    """Changes that engines make to logits before the temperature, depending on the tokens so far."""

    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()

    @property
    def changes_logits(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.min_new_tokens and self.eos_ids)

    def __call__(self, logits: Tensor, targets: Tensor, token_ids: Tensor, spans: Tensor, start: int = 0) -> Tensor:
        """Changed logits; they are of the token ids from `start`, as a rank may have a part of the vocabulary."""
        logits, size = logits.float(), logits.shape[-1]
        if self.min_new_tokens and self.eos_ids:
            ends = torch.tensor(self.eos_ids, device=logits.device)
            # A target that ended its turn was allowed, whatever its place: engines also count tokens that are not
            # learnt from.
            is_early = (spans[:, 2] < self.min_new_tokens) & ~torch.isin(targets, ends)
            is_end = torch.isin(torch.arange(start, start + size, device=logits.device), ends)
            logits = logits.masked_fill(is_early[:, None] & is_end, IMPOSSIBLE)
        if self.repetition_penalty != 1.0:
            lowered = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            # Tokens of other ranks' ids share one more column, which is dropped.
            own = (token_ids - start).where((token_ids >= start) & (token_ids < start + size), size)
            logits = torch.where(seen_tokens(own, spans, size + 1)[:, :size], lowered, logits)
        return logits


IMPOSSIBLE = -1e30  # not -inf, whose entropy is NaN


def seen_tokens(token_ids: Tensor, spans: Tensor, vocabulary: int) -> Tensor:
    """Mask [rows, vocabulary] of the tokens from the start of each row's sequence to the row.

    Every sequence between those of the first and the last row has rows.

    >>> seen_tokens(torch.tensor([2, 0, 1, 3]), torch.tensor([[0, 0], [0, 1], [2, 2]]), 4).int().tolist()
    [[0, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 0]]
    """
    if not len(spans):
        return torch.zeros(0, vocabulary, dtype=torch.bool, device=spans.device)
    starts, sequence = torch.unique_consecutive(spans[:, 0].contiguous(), return_inverse=True)
    # First position of each token id in each sequence: a mask of all earlier tokens per row would grow quadratically.
    index = torch.arange(int(starts[0]), int(spans[-1, 1]) + 1, device=spans.device)
    owner = torch.searchsorted(starts, index, right=True) - 1
    first = torch.full((len(starts) * vocabulary,), len(token_ids), dtype=torch.int32, device=spans.device)
    first.scatter_reduce_(0, owner * vocabulary + token_ids[index], index.int(), "amin")
    return first.view(-1, vocabulary)[sequence] <= spans[:, 1, None]


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A packed batch on the device."""

    token_ids: Tensor
    positions: Tensor
    segments: Segments
    rows: Tensor
    targets: Tensor
    own: slice  # of the batch's rows, which a context group divides
    teacher_logits: Tensor | None = None  # of each row
    teacher_ids: Tensor | None = None
    masks: Tensor | None = None  # ids that each target was sampled from, padded
    history: History | None = None
    images: ImageRows | None = None
    experts: Tensor | None = None  # of each token, to replay
    tokens: int | None = None  # that are not padding of a context group; None: all

    @classmethod
    def of(
        cls,
        packed: Packed,
        device: torch.device,
        samples: Sequence[Sample] = (),
        context: ContextGroup | None = None,
    ) -> Rows:
        """Rows of the packed samples, with the teacher's distribution if `samples` have it.

        With a context group, only this rank's rows.
        """
        whole = packed
        packed, own = (packed, slice(None)) if context is None else context.cut(packed)
        arrays = (packed.token_ids, packed.positions, packed.rows, packed.targets)
        token_ids, positions, rows, targets = (torch.from_numpy(array).to(device) for array in arrays)
        taught = [sample.distribution for sample in samples if sample.distribution is not None]
        logits = [each.logits for each in taught]
        ids = [each.token_ids for each in taught if each.token_ids is not None]
        teacher = torch.from_numpy(np.concatenate(logits)[own]).to(device) if logits else None
        teacher_ids = torch.from_numpy(np.concatenate(ids)[own]).to(device) if ids else None
        masks = None if packed.masks is None else torch.from_numpy(packed.masks).to(device)
        experts = None if packed.experts is None else torch.from_numpy(packed.experts).to(device)
        segments = Segments.of(packed.borders, device, context)
        history = History.of(whole, own, device)
        rest = (teacher, teacher_ids, masks, history)
        tokens = None if context is None else context.without_padding(len(whole.token_ids))
        return cls(token_ids, positions, segments, rows, targets, own, *rest, experts=experts, tokens=tokens)

    def with_images(self, packed: Packed, processor: Processor) -> Rows:
        """The batch with its images, and with the three positions of each token, [3, tokens]."""
        borders = packed.borders.tolist()
        lengths = [end - start for start, end in pairwise(borders)]
        of_each = packed.images or ((),) * len(lengths)
        positions = [processor.positions(*each) for each in zip(lengths, of_each, strict=True)]
        device = self.token_ids.device
        return replace(
            self,
            positions=torch.from_numpy(np.concatenate(positions, axis=1)).to(device),
            images=image_rows(processor, list(zip(borders, lengths, of_each, strict=False)), device),
        )


class Outputs(nn.Module):
    """A transformers model whose forward returns outputs for the rows of a batch.

    It is the root module for FSDP: its hooks gather the root's weights when the root is called, and the model itself
    is not called, only its body and its last layer.
    """

    def __init__(self, model: PreTrainedModel, body: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        # In a tuple, so that they are not registered again: the model already contains them.
        self._parts = (body, last)
        self.routers = Routers.of(model)

    def hidden(self, batch: Rows) -> Tensor:
        """Final hidden state of each row."""
        if self.routers is not None:
            self.routers.replay(batch.experts, batch.tokens)
        body: Any = self._parts[0]
        if batch.positions.dim() == 1:
            inputs = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None]}
        else:
            embeddings = embedded(body, batch.token_ids, batch.images)
            inputs = {"inputs_embeds": embeddings[None], "position_ids": batch.positions[:, None]}
        output = body(**inputs, use_cache=False, **{ARGUMENT: batch.segments})
        states: Tensor = output.last_hidden_state
        return states[0].index_select(0, batch.rows)


class PolicyOutputs(Outputs):
    """Log-probs of the targets at a temperature, and the entropy of their distribution.

    For rows with a teacher's distribution, the divergence from it as well. Log-probs of rows with a sampling mask are
    normalised over its ids; the entropy is always that of the whole distribution.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        body: nn.Module,
        last: nn.Module,
        *,
        chunk: int,
        temperature: float,
        learns_entropy: bool,
        distillation: Distillation | None = None,
        compiles: bool = False,
        processors: LogitProcessors | None = None,
        vocabulary: VocabularyShard | None = None,
    ) -> None:
        super().__init__(model, body, last)
        self._vocabulary = vocabulary  # of this rank, if it is divided
        self._logprobs = torch.compile(logprobs_and_entropy, dynamic=True) if compiles else logprobs_and_entropy
        self._chunk = chunk
        self._temperature = temperature
        self._learns_entropy = learns_entropy
        self._distillation = distillation or Distillation()
        self._processors = processors
        self._top_k: tuple[int, int] | None = None  # k, and the size of the vocabulary

    def forward(self, batch: Rows) -> tuple[Tensor, ...]:
        history = None if self._processors is None else batch.history
        spans, token_ids = (None, None) if history is None else (history.spans, history.token_ids)
        columns = (self.hidden(batch), batch.targets, batch.teacher_logits, batch.teacher_ids, batch.masks, spans)
        compute = partial(self._chunk_outputs if self._top_k is None else self._top_logits, token_ids)
        # Run even without rows, so that every weight gets a gradient on every rank.
        chunks = zip(*(repeat(None) if each is None else each.split(self._chunk) for each in columns), strict=False)
        parts = [checkpoint(compute, *each, use_reentrant=False) for each in chunks]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    @contextmanager
    def returning_top_logits(self, top_k: int, vocabulary: int) -> Iterator[None]:
        """Context in which outputs are the `top_k` highest logits and their token ids; 0: all logits, without ids."""
        self._top_k = (top_k, vocabulary)
        try:
            yield
        finally:
            self._top_k = None

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Context in which log-probs are at another temperature, without the sampling settings' logit processors."""
        usual = self._temperature, self._processors
        self._temperature, self._processors = temperature, None
        try:
            yield
        finally:
            self._temperature, self._processors = usual

    def _top_logits(self, token_ids: Tensor | None, hidden: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
        top_k, vocabulary = self._top_k or (0, 0)
        logits = self._logits(hidden)
        logits = (logits if self._vocabulary is None else self._vocabulary.whole(logits)).float()[:, :vocabulary]
        if not top_k:
            return (logits,)
        highest, token_ids = logits.topk(min(top_k, logits.shape[-1]))
        return highest, token_ids.int()

    def _chunk_outputs(
        self,
        token_ids: Tensor | None,
        hidden: Tensor,
        targets: Tensor,
        teacher: Tensor | None,
        teacher_ids: Tensor | None,
        masks: Tensor | None,
        spans: Tensor | None,
    ) -> tuple[Tensor, ...]:
        logits = self._logits(hidden)
        # Not views of all rows: compiled code would be compiled again for each shape of the view's base.
        masks = None if masks is None else masks.clone()
        sampled = logits
        if self._processors is not None and token_ids is not None and spans is not None:
            start = 0 if self._vocabulary is None else self._vocabulary.start
            sampled = self._processors(logits, targets, token_ids, spans, start)
        logprobs = self._logprobs if self._vocabulary is None else self._vocabulary.logprobs
        outputs = logprobs(sampled, targets.clone(), self._temperature, self._learns_entropy, masks)
        if teacher is None:
            return outputs
        own = self._logits_like(logits, teacher.shape[-1], teacher_ids)
        return (*outputs, distillation_losses(own.float(), teacher, self._distillation))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of all token ids, or of this rank's."""
        last: Any = self._parts[1]
        logits: Tensor = last(hidden) if self._vocabulary is None else self._vocabulary.logits(hidden, last)
        return logits

    def _logits_like(self, logits: Tensor, count: int, token_ids: Tensor | None) -> Tensor:
        """Logits of the token ids that the teacher has logits of: `token_ids`, or else the first `count`."""
        if token_ids is not None:
            shard = self._vocabulary
            return logits.gather(-1, token_ids.long()) if shard is None else shard.picked(logits, token_ids)
        return (logits if self._vocabulary is None else self._vocabulary.whole(logits))[:, :count]


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, learns_entropy: bool, masks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and the entropy, which has a gradient only if it is learnt from."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    seen = logprobs if learns_entropy else logprobs.detach()
    entropy = -(seen.exp() * seen).sum(-1)
    chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
    return chosen if masks is None else chosen - masked_logsumexp(logprobs, masks), entropy


def masked_logsumexp(logprobs: Tensor, masks: Tensor) -> Tensor:
    """Log of the probability of each row's ids; 0 for a row without any.

    >>> logprobs = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    >>> masked_logsumexp(logprobs, torch.tensor([[0, 2], [-1, -1]])).exp().tolist()
    [0.75, 1.0]
    """
    is_id = masks != PAD
    has_ids = is_id.any(-1, keepdim=True)
    # Rows without ids get 0 in place of -inf, as the gradient of a sum of only -inf is NaN.
    padding = torch.where(has_ids, float("-inf"), 0.0)
    found = torch.where(is_id, logprobs.gather(-1, masks.clamp(min=0).long()), padding)
    return torch.where(has_ids.squeeze(-1), found.logsumexp(-1), 0.0)


class ValueOutputs(Outputs):
    """Value before each target."""

    def forward(self, batch: Rows) -> tuple[Tensor]:
        values: Tensor = self._parts[1](self.hidden(batch))
        return (values.float().squeeze(-1),)


class Head(StrEnum):
    """Type of a model's last layer."""

    POLICY = "policy"  # logits of the next token
    VALUE = "value"  # value before the next token: a critic


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
        old_logprobs=_optional(samples, "old_logprobs", device),
        engine_logprobs=_tensor(picked(samples, [sample.logprobs for sample in samples]), device),
        advantages=_tensor(picked(samples, [sample.advantages for sample in samples]), device),
        sequence=torch.from_numpy(packed.sequence).to(device),
        turn=torch.from_numpy(packed.turn).to(device),
        entropy=entropy,
        reference_logprobs=_optional(samples, "reference_logprobs", device),
        distillation=distilled[0] if distilled else None,
        rewards=_rewards(samples, packed, device),
    )
    loss, stats = policy_loss(batch, settings, totals)
    has_ratio = settings.importance_sampling_level is not ImportanceSamplingLevel.NONE
    if settings.old_logprobs is OldLogprobs.ROLLOUT and (has_ratio or settings.corrects_rollout):
        stats |= apart_from_engine(logprobs, batch.engine_logprobs, batch.sequence)
    return loss, stats


def value_part(
    outputs: tuple[Tensor, ...], samples: Sequence[Sample], packed: Packed, settings: LossSettings, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss; `outputs` are values."""
    (values,) = outputs
    old_values, returns = (_optional(samples, name, values.device) for name in ("values", "returns"))
    if old_values is None or returns is None:
        raise ValueError("a critic learns from samples with values and returns")
    sequence = torch.from_numpy(packed.sequence).to(values.device)
    return value_loss(ValueBatch(values, old_values, returns, sequence), settings, totals)


def _optional(samples: Sequence[Sample], name: str, device: torch.device) -> Tensor | None:
    """An optional array of all samples as one tensor; None if no sample has it."""
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
