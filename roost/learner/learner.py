"""Weights that another learner gave, put in place of a model's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from roost.config.train import LearnerSettings, LrSchedulerType, OptimizerSettings
from roost.learner.adapter import adapter_off, adapter_weights, merged_weights
from roost.learner.checkpoint import CheckpointWriter, State, fill, learner_state, state_bytes
from roost.learner.distributed import added_up, most, together, world_size
from roost.learner.export import export, export_whole
from roost.learner.forward import PolicyOutputs, Rows
from roost.learner.heads import POLICY, Head, part_of_loss
from roost.learner.losses import Totals
from roost.learner.model import float_type, load_outputs
from roost.learner.offload import PARTS, Residence
from roost.learner.packing import Packed, balanced, check_packing, pack, predicted, spread
from roost.learner.sample import Floats, Sample

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


def new_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW for those that are trained, with its moments in place from the start.

    So a checkpoint written or read before the first step is like any other. Vectors (norms, biases) do not decay.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of a step, counted from 0.

    It grows over the first `warmup_steps`, has its full value after them, and falls to 0 at `total_steps` unless the
    schedule is constant.

    >>> linear = LrSchedulerType.LINEAR
    >>> settings = OptimizerSettings(learning_rate=1.0, lr_scheduler_type=linear, warmup_steps=2, total_steps=6)
    >>> [learning_rate(settings, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.lr_scheduler_type is LrSchedulerType.CONSTANT:
        return settings.learning_rate
    falling = settings.total_steps - settings.warmup_steps
    if falling < 1:
        raise ValueError(
            f"schedule {settings.lr_scheduler_type} ends after total_steps, which is {settings.total_steps}; "
            f"it must be more than the {settings.warmup_steps} steps of warm-up"
        )
    done = min(1.0, (step - settings.warmup_steps) / falling)
    share = (
        1.0 - done if settings.lr_scheduler_type is LrSchedulerType.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
    )
    return settings.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


# How far log-probabilities may be apart that are computed from other rows at once; of 16 bits, with other roundings.
PACKING_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}


class Learner:
    """A model with its optimizer, on one device.

    With several ranks, the model is sharded over all of them, and every method is called on all ranks at once, each
    with samples of its own: as many as it has, or none. `torch.distributed` is set up before (`init_distributed`).
    """

    def __init__(
        self, settings: LearnerSettings, device: torch.device, head: Head = POLICY, learns: bool = True
    ) -> None:
        self._settings = settings
        self._device = device
        self._head = head
        self._outputs = load_outputs(settings, device, head)
        self._learns = learns
        self._optimizer = self._new_optimizer()
        self._residence = Residence(self._outputs, self._optimizer, device)
        self._writer = CheckpointWriter()
        self.step = 0  # optimizer steps taken
        self.skipped = 0  # optimizer steps not taken, because loss or gradient were not finite
        if head is Head.POLICY:
            vocabulary = self.module.config.get_text_config().vocab_size
            check_packing(self.score, vocabulary, PACKING_TOLERANCES[settings.compute_dtype], settings.model)

    @property
    def module(self) -> PreTrainedModel:
        """The transformers model; sharded weights are DTensors, and with an adapter its layers are wrapped."""
        return self._outputs.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by the names of the checkpoint, an adapter merged into them. For all ranks together."""
        return merged_weights(self.module)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """With its weights on the device; they go back to the host afterwards if they were there."""
        is_away = "weight" in self._residence.away
        if is_away:
            self._load_together()
        try:
            yield
        finally:
            if is_away:
                self.offload(("weight",))

    def _load_together(self) -> None:
        """Load the weights on all ranks or on none: one without room would leave the others waiting for its part."""
        lacks_room = 0
        try:
            self.load(("weight",))
        except torch.OutOfMemoryError:
            lacks_room = 1
        if most(lacks_room):
            self.offload(("weight",))
            raise MemoryError("a device has no room for the learner's weights while engines work there")

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Become another learner's policy: whole weights by name, as its `weights` gives them. On every rank."""
        self._require_loaded("weight")
        replace_weights(self.module, weights)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights of the adapter by PEFT's names. For all ranks together."""
        return adapter_weights(self.module)

    def score(
        self, samples: Sequence[Sample], as_reference: bool = False, temperature: float | None = None
    ) -> list[Floats]:
        """The log-probability of each token, at the temperature it was drawn with unless another is given.

        0 for the first token and for those that the policy did not make. `as_reference`: without the adapter.
        """
        self._require(Head.POLICY, "log-probabilities")
        if as_reference and self._settings.adapter is None:
            raise ValueError("only a model with an adapter is its own reference; this one has none")
        with adapter_off(self.module) if as_reference else nullcontext(), self._at(temperature):
            return self._said(samples)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """What the critic expects before each token is made; 0 where `score` has 0."""
        self._require(Head.VALUE, "values")
        return self._said(samples)

    def learn(self, samples: Sequence[Sample], totals: Totals) -> dict[str, float]:
        """One step of the optimizer on this rank's share of a minibatch, whose size over all ranks is `totals`.

        Gives statistics of the whole minibatch, the same on every rank: what the loss tells, and `grad/norm` (before
        it was clipped), `lr`, `tokens`, `sequences`, `skipped`. Where loss or norm is not finite there is no step.
        With a `max_grad_norm` of 0 nothing is clipped.
        """
        if not self._learns:
            raise ValueError("this one only scores; make it with learns=True")
        self._require_loaded(*PARTS)
        self._optimizer.zero_grad()  # of a call that failed half way
        told: list[dict[str, Tensor]] = []
        tokens = sequences = 0
        for part in self._rounds(samples):
            packed = pack(part)
            loss, of_part = part_of_loss(self._head, self._forward(packed), part, packed, self._settings.loss, totals)
            # Sharding averages the gradients of ranks, but the minibatch's is their sum.
            (loss * world_size()).backward()
            told.append(of_part)
            tokens, sequences = tokens + len(packed.rows), sequences + len(part)
        statistics = added_up(together([*_numbers(told), {"tokens": tokens, "sequences": sequences}]))
        return statistics | self._update(math.isfinite(statistics.get("loss", 0.0)))

    def offload(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts to the host, and free their memory on the device; moments are kept as they are."""
        self._residence.offload(parts)

    def load(self, parts: Sequence[str] = PARTS) -> None:
        """Move parts back to the device."""
        self._residence.load(parts)

    def save(self, folder: Path | str) -> None:
        """Keep all that learning goes on from; written in the background, see `wait_saved`."""
        self._require_loaded("weight", "optimizer")
        self._writer.save(self._state(), Path(folder))

    def wait_saved(self) -> None:
        """Until the last checkpoint is there under its name. Raises if it could not be written."""
        self._writer.wait()

    def is_saved(self) -> bool:
        """Whether no checkpoint is being written now. Raises if the last one could not be written."""
        return self._writer.is_done()

    def checkpoint_bytes(self) -> int:
        """About the size of this rank's part of a checkpoint."""
        return state_bytes(self._state())

    def restore(self, folder: Path | str) -> None:
        """Go on from a checkpoint, which may have been written by another number of ranks."""
        self._require_loaded("weight", "optimizer")
        state = self._state()
        fill(state, Path(folder), self._device)
        self.step, self.skipped = (int(number) for number in state["progress"])

    def export(self, folder: Path | str) -> None:
        """Write a checkpoint of transformers, or with an adapter one of PEFT, that engines load."""
        self._require_loaded("weight")
        export(self.module, self._settings, Path(folder))

    def export_whole(self, folder: Path | str) -> None:
        """Write a checkpoint of transformers in any case, an adapter merged into its weights."""
        self._require_loaded("weight")
        export_whole(self.module, self._settings, Path(folder))

    def _new_optimizer(self) -> torch.optim.Optimizer:
        if self._learns:
            return new_optimizer(self._outputs.parameters(), self._settings.optimizer)
        self._outputs.requires_grad_(False)
        return torch.optim.SGD(self._outputs.parameters())  # it has no moments, and takes no step

    def _state(self) -> State:
        progress = torch.tensor([self.step, self.skipped])
        return learner_state(self.module, self._optimizer, progress, self._device)

    def _update(self, is_finite: bool) -> dict[str, float]:
        """Change the weights by their gradients, unless these are not numbers."""
        settings = self._settings.optimizer
        parameters = [each for each in self._outputs.parameters() if each.grad is not None]
        norm = _whole(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
        rate = learning_rate(settings, self.step)
        is_finite = is_finite and bool(torch.isfinite(norm))
        if is_finite:
            if settings.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, settings.max_grad_norm, norm)
            set_learning_rate(self._optimizer, rate)
            self._optimizer.step()
            self.step += 1
        else:
            self.skipped += 1
        self._optimizer.zero_grad()
        return {"grad/norm": float(norm), "lr": rate, "skipped": float(not is_finite)}

    def _said(self, samples: Sequence[Sample]) -> list[Floats]:
        """The first thing that the model says of each token, without gradients."""
        self._require_loaded("weight")
        said = {id(sample): np.zeros(len(sample), np.float32) for sample in samples}
        with torch.no_grad():
            for part in self._rounds(samples):
                values = self._forward(pack(part))[0].cpu().numpy()
                said |= {id(sample): array for sample, array in zip(part, spread(part, values), strict=True)}
        if isinstance(self._outputs, FSDPModule):
            self._outputs.reshard()  # without a backward pass, the weights of the root stay gathered
        return [said[id(sample)] for sample in samples]

    def _rounds(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Samples that go through the model together; all ranks have as many rounds, the last ones may be empty."""
        useful = [sample for sample in samples if predicted(sample).any()]
        parts = balanced([len(sample) for sample in useful], self._settings.micro_batch_tokens)
        for number in range(most(len(parts))):
            yield [useful[index] for index in parts[number]] if number < len(parts) else []

    def _forward(self, packed: Packed) -> tuple[Tensor, ...]:
        with self._precision():
            said: tuple[Tensor, ...] = self._outputs(Rows.of(packed, self._device))
            return said

    def _precision(self) -> AbstractContextManager[object]:
        """Sharding casts the weights by itself; without it, operations do."""
        compute = float_type(self._settings.compute_dtype)
        is_mixed = self._settings.compute_dtype != self._settings.weight_dtype
        if isinstance(self._outputs, FSDPModule) or not is_mixed:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=compute)

    def _at(self, temperature: float | None) -> AbstractContextManager[None]:
        if temperature is None or not isinstance(self._outputs, PolicyOutputs):
            return nullcontext()
        return self._outputs.at_temperature(temperature)

    def _require_loaded(self, *parts: str) -> None:
        away = [part for part in parts if part in self._residence.away]
        if away:
            raise RuntimeError(f"the learner's {' and '.join(away)} are offloaded; load them first")

    def _require(self, head: Head, what: str) -> None:
        if self._head is not head:
            raise ValueError(f"{what} come from a model with head {head}, but this one has head {self._head}")


def _numbers(told: Sequence[dict[str, Tensor]]) -> list[dict[str, float]]:
    """The same as numbers, brought from the device at once."""
    tensors = [tensor.detach().float() for part in told for tensor in part.values()]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    return [{name: next(numbers) for name in part} for part in told]


def _whole(norm: Tensor) -> Tensor:
    """A norm over shards is the norm of all only once it is put together."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
