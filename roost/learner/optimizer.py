"""Optimizers of a learner: AdamW, Muon and 8-bit AdamW, their learning rate, and state that the host keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from roost.config.train import LrSchedulerType, OptimizerSettings, OptimizerType, WsdDecayStyle
from roost.learner.distributed import to_local
from roost.learner.parallel.mesh import by_mesh
from roost.learner.residence import HostBuffer, plain_tensors

STREAMED_BYTES = 1 << 28  # of weights whose state is on the device at the same time, if the host keeps it
UPDATE_SIZE = 0.2  # root mean square of AdamW's updates, in learning rates
SMALLEST_NORM = 1e-7  # that a matrix is divided by
GATES = ("gate", "router", "shared_expert_gate")  # modules of transformers' mixtures that weigh experts

State = dict[str, Tensor]
New = Callable[[list[nn.Parameter], OptimizerSettings], torch.optim.Optimizer]


class Optimizers:
    """The optimizers of a model's parameters, which take their steps one after the other.

    With `on_host`, the host keeps their state, and that of one optimizer at a time is on the device for its step.
    """

    def __init__(self, parts: Iterable[torch.optim.Optimizer], on_host: bool = False) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        self._on_host = on_host
        self._pinned: list[HostBuffer] = []
        for part in parts:
            self._parts.append(part)
            if on_host:
                self._move_to_host(part)  # before the state of the next is made

    @property
    def state(self) -> dict[Tensor, State]:
        """State of each parameter."""
        return {weight: state for part in self._parts for weight, state in part.state.items()}

    def device_tensors(self) -> Iterator[Tensor]:
        """Tensors of the state that stay on the device between steps, and can be offloaded."""
        if not self._on_host:
            yield from (each for state in self.state.values() for each in state.values())

    def set_learning_rate(self, rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self._parts:
            if self._on_host:
                self._step_with_host(part)
            else:
                part.step()
        if self._on_host and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # checkpoints read what was copied to the host

    def saved(self) -> dict[Tensor, State]:
        """State of each parameter for a checkpoint.

        8-bit moments are dequantized, as other meshes have other blocks, in host memory, as the device may lack room.
        """
        return {
            weight: {name: _dequantized(each) for name, each in state.items()} for weight, state in self.state.items()
        }

    def saved_shapes(self) -> dict[Tensor, State]:
        """Like `saved`, to count bytes: tensors that it would dequantize are on the `meta` device."""
        return {weight: {name: _shape(each) for name, each in state.items()} for weight, state in self.state.items()}

    def take(self, saved: Mapping[Tensor, State]) -> None:
        """Use the state that a checkpoint was restored into: the tensors that `saved` returned."""
        for weight, state in self.state.items():
            for name, own in state.items():
                if own is not saved[weight][name]:
                    local = to_local(own)
                    _quantize(local, to_local(saved[weight][name]).to(local.device))

    def _step_with_host(self, part: torch.optim.Optimizer) -> None:
        kept: dict[Tensor, State] = dict(part.state)
        for weight, state in kept.items():
            part.state[weight] = {name: _with(weight, each) for name, each in state.items()}
        part.step()
        for weight, state in kept.items():
            for name, each in part.state[weight].items():
                if each is not state[name]:
                    state[name].copy_(each, non_blocking=True)
            part.state[weight] = state

    def _move_to_host(self, part: torch.optim.Optimizer) -> None:
        """Move a new optimizer's state to host memory, page-locked if it is for a CUDA device."""
        moved: list[Tensor] = []
        for state in part.state.values():
            for name, each in state.items():
                if each.dim() and each.device.type != "cpu":  # counters of steps stay
                    state[name] = each.to("cpu")
                    moved += plain_tensors(state[name])
        if moved:
            self._pinned.append(_pin(moved))


def _with(weight: Tensor, state: Tensor) -> Tensor:
    """State on the device of its weight; step counters, which have no dimensions, stay where they are."""
    return state.to(weight.device, non_blocking=True) if state.dim() else state


def _pin(tensors: Sequence[Tensor]) -> HostBuffer:
    """Move tensors to page-locked memory."""
    buffer = HostBuffer([each.nbytes for each in tensors], is_pinned=True)
    for each, slot in zip(tensors, buffer.slots, strict=True):
        each.data = slot.view(each.dtype).view(each.shape).copy_(each)
    return buffer


