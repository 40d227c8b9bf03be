"""Load a model, and check that it runs with the engine's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from roost.config.job import COMPILED_SIZE, eos_ids
from roost.torch_engine.attention import ARGUMENT, NAME, SPLIT, Attention, LayerCall, Paged, Tables, register
from roost.torch_engine.scheduler import Batch, LayerCache, LayerShape
from roost.torch_engine.settings import EngineSettings
from roost.vision.processor import Processor
from roost.vision.tower import UNSUPPORTED_ATTENTION_TERMS, attention_of, model_class

ROUTER = "TopKRouter"  # suffix of transformers' router classes


class RoutingRecorder:
    """Experts that the routers of a mixture chose in the last forward pass."""

    def __init__(self, routers: Sequence[Any]) -> None:
        self.layers, self.top_k, self.experts = len(routers), int(routers[0].top_k), int(routers[0].num_experts)
        self._chosen: dict[int, Tensor] = {}
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._recording(layer))

    def chosen(self) -> Tensor:
        """[tokens, layers, top_k]"""
        return torch.stack([self._chosen[layer] for layer in range(self.layers)], dim=1).to(torch.int16)

    def _recording(self, layer: int) -> Callable[[Any, Any, tuple[Tensor, Tensor, Tensor]], None]:
        chosen = self._chosen

        def record(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen[layer] = output[2]  # after logits and weights

        return record


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with the properties that the engine needs."""

    module: Any  # a transformers model
    device: torch.device
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    vocabulary: int
    max_context: int
    eos_ids: frozenset[int]
    is_compiled: bool = False  # its decoder layers
    processor: Processor | None = None  # of images, if it reads any
    routers: RoutingRecorder | None = None  # of a mixture of experts


def load_model(settings: EngineSettings) -> LoadedModel:
    register()
    device = chosen_device(settings.device)
    dtype = chosen_dtype(settings.dtype)
    config = AutoConfig.from_pretrained(settings.model)
    attention = attention_of(config, NAME)
    module = model_class(config).from_pretrained(settings.model, dtype=dtype, attn_implementation=attention)
    module.eval().requires_grad_(False).to(device)
    text = module.config.get_text_config()
    max_context = chosen_context(settings.max_context, getattr(text, "max_position_embeddings", None))
    layers = _examined(module, text.num_hidden_layers, max_context)
    routers = [each for each in module.modules() if type(each).__name__.endswith(ROUTER)]
    is_compiled = device.type == "cuda" and settings.cuda_graphs and module.num_parameters() >= COMPILED_SIZE
    if is_compiled:
        compile_layers(module)
    return LoadedModel(
        module=module,
        device=device,
        dtype=module.dtype,
        layers=layers,
        is_compiled=is_compiled,
        vocabulary=int(text.vocab_size),
        max_context=max_context,
        eos_ids=eos_ids(module.generation_config, text),
        processor=Processor.of_model(settings.model, config),
        routers=RoutingRecorder(routers) if routers else None,
    )


def compile_layers(module: Any) -> None:
    """Compile the decoder layers, for any number of tokens."""
    register(is_compiled=True)
    for layer in module.get_decoder().layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def forward(
    module: Any,
    token_ids: Tensor,
    positions: Tensor,
    rows: Tensor,
    attention: Attention,
    embeddings: Tensor | None = None,
) -> Tensor:
    """Logits of selected rows of a flat batch, of token ids or of embeddings, with one or three positions each."""
    inputs = {"input_ids": token_ids[None]} if embeddings is None else {"inputs_embeds": embeddings[None]}
    position_ids = positions[None] if positions.dim() == 1 else positions[:, None]
    output = module(**inputs, position_ids=position_ids, use_cache=False, logits_to_keep=rows, **{ARGUMENT: attention})
    logits: Tensor = output.logits
    return logits[0]


def chosen_device(name: str) -> torch.device:
    if name != "auto":
        if name.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {name}, but torch sees no CUDA device; write cpu or auto")
        return torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def chosen_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {name!r}; write auto, float32, bfloat16 or float16")
    return dtype


