"""`Learner`: a model with its optimizer, which scores and learns from samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
import torch.fx.experimental._config as shape_settings
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from roost.config.train import LearnerSettings, LossAggregation
from roost.learner.adapter import adapter_off, adapter_weights, merged_weights
from roost.learner.checkpoint import NORMS, CheckpointWriter, State, fill, learner_state, written_bytes
from roost.learner.distributed import max_over_ranks, rank, reduced, reduced_over_ranks
from roost.learner.forward import Head, PolicyOutputs, Rows, part_of_loss
from roost.learner.losses import KEPT, Totals, exceeded_limits
from roost.learner.model import decoder_layers, export, export_whole, float_type, load_outputs
from roost.learner.optimizer import Optimizers, learning_rate, new_optimizer
from roost.learner.parallel.mesh import (
    LearnerMesh,
    average_gradients,
    by_mesh,
    drop_accumulated,
    sum_over_replicas,
    total_norm,
)
from roost.learner.residence import MOMENTS, PARTS, WEIGHTS, Residence
from roost.learner.routing import load_metrics
from roost.learner.sample import Distribution, Floats, Packed, Sample, balanced, check_packing, pack, predicted, spread
from roost.vision.processor import Processor

BUCKET_BYTES = 1 << 28
HALF_TOKENS, HALF_SEQUENCES = "half/tokens", "half/sequences"  # of the first half of the micro-batches


def replace_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights of a model, which may be sharded; raise ValueError if names or shapes do not match."""
    own = model.state_dict(keep_vars=True)
    missing = {id(weight): name for name, weight in own.items()}  # tied weights come under one name
    with torch.no_grad():
        for name, given in weights:
            if name not in own or own[name].shape != given.shape:
                raise ValueError(f"{name} of shape {tuple(given.shape)} is not among the model's weights")
            _fill(own[name], given)
            missing.pop(id(own[name]), None)
    if missing:
        raise ValueError(f"no weights came for {', '.join(sorted(missing.values()))}")