def _is_quantized(local: Tensor) -> bool:
    return hasattr(local, "__tensor_flatten__")


def _shape(tensor: Tensor) -> Tensor:
    local = to_local(tensor)
    if not _is_quantized(local):
        return tensor
    return _sharded_as(tensor, torch.empty(local.shape, dtype=torch.float32, device="meta"))


def _dequantized(tensor: Tensor) -> Tensor:
    """A quantized tensor as float32 in host memory; any other tensor as it is."""
    local = to_local(tensor)
    return _sharded_as(tensor, local.dequantize()).cpu() if _is_quantized(local) else tensor


def _quantize(own: Any, numbers: Tensor) -> None:
    """Quantize numbers into `own`; numbers that were dequantized from the same blocks keep their codes exactly.

    torchao scales a block by its largest magnitude, but its lowest code is above -1: blocks that had their largest
    magnitude below 0 would be rounded again.
    """
    own.copy_(numbers)
    if not own.signed:
        return
    blocks = numbers.view(-1, own.block_size)
    lowest, highest = blocks.aminmax(dim=1)
    is_negative = (lowest <= -highest) & (lowest < 0)
    blocks, scale = blocks[is_negative], (lowest / own.qmap[0])[is_negative]
    codes, scales = own.codes.view(-1, own.block_size)[is_negative], own.scale[is_negative]
    between = (own.qmap[1:] + own.qmap[:-1]) / 2
    # The division rounds, so that the scale may be a neighbour.
    for each in (scale, *(scale.nextafter(torch.full_like(scale, end)) for end in (0.0, math.inf))):
        found = torch.bucketize(blocks / each[:, None], between, out_int32=True)
        is_same = (own.qmap[found] * each[:, None] == blocks).all(dim=1)
        codes[is_same], scales[is_same] = found[is_same].to(codes.dtype), each[is_same]
    own.codes.view(-1, own.block_size)[is_negative], own.scale[is_negative] = codes, scales