def chosen_context(wanted: int | None, positions: int | None) -> int:
    if wanted is None and positions is None:
        raise ValueError("the model's config has no max_position_embeddings; set max_context")
    if wanted is not None and positions is not None and wanted > positions:
        raise ValueError(f"max_context is {wanted}, but the model has {positions} positions")
    return wanted or positions or 0


class _Examiner:
    """Attention that records the shapes of each layer."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: set[int] = set()
        self.unknown: set[str] = set()

    def __call__(self, call: LayerCall) -> Tensor:
        value = call.value
        self.shapes[call.layer] = LayerShape(value.shape[1], call.key.shape[2], value.shape[2])
        if call.options.get("sliding_window") is not None:
            self.windows.add(call.options["sliding_window"])
        self.unknown |= {name for name in UNSUPPORTED_ATTENTION_TERMS if call.options.get(name) is not None}
        # The output for a single token, which attends to itself.
        return value.repeat_interleave(call.query.shape[1] // value.shape[1], dim=1)


def _examined(module: Any, layers: int, max_context: int) -> tuple[LayerShape, ...]:
    """Cache shape of each layer, found by running one token; raise ValueError if the attention is unsupported."""
    examiner, name = _Examiner(), type(module).__name__
    one = torch.zeros(1, 1, dtype=torch.int64, device=module.device)
    try:
        with torch.inference_mode():
            module(input_ids=one, position_ids=one, use_cache=False, logits_to_keep=1, **{ARGUMENT: examiner})
    except TypeError as error:
        raise ValueError(
            f"{name} does not take the arguments of transformers' causal language models: {error}"
        ) from error
    if sorted(examiner.shapes) != list(range(layers)):
        raise ValueError(
            f"{name} has {layers} layers, but only {sorted(examiner.shapes)} use transformers' attention interface"
        )
    if examiner.unknown:
        raise ValueError(f"the attention of {name} has {sorted(examiner.unknown)}, which are not supported")
    if examiner.windows and min(examiner.windows) < max_context:
        window = min(examiner.windows)
        raise ValueError(
            f"{name} has a sliding window of {window} tokens, which is not supported; set max_context to {window} or "
            f"less, not {max_context}"
        )
    return tuple(examiner.shapes[layer] for layer in range(layers))


LEAST_STEP = 8


def bucket(count: int, limit: int) -> int:
    """Return the batch size that `count` sequences are padded to; from 64 on, it is larger by an eighth at most.

    At least two, if the limit allows: torch.compile would compile layers again for a batch of one.

    >>> [bucket(count, limit=300) for count in (1, 3, 5, 9, 65, 250, 299)]
    [2, 4, 8, 16, 72, 256, 300]
    """
    power = 1 << max(1, (count - 1).bit_length())
    step = max(LEAST_STEP, power // 16)
    return min(power if power <= LEAST_STEP else -(-count // step) * step, limit)


def table_width(blocks: int, block_size: int, limit: int) -> int:
    """Return the number of blocks that tables are padded to; the kernel starts a program per SPLIT keys of a table.

    >>> [table_width(blocks, block_size=64, limit=100) for blocks in (1, 16, 17, 65)]
    [16, 16, 64, 100]
    """
    width = max(1, SPLIT // block_size)
    while width < blocks:
        width *= 4
    return min(width, limit)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step at fixed addresses, in two tensors, because each copy to the device has a fixed cost."""

    longs: Tensor  # token ids, positions and slots
    ints: Tensor  # lengths and tables
    token_ids: Tensor
    positions: Tensor
    tables: Tables

    @classmethod
    def empty(cls, sequences: int, width: int, device: torch.device) -> DecodeInputs:
        """Inputs for up to this many sequences and blocks of each."""
        longs = torch.zeros(3 * sequences, dtype=torch.int64, device=device)
        ints = torch.zeros(sequences * (1 + width), dtype=torch.int32, device=device)
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
        return cls._of(longs, ints, starts, sequences)

    @classmethod
    def _of(cls, longs: Tensor, ints: Tensor, starts: Tensor, sequences: int) -> DecodeInputs:
        token_ids, positions, slots = longs.view(3, sequences)
        tables = Tables(slots, starts, ints[:sequences], ints[sequences:].view(sequences, -1))
        return cls(longs, ints, token_ids, positions, tables)

    def part(self, sequences: int, width: int) -> DecodeInputs:
        """Inputs in the same memory for this many sequences and blocks of each."""
        longs, ints = self.longs[: 3 * sequences], self.ints[: sequences * (1 + width)]
        return self._of(longs, ints, self.tables.starts[: sequences + 1], sequences)

    def fill(self, batch: Batch, scrap: int, block_size: int) -> None:
        """Write a batch of single tokens; padding rows read and write the scrap block."""
        count, blocks = batch.tables.shape
        sequences, width = self.tables.tables.shape
        longs = np.zeros((3, sequences), np.int64)
        longs[2, count:] = scrap * block_size
        longs[:, :count] = batch.token_ids, batch.positions, batch.slots
        ints = np.full(len(self.ints), scrap, np.int32)
        ints[:count], ints[count:sequences] = batch.lengths, 1
        ints[sequences:].reshape(sequences, width)[:count, :blocks] = batch.tables
        self.longs.copy_(torch.from_numpy(longs.ravel()), non_blocking=True)
        self.ints.copy_(torch.from_numpy(ints), non_blocking=True)