def in_buckets(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Split weights into lists of about `size` bytes, to be sent one by one.

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
        # Every rank has the whole tensor, so no communication is needed.
        given = distribute_tensor(given, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(given)


OUTLIER = "steps/outlier"
OUTLIER_DEVIATIONS = 5.0
OUTLIER_COUNT = 2  # steps, before which no norm is an outlier


class GradientNorms:
    """Running mean and variance of the gradient norms of optimizer steps, by which outliers are found.

    >>> norms = GradientNorms()
    >>> for norm in (1.0, 1.1, 0.9):
    ...     norms.add(norm)
    >>> norms.is_outlier(1.4, 2.0), norms.is_outlier(1.5, 2.0), norms.is_outlier(1.0, 0.5)
    (False, True, True)
    """

    def __init__(self) -> None:
        self.state = torch.zeros(3, dtype=torch.float64)  # count, mean, sum of squared deviations; as in checkpoints

    def is_outlier(self, norm: float, limit: float) -> bool:
        """Return True if a norm is above a limit other than 0, or far above the mean."""
        count, mean, squares = self.state.tolist()
        is_far = count > OUTLIER_COUNT and norm > mean + OUTLIER_DEVIATIONS * math.sqrt(squares / count)
        return 0 < limit < norm or bool(is_far)

    def add(self, norm: float) -> None:
        """Count the norm of a step that was taken; a norm of 0 is ignored."""
        if norm <= 0:
            return
        count, mean, squares = self.state.tolist()
        moved = mean + (norm - mean) / (count + 1)
        new = (count + 1, moved, squares + (norm - mean) * (norm - moved))
        self.state.copy_(torch.tensor(new, dtype=torch.float64))


NOISE_WINDOW, NOISE_LEAST = 100, 10  # minibatches that are averaged over, at most and at least


class GradientNoise:
    """Gradient noise scale in samples: S / |G|², B_simple of McCandlish et al. 2018, over the newest minibatches.

    G is the true gradient, S the trace of its covariance over samples. The squared norm of a mean over n samples is
    |G|² + S / n on average, so norms of half a minibatch and of the whole give both without bias.

    >>> noise = GradientNoise()
    >>> for _ in range(NOISE_LEAST):
    ...     noise.add(half=5**0.5, of_half=8, whole=2.0, of_whole=16)
    >>> round(noise.scale or 0.0, 2)
    5.33
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[float, float]] = deque(maxlen=NOISE_WINDOW)

    def add(self, half: float, of_half: float, whole: float, of_whole: float) -> None:
        """Count the norms of the means over the samples of half a minibatch, and over all of them."""
        if 0 < of_half < of_whole and math.isfinite(half) and math.isfinite(whole):
            noise = (half**2 - whole**2) / (1 / of_half - 1 / of_whole)
            self._newest.append((whole**2 - noise / of_whole, noise))

    @property
    def scale(self) -> float | None:
        """None for fewer than NOISE_LEAST minibatches, and while their means are not positive."""
        if len(self._newest) < NOISE_LEAST:
            return None
        signal, noise = (sum(each) for each in zip(*self._newest, strict=True))
        return noise / signal if min(signal, noise) > 0 else None


# Allowed difference of log-probs between packed and separate sequences; bfloat16 rounds differently.
PACKING_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}


class Learner:
    """A model with its optimizer, on one device.

    With several ranks, the model is sharded over their mesh, and every method must be called on all ranks, each with
    its own samples: any number, or none. Call `init_distributed` first. Ranks of a context or tensor group compute the
    samples of all of them together: each a part of the tokens, or of every matrix product.
    """

    def __init__(
        self, settings: LearnerSettings, device: torch.device, head: Head = Head.POLICY, learns: bool = True
    ) -> None:
        self._settings = settings
        self._device = device
        self._head = head
        self._mesh = LearnerMesh.of(settings.parallel, device)
        self._outputs = load_outputs(settings, device, head, self._mesh)
        self.vision = Processor.of_model(settings.model, self.module.config)  # None for a model of text alone
        self._learns = learns
        self._optimizer = self._new_optimizer()
        self._residence = Residence(self._outputs, self._optimizer.device_tensors, device)
        self._writer = CheckpointWriter()
        self._norms = GradientNorms() if settings.optimizer.skip_outlier_gradients else None
        self._noise = GradientNoise()
        self.step = 0  # optimizer steps taken
        self.skipped = 0  # optimizer steps skipped because loss or gradient was not finite
        if head is Head.POLICY:
            vocabulary = self.module.config.get_text_config().vocab_size
            with torch.compiler.set_stance("force_eager"):  # its sequences are too short to be worth compiling
                check_packing(self.score, vocabulary, PACKING_TOLERANCES[settings.compute_dtype], settings.model)

    @property
    def module(self) -> PreTrainedModel:
        """The transformers model; sharded weights are DTensors, and with an adapter its layers are wrapped."""
        return self._outputs.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by checkpoint name, with the adapter merged. Call it on all ranks."""
        return merged_weights(self.module)

    @contextmanager
    def loaded_weights(self) -> Iterator[None]:
        """Context with the weights on the device; afterwards they are offloaded if they were before."""
        is_away = WEIGHTS in self._residence.away
        if is_away:
            self._load_together()
        try:
            yield
        finally:
            if is_away:
                self.offload((WEIGHTS,))

    def _load_together(self) -> None:
        """Load the weights on all ranks or on none, as the others would wait forever for a rank without memory."""
        lacks_room = 0
        try:
            self.load((WEIGHTS,))
        except torch.OutOfMemoryError:
            lacks_room = 1
        if max_over_ranks(lacks_room):
            self.offload((WEIGHTS,))
            raise MemoryError("a device has no room for the learner's weights while engines work there")

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by those that another learner's `weights` yields. Call it on all ranks."""
        self._require_loaded(WEIGHTS, to_change=True)
        replace_weights(self.module, weights)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights of the adapter by PEFT's names. Call it on all ranks."""
        return adapter_weights(self.module)

    def score(
        self, samples: Sequence[Sample], as_reference: bool = False, temperature: float | None = None
    ) -> list[Floats]:
        """Log-probs of each token, at the sampling temperature unless another is given.

        0 for the first token and for those that the policy did not generate. `as_reference`: without the adapter.
        """
        self._require(Head.POLICY, "log-probabilities")
        if as_reference and self._settings.adapter is None:
            raise ValueError("only a model with an adapter is its own reference; this one has none")
        with adapter_off(self.module) if as_reference else nullcontext(), self._at(temperature):
            return self._first_outputs(samples)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """The critic's value before each token; 0 where `score` has 0."""
        self._require(Head.VALUE, "values")
        return self._first_outputs(samples)

    def distributions(self, samples: Sequence[Sample], top_k: int, vocabulary: int) -> list[Distribution | None]:
        """Logits of the `top_k` tokens that are most likely at each predicted token; 0: of the whole vocabulary.

        None for a sample without predicted tokens. Logits beyond the tokenizer's `vocabulary` are padding.
        """
        self._require_loaded(WEIGHTS)
        if not isinstance(self._outputs, PolicyOutputs):
            raise ValueError("distributions come from a model with head policy")
        found: dict[int, Distribution] = {}
        with torch.no_grad(), self._outputs.returning_top_logits(top_k, vocabulary):
            for part in self._rounds(samples):
                ends = np.cumsum([predicted(sample).sum() for sample in part])[:-1]
                logits, *ids = (np.split(each.cpu().numpy(), ends) for each in self._forward(pack(part)))
                taught = zip(logits, ids[0] if ids else repeat(None), strict=False)
                found |= {id(sample): Distribution(*each) for sample, each in zip(part, taught, strict=False)}
        self._release()
        return [found.get(id(sample)) for sample in samples]

    def learn(self, samples: Sequence[Sample], totals: Totals, position: int | None = None) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a minibatch, whose size over all ranks is `totals`.

        `position` is that of the step in the learning-rate schedule; by default the number of steps taken before.

        Returns statistics of the whole minibatch, the same on every rank: those of the loss, `grad/norm` (before
        clipping), `lr`, `tokens`, `sequences` and `skipped`. The step is skipped if loss or norm is not finite, if the
        minibatch exceeds a limit of the loss settings, or if its gradient is an outlier and these are skipped; names
        that begin with `steps/` say which. A `max_grad_norm` of 0 disables clipping. `grad/noise_scale` needs several
        micro-batches, and is returned after enough minibatches.
        """
        if not self._learns:
            raise ValueError("this learner only scores; create it with learns=True")
        self._require_loaded(*PARTS, to_change=True)
        self._optimizer.zero_grad()  # of a call that failed midway
        drop_accumulated(self._outputs)
        position = self.step if position is None else position
        settings = self._settings.loss.at(position / max(1, self._settings.optimizer.total_steps - 1))
        metrics: list[dict[str, Tensor]] = []
        loads: list[Tensor] = []
        tokens = sequences = 0
        half: Tensor | None = None
        counts: dict[str, float] = {}
        rounds = list(self._rounds(samples))
        # Gradients of experts are averaged at the end.
        of_half = 0 if self._mesh.experts is not None else len(rounds) // 2
        for number, part in enumerate(self._shuffled(rounds, position)):
            if 0 < number == of_half:
                half, counts = total_norm(self._with_gradients()), {HALF_TOKENS: tokens, HALF_SEQUENCES: sequences}
            packed = pack(part)
            outputs = self._forward(packed, part)
            loss, of_part = part_of_loss(self._head, outputs, part, packed, settings, totals)
            if self._outputs.routers is not None and part:
                loads.append(self._outputs.routers.statistics())
                loss, of_part = self._balanced(loss, of_part, len(packed.rows) / totals.tokens)
            sum_over_replicas(self._outputs, is_due=number + 1 in (of_half, len(rounds)))
            # FSDP averages gradients over ranks, but the minibatch's gradient is their sum.
            (loss * self._mesh.sizes.averaged).backward()
            metrics.append(of_part)
            tokens, sequences = tokens + len(packed.rows), sequences + len(part)
        found = reduced([*_numbers(metrics), {"tokens": tokens, "sequences": sequences, **counts}])
        statistics = reduced_over_ranks(found if self._mesh.is_first else {})
        if self._outputs.routers is not None:
            routers, none = self._outputs.routers, torch.zeros((), device=self._device)
            routers.forget()
            empty = none.expand(routers.layers, routers.experts + 2)
            statistics |= load_metrics(torch.stack(loads).sum(0) if loads else empty)
        if self._head is Head.POLICY and settings.entropy_coef_end is not None:
            statistics["entropy_coef"] = settings.entropy_coef
        limits = exceeded_limits(statistics, settings)
        statistics.pop(KEPT, None)
        is_finite = math.isfinite(statistics.get("loss", 0.0))
        half_sizes = statistics.pop(HALF_TOKENS, 0.0), statistics.pop(HALF_SEQUENCES, 0.0)
        update = self._update(is_finite, not any(limits.values()), position)
        return statistics | limits | update | self._noise_scale(half, half_sizes, statistics, update["grad/norm"])

    def offload(self, parts: Sequence[str] = PARTS, in_background: bool = False) -> None:
        """Move parts to the host and free their device memory; in the background, the next call frees it."""
        self._residence.offload(parts, in_background)

    def load(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts back to the device."""
        self._residence.load(parts)

    def save(self, folder: Path | str) -> None:
        """Save a checkpoint in the background; see `wait_saved`."""
        self._require_loaded(WEIGHTS, MOMENTS)
        self._writer.save(self._state(self._optimizer.saved()), Path(folder))

    def wait_saved(self) -> None:
        """Wait until the last checkpoint is written under its final name; raise if that failed."""
        self._writer.wait()

    def is_saved(self) -> bool:
        """Return True if no checkpoint is being written; raise if the last one failed."""
        return self._writer.is_done()

    def checkpoint_bytes(self) -> int:
        """Approximate size of what this rank writes to a checkpoint."""
        return written_bytes(self._state(self._optimizer.saved_shapes()))

    def restore(self, folder: Path | str) -> None:
        """Restore a checkpoint, possibly of a different number of ranks."""
        self._require_loaded(WEIGHTS, MOMENTS, to_change=True)
        moments = self._optimizer.saved()
        state = self._state(moments)
        fill(state, Path(folder), self._device)
        self._optimizer.take(moments)
        self.step, self.skipped = (int(number) for number in state["progress"])

    def export(self, folder: Path | str) -> None:
        """Write the policy for engines: in transformers format, or an adapter in PEFT format."""
        self._require_loaded(WEIGHTS)
        export(self.module, self._settings, Path(folder))

    def export_whole(self, folder: Path | str) -> None:
        """Write the policy in transformers format, with the adapter merged."""
        self._require_loaded(WEIGHTS)
        export_whole(self.module, self._settings, Path(folder))

    def _new_optimizer(self) -> Optimizers:
        if self._learns:
            return new_optimizer(self._outputs, self._settings.optimizer, decoder_layers(self.module))
        self._outputs.requires_grad_(False)
        return Optimizers(())

    def _state(self, moments: Mapping[Tensor, State]) -> State:
        progress = torch.tensor([self.step, self.skipped])
        kind = self._settings.optimizer.optimizer
        state = learner_state(self.module, moments, kind, progress, self._device)
        return state if self._norms is None else {**state, NORMS: self._norms.state}

    def _update(self, is_finite: bool, is_wanted: bool, position: int) -> dict[str, float]:
        """Take the optimizer step, unless the gradients are not finite or skipped as outliers, or it is not wanted."""
        settings = self._settings.optimizer
        parameters = self._with_gradients()
        average_gradients(self.module, self._mesh)
        norm = total_norm(parameters)
        rate, size = learning_rate(settings, position), float(norm)
        is_finite = is_finite and math.isfinite(size)
        stats = {"grad/norm": size, "lr": rate, "skipped": float(not is_finite)}
        is_outlier = self._norms is not None and is_finite and self._norms.is_outlier(size, settings.max_grad_norm)
        if self._norms is not None:
            stats[OUTLIER] = float(is_outlier and is_wanted)
        if is_finite and is_wanted and not is_outlier:
            if settings.max_grad_norm > 0:
                for group in parameters:
                    torch.nn.utils.clip_grads_with_norm_(group, settings.max_grad_norm, norm)
            self._optimizer.set_learning_rate(rate)
            self._optimizer.step()
            self.step += 1
            if self._norms is not None:
                self._norms.add(size)
        self.skipped += not is_finite
        self._optimizer.zero_grad()
        return stats

    def _noise_scale(
        self, half: Tensor | None, of_half: tuple[float, float], whole: Mapping[str, float], norm: float
    ) -> dict[str, float]:
        """The gradient noise scale, if this minibatch has several micro-batches and enough minibatches are known."""
        tokens, sequences = of_half
        if half is None or not tokens:
            return {}
        loss = self._settings.loss
        aggregation = loss.loss_aggregation
        if self._head is Head.VALUE:
            aggregation = loss.value_loss_aggregation or aggregation
        is_by_token = aggregation is LossAggregation.TOKEN_MEAN
        share = tokens / whole["tokens"] if is_by_token else sequences / whole["sequences"]
        self._noise.add(float(half) / share, sequences, norm, whole["sequences"])
        return {} if self._noise.scale is None else {"grad/noise_scale": self._noise.scale}

    def _with_gradients(self) -> list[list[nn.Parameter]]:
        return by_mesh(each for each in self._outputs.parameters() if each.grad is not None)

    def _balanced(self, loss: Tensor, metrics: dict[str, Tensor], share: float) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch plus its share of the load-balancing loss, if that has a coefficient."""
        coefficient = self._settings.router_aux_loss_coef
        if not coefficient or self._outputs.routers is None:
            return loss, metrics
        context = self._mesh.context
        own, whole = self._outputs.routers.balance_loss(None if context is None else context.group)
        return loss + coefficient * share * own, {**metrics, "experts/balance_loss": whole * share}

    def _first_outputs(self, samples: Sequence[Sample]) -> list[Floats]:
        """First output of the model for each token, without gradients."""
        self._require_loaded(WEIGHTS)
        found = {id(sample): np.zeros(len(sample), np.float32) for sample in samples}
        with torch.no_grad():
            for part in self._rounds(samples):
                values = self._forward(pack(part))[0].cpu().numpy()
                found |= {id(sample): array for sample, array in zip(part, spread(part, values), strict=True)}
        self._release()
        return [found[id(sample)] for sample in samples]

    def _release(self) -> None:
        """Free what forward passes without a backward pass leave on the device."""
        if isinstance(self._outputs, FSDPModule):
            self._outputs.reshard()  # the weights of the root stay gathered
        if self._outputs.routers is not None:
            self._outputs.routers.forget()

    def _rounds(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Yield micro-batches; all ranks have the same number, and the last ones may be empty.

        Ranks of a context or tensor group have the same micro-batches, with the samples of all of them.
        """
        useful = [sample for sample in self._mesh.gathered(samples) if predicted(sample).any()]
        parts = balanced([len(sample) for sample in useful], self._settings.micro_batch_tokens)
        for number in range(max_over_ranks(len(parts))):
            yield [useful[index] for index in parts[number]] if number < len(parts) else []

    def _shuffled(self, rounds: Sequence[list[Sample]], position: int) -> list[list[Sample]]:
        """Micro-batches in an order that depends only on the optimizer step and on which samples the rank has.

        They come sorted by length, but the gradient noise scale needs a first half that is like the second.
        """
        of_rank = rank() // self._mesh.sizes.model  # ranks that compute the same samples need the same order
        return [rounds[at] for at in np.random.default_rng([position, of_rank]).permutation(len(rounds))]

    def _forward(self, packed: Packed, samples: Sequence[Sample] = ()) -> tuple[Tensor, ...]:
        if not self._settings.router_replay:
            packed = replace(packed, experts=None)
        context = self._mesh.context
        # No duck shapes: for a micro-batch as long as a dimension of the model, torch would compile code that only
        # fits this length.
        with self._precision(), shape_settings.patch(use_duck_shape=False):
            rows = Rows.of(packed, self._device, samples, context)
            if self.vision is not None:
                rows = rows.with_images(packed, self.vision)
            elif packed.images:
                raise ValueError(f"samples have images, but {self._settings.model} reads text alone")
            outputs: tuple[Tensor, ...] = self._outputs(rows)
        if context is None:
            return outputs
        return tuple(context.all_rows(each, rows.own, len(packed.rows)) for each in outputs)

    def _precision(self) -> AbstractContextManager[object]:
        """Autocast for mixed precision; FSDP casts the weights itself."""
        compute = float_type(self._settings.compute_dtype)
        is_mixed = self._settings.compute_dtype != self._settings.weight_dtype
        if isinstance(self._outputs, FSDPModule) or not is_mixed:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=compute)

    def _at(self, temperature: float | None) -> AbstractContextManager[None]:
        if temperature is None or not isinstance(self._outputs, PolicyOutputs):
            return nullcontext()
        return self._outputs.at_temperature(temperature)

    def _require_loaded(self, *parts: str, to_change: bool = False) -> None:
        held = self._residence
        for unready, state in ((held.away, "offloaded"), (held.leaving if to_change else (), "being offloaded")):
            if missing := [part for part in parts if part in unready]:
                raise RuntimeError(f"the learner's {' and '.join(missing)} are {state}; load them first")
        if MOMENTS in parts:
            self._residence.wait_for_moments()

    def _require(self, head: Head, what: str) -> None:
        if self._head is not head:
            raise ValueError(f"{what} come from a model with head {head}, but this one has head {self._head}")


def _numbers(metrics: Sequence[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Tensors as floats, with one transfer from the device."""
    tensors = [tensor.detach().float() for part in metrics for tensor in part.values()]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [{name: next(numbers) for name in part} for part in metrics]