def _sharded_as(tensor: Tensor, local: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return local
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def new_optimizer(module: nn.Module, settings: OptimizerSettings, layers: Iterable[nn.Module] = ()) -> Optimizers:
    """The optimizer of a model's trainable parameters.

    Its state is allocated from the start, so that a checkpoint before the first step has the same structure as any
    other. Vectors (norms, biases) have no weight decay. Muon trains the matrices of `layers`, but not routers and
    gates, whose rows are experts. Embeddings have no 8-bit moments: next to the rows of frequent tokens, the second
    moments of rare ones would be rounded to 0.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    match settings.optimizer:
        case OptimizerType.MUON:
            new: New = _muon
            own = {each for layer in layers for each in _matrices(layer)}
        case OptimizerType.ADAMW_8BIT:
            new = _adamw_8bit
            own = {*trained} - {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
        case OptimizerType.ADAMW:
            new, own = _adamw, {*trained}
        case kind:
            assert_never(kind)
    chosen: list[tuple[New, list[nn.Parameter]]] = [
        (new, [each for each in trained if each in own]),
        (_adamw, [each for each in trained if each not in own]),
    ]
    on_host = settings.optimizer_cpu_offload
    parts = ((make, part) for make, some in chosen for part in (_in_parts(some) if on_host else [some]) if part)
    return Optimizers((make(part, settings) for make, part in parts), on_host)


def _matrices(layer: nn.Module) -> Iterator[nn.Parameter]:
    named = layer.named_parameters()
    return (each for name, each in named if each.dim() == 2 and not any(part in GATES for part in name.split(".")))


def _in_parts(parameters: Iterable[nn.Parameter], size: int = STREAMED_BYTES) -> Iterator[list[nn.Parameter]]:
    """Lists of parameters of about `size` bytes each."""
    part: list[nn.Parameter] = []
    filled = 0
    for each in parameters:
        part.append(each)
        filled += to_local(each).nbytes
        if filled >= size:
            yield part
            part, filled = [], 0
    yield part


def _groups(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> list[dict[str, Any]]:
    decay = (
        ([each for each in parameters if each.dim() >= 2], settings.weight_decay),
        ([each for each in parameters if each.dim() < 2], 0.0),
    )
    return [{"params": group, "weight_decay": rate} for some, rate in decay for group in by_mesh(some)]


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        _groups(parameters, settings),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


class Muon(torch.optim.Muon):
    """Muon for matrices that may be sharded: each is gathered whole for its Newton-Schulz iterations.

    Updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training").
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                moments = self.state[weight]["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = weight.grad.lerp(moments, momentum)
                whole = update.full_tensor() if isinstance(update, DTensor) else update
                whole = _orthogonal(whole, group["ns_coefficients"], group["ns_steps"]).to(weight.dtype)
                if isinstance(weight, DTensor):
                    whole = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(whole, alpha=-rate * UPDATE_SIZE * math.sqrt(max(weight.shape)))


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The matrix with singular values of about 1, by Newton-Schulz iterations in bfloat16, on a CPU in float32."""
    first, third, fifth = coefficients
    found = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    found = found / found.norm().clamp(min=SMALLEST_NORM)
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = found.T if is_tall else found
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.T if is_tall else found


def _muon(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    optimizer = Muon(
        parameters,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.muon_momentum,
    )
    for parameter in parameters:
        moments = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        optimizer.state[parameter] = {"momentum_buffer": moments}
    return optimizer


def _adamw_8bit(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """torchao's AdamW, whose moments of 4,096 numbers and more have 8 bits."""
    if find_spec("torchao") is None:
        raise ModuleNotFoundError(
            "optimizer: adamw_8bit needs the package torchao; install it (pip install torchao), or write "
            "optimizer: adamw"
        )
    from torchao.optim import AdamW8bit

    class Quantized(AdamW8bit):  # type: ignore[misc]
        def step(self, closure: None = None) -> None:
            # Compiling is only worth its time on a GPU.
            stance = "force_eager" if parameters[0].device.type == "cpu" else "default"
            with torch.compiler.set_stance(stance):
                super().step()

    optimizer: torch.optim.Optimizer = Quantized(
        _groups(parameters, settings),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
    )
    new_moments: Callable[[Tensor, bool], Tensor] = optimizer._new_buffer  # type: ignore[attr-defined]
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": new_moments(parameter.detach(), True),
            "exp_avg_sq": new_moments(parameter.detach(), False),
        }
    return optimizer


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """Learning rate of a step, counted from 0.

    It grows during the warm-up, then decays to `min_learning_rate` unless the schedule is constant.

    >>> linear = LrSchedulerType.LINEAR
    >>> settings = OptimizerSettings(learning_rate=1.0, lr_scheduler_type=linear, warmup_steps=2, total_steps=6)
    >>> [learning_rate(settings, step) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    warmup, rate, least = settings.steps_of_warmup, settings.learning_rate, settings.min_learning_rate
    if step < warmup:
        return rate * (step + 1) / warmup
    if settings.lr_scheduler_type is LrSchedulerType.CONSTANT:
        return rate
    falling = settings.schedule_steps - warmup
    if falling < 1:
        end = "total_steps" if settings.decay_steps is None else "decay_steps"
        raise ValueError(
            f"schedule {settings.lr_scheduler_type} ends after {end}, which is {settings.schedule_steps}; "
            f"it must be more than the {warmup} steps of warm-up"
        )
    if settings.lr_scheduler_type is LrSchedulerType.WSD:
        falling = min(falling, settings.steps_of_wsd_decay)
        form = str(settings.wsd_decay_style)
    else:
        form = str(settings.lr_scheduler_type)
    done = min(1.0, max(0.0, 1 - (settings.schedule_steps - step) / falling))
    return least + (rate - least) * DECAYS[form](done)


# Share of the learning rate that is left when a share of the decay is done.
DECAYS: dict[str, Callable[[float], float]] = {
    WsdDecayStyle.LINEAR: lambda done: 1.0 - done,
    WsdDecayStyle.COSINE: lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    WsdDecayStyle.MINUS_SQRT: lambda done: 1.0 - math.sqrt(done),
    WsdDecayStyle.EXPONENTIAL: lambda done: 2.0 * 0.5**done - 1.0,
}