def decode(model: LoadedModel, inputs: DecodeInputs, cache: Sequence[LayerCache]) -> tuple[Tensor, Tensor | None]:
    """Logits after one token of each sequence, and its experts; their shapes depend only on those of the inputs."""
    rows = torch.arange(len(inputs.token_ids), device=inputs.token_ids.device)
    logits = forward(model.module, inputs.token_ids, inputs.positions, rows, Paged(cache, inputs.tables))
    return logits, None if model.routers is None else model.routers.chosen()


def new_graphs(model: LoadedModel, settings: EngineSettings, pages: bool, width: int) -> DecodeGraphs | None:
    """CUDA graphs for this model, or None if unsupported; `width` is the maximum number of blocks per sequence."""
    config = model.module.config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # These check the longest position on the host in every step, which a graph cannot do.
    is_fixed = scaling.get("rope_type") not in ("dynamic", "longrope")
    if not settings.cuda_graphs or not pages or not is_fixed:
        return None
    return DecodeGraphs(model, settings.limits(on_cuda=True).sequences, width, model.device)


Captured: TypeAlias = tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]  # with logits and experts
Shape: TypeAlias = tuple[int, int]  # sequences, and blocks of each


class DecodeGraphs:
    """CUDA graphs of decode steps by batch size, table width and adapter, captured when they are first needed."""

    def __init__(self, model: LoadedModel, sequences: int, width: int, device: torch.device) -> None:
        self._model = model
        self._sequences = sequences
        self._width = width
        self._inputs = DecodeInputs.empty(sequences, width, device)
        self._parts: dict[Shape, DecodeInputs] = {}
        self._captured: dict[tuple[Shape, str | None], Captured] = {}
        self._memory: Any = None

    def run(self, batch: Batch, cache: Sequence[LayerCache], adapter: str | None) -> tuple[Tensor, Tensor | None]:
        """Logits, and experts, of a batch of single tokens whose sequences use the same adapter."""
        blocks, block_size = cache[0][0].shape[:2]
        count = len(batch.token_ids)
        shape = bucket(count, self._sequences), table_width(batch.tables.shape[1], block_size, self._width)
        if shape not in self._parts:
            self._parts[shape] = self._inputs.part(*shape)
        inputs = self._parts[shape]
        inputs.fill(batch, scrap=blocks - 1, block_size=block_size)
        if (shape, adapter) not in self._captured:
            self._captured[shape, adapter] = self._capture(inputs, cache)
        graph, logits, experts = self._captured[shape, adapter]
        graph.replay()
        return logits[:count], None if experts is None else experts[:count]

    def drop(self) -> None:
        """Drop all graphs and their memory, before the addresses they refer to become invalid."""
        self._captured.clear()
        self._memory = None

    def _capture(self, inputs: DecodeInputs, cache: Sequence[LayerCache]) -> Captured:
        # Warm-up: libraries initialize in the first run, which must not be captured.
        decode(self._model, inputs, cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, which would break the capture in the default mode.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits, experts = decode(self._model, inputs, cache)
        self._memory = self._memory or graph.pool()
        return graph, logits, experts
