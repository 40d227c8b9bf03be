"""Memory of a model: parameters, optimizer state, activations, KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roost.config.findings import shown
from roost.config.job import MeshSizes, ModelUse, ParallelSizes, Role, Sharding
from roost.config.model_files import COMPILED_SIZE
from roost.placement.component_plan import ComponentPlan

GIB = 1024**3

# Bytes that training keeps for each parameter: mixed precision with Adam (Rajbhandari et al. 2020, "ZeRO", 3.1).
MASTER_BYTES = 4  # 32-bit master weight, beside weights of 16 bits
MOMENT_BYTES = 4  # of AdamW's first and second moment each, and of Muon's momentum
MOMENT_BYTES_8BIT = 1 + 4 / 256  # a code, and a scale for each block of 256
MEGATRON_GRADIENT_BYTES = 4  # Megatron accumulates gradients in 32 bits
# Bytes of activations for each token and hidden unit inside one layer of Megatron without storing attention scores
# (Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1 less its attention term).
MEGATRON_ACTIVATION_BYTES = 34
EXCHANGED_VALUES = 3  # of each token, expert of it and hidden unit: sent, received and returned
LOGIT_BYTES = 4 + 2  # 32-bit logits and their 16-bit gradient, for each token of a chunk and vocabulary entry
LOGIT_CHUNK = 2**29 // 4  # 32-bit logits of a chunk in the learner, 512 MiB; those of a whole batch never exist

RESERVED_FRACTION = 0.95  # of a device (ml-loop's rule); the rest is for the driver, NCCL and fragmentation
ENGINE_FRACTION = 0.9  # vLLM's default gpu_memory_utilization
MIN_ENGINE_FRACTION = 0.2  # an engine refuses to start if its profiling run leaves no room
ENGINE_OVERHEAD_GIB = 2.0  # CUDA context, graphs and workspace of an engine besides weights and KV cache
SLEEPING_ENGINE_GIB = 1.0  # left on the device by a sleeping vLLM (0.95 GiB measured on an H200)
COMPUTE_BYTES = 2  # of weights and activations in passes, unless the job says otherwise
SYNC_BUCKET_GIB = 1.0  # weights in flight; ROLL's model_update_buffer_size_mb default
STREAMED_GIB = 1.0  # optimizer state on the device at the same time, if the host keeps it
CONTEXT_GIB = 0.5  # CUDA context of an offloaded learner


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Device memory of a learner process, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of a running engine on each of its devices, in GiB: weights and KV cache."""

    weights: float
    kv_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + ENGINE_OVERHEAD_GIB


def held_parameters(shape: ModelShape, sizes: ParallelSizes, processes: int = 1) -> float:
    """Parameters on one device, after sharding by the parallel sizes and over `processes`."""
    dense = shape.dense_parameters / (sizes.tensor * sizes.pipeline)
    return (dense + shape.expert_parameters / (sizes.tensor * sizes.pipeline * sizes.expert)) / processes


def learner_memory(
    shape: ModelShape,
    sizes: ParallelSizes,
    processes: int,
    tokens: int,
    weight_bytes: int = 2,
    sharding: Sharding = Sharding.FULL,
    lora_rank: int | None = None,
    recomputed_layers: int | None = None,
    optimizer: str = "adamw",
    compute_bytes: int = COMPUTE_BYTES,
    compiles: bool | None = None,
) -> LearnerMemory:
    """Memory of one learner process that works on `tokens` tokens at a time, with the others of its context group.

    Fully sharded (FSDP): weights, gradients and optimizer state are sharded over `processes`, those of one copy, and
    two layers at a time are gathered, as far as tensor and expert parallelism do not divide them. Megatron with the
    distributed optimizer: weights and gradients are sharded by the parallel sizes, optimizer state over all processes.
    With an adapter (LoRA) only the adapter has gradients and optimizer state. The first `recomputed_layers` (None: all)
    recompute their activations.

    >>> from roost.placement.memory.model import shape_from_config
    >>> shape = shape_from_config({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    ...     "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064})
    >>> memory = learner_memory(shape, ParallelSizes(), processes=8, tokens=4096)
    >>> round(memory.weights, 2), round(memory.gradients, 2), round(memory.optimizer, 2)
    (1.77, 1.77, 10.64)
    """
    if sharding is Sharding.OPTIMIZER:
        held, gradient_bytes = held_parameters(shape, sizes), MEGATRON_GRADIENT_BYTES
    else:
        held, gradient_bytes = shape.parameters / processes, weight_bytes
    trained = shape.parameters if lora_rank is None else adapter_parameters(shape, lora_rank)
    experts = shape.expert_parameters / (sizes.expert if sharding is Sharding.FULL else 1)
    layer = (shape.dense_parameters - shape.embedding_parameters) / shape.layers
    if sharding is Sharding.FULL and processes > 1:
        # The embedding and the last layer stay gathered from the forward pass to the end of the backward pass.
        dense = (2 * layer + shape.embedding_parameters) / sizes.tensor
        gathered = (dense + 2 * experts / shape.layers) * compute_bytes
    elif sharding is not Sharding.OPTIMIZER and weight_bytes > compute_bytes:
        gathered = shape.parameters * compute_bytes  # autocast keeps its copies of all weights for the backward pass
    else:
        gathered = 0.0
    moments = moment_bytes(shape, optimizer, lora_rank)
    moments += MASTER_BYTES if weight_bytes < MASTER_BYTES else 0  # 32-bit weights are their own master copy
    activations = activation_bytes(shape, sizes, tokens, sharding, recomputed_layers, compute_bytes, compiles)
    return LearnerMemory(
        weights=held * weight_bytes / GIB,
        gradients=held * trained / shape.parameters * gradient_bytes / GIB,
        optimizer=trained * moments / processes / GIB,
        activations=(activations + gathered) / GIB,
    )


def moment_bytes(shape: ModelShape, optimizer: str = "adamw", lora_rank: int | None = None) -> float:
    """Bytes of an optimizer's moments for each trained parameter.

    Muon has one moment for the matrices of layers; embeddings and experts have AdamW's two.

    >>> shape = shape_from_config({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    ...     "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064})
    >>> [round(moment_bytes(shape, kind), 2) for kind in ("adamw", "muon", "adamw_8bit")]
    [8, 4.57, 2.03]
    """
    if optimizer == "adamw_8bit":
        return 2 * MOMENT_BYTES_8BIT
    if optimizer != "muon":
        return 2 * MOMENT_BYTES
    others = shape.embedding_parameters + shape.expert_parameters if lora_rank is None else 0
    return MOMENT_BYTES * (1 + others / shape.parameters)


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of a LoRA adapter on all linear layers but the last.

    Of a mixture's layer these are the attention and the shared expert with its gate, not router and routed experts.
    """
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    dense = 3 * (shape.hidden + shape.feed_forward)
    shared = 3 * (shape.hidden + shape.shared_feed_forward) + shape.hidden + 1 if shape.shared_feed_forward else 0
    dense_layers = 0 if shape.family in CONVERTED_BY_PEFT else shape.layers - shape.expert_layers
    return rank * (shape.layers * attention + dense_layers * dense + shape.expert_layers * shared)


def activation_bytes(
    shape: ModelShape,
    sizes: ParallelSizes,
    tokens: int,
    sharding: Sharding = Sharding.FULL,
    recomputed_layers: int | None = None,
    compute_bytes: int = COMPUTE_BYTES,
    compiles: bool | None = None,
) -> float:
    """Estimate activations: inputs of the layers that are recomputed, what is inside the others, a chunk of logits.

    The first layers are recomputed (None: all), when the others have freed theirs. A pipeline keeps as many batches in
    flight as it has stages, so splitting layers over stages saves nothing. Context groups share the tokens. Tensor
    groups share what is inside a layer; Megatron's share its inputs as well. Expert groups send each token to its
    experts and get it back.
    """
    is_megatron = sharding is Sharding.OPTIMIZER
    own = tokens / sizes.context / (sizes.tensor if is_megatron else 1)
    stages = sizes.pipeline if is_megatron else 1
    layers = math.ceil(shape.layers / stages) * stages
    recomputed = layers if recomputed_layers is None else min(recomputed_layers, layers)
    inside = own * layer_values(shape, sizes, compiles) * compute_bytes
    if is_megatron:
        inside = own * shape.hidden * MEGATRON_ACTIVATION_BYTES / COMPUTE_BYTES * compute_bytes
    elif sizes.expert > 1:
        inside += own * shape.active_experts * shape.hidden * EXCHANGED_VALUES * compute_bytes
    # A recomputed layer is like one that was kept, for its backward pass; the last would be recomputed at once.
    kept = max(layers - recomputed, 1)
    logits = min(tokens / sizes.context * shape.vocabulary / sizes.tensor, LOGIT_CHUNK) * LOGIT_BYTES
    return recomputed * own * shape.hidden * compute_bytes + kept * inside + logits


def layer_values(shape: ModelShape, sizes: ParallelSizes, compiles: bool | None = None) -> float:
    """Numbers that a layer of transformers keeps for each token until its backward pass.

    Counted with torch 2.11 on an H200, without and with torch.compile; norms compute in 32 bits, twice as wide.
    """
    is_large = shape.parameters >= COMPILED_SIZE and sizes.tensor == sizes.expert == 1
    compiled = is_large if compiles is None else compiles
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    has_norms = shape.family in ("qwen3", "qwen3_moe")  # of queries and keys
    of_heads, of_hidden, of_units = (3 if has_norms else 2, 4, 3) if compiled else (5 if has_norms else 2, 8, 4)
    dense = of_units * shape.feed_forward if shape.layers > shape.expert_layers else 0
    # Grouped products of experts are not fused. Each token is copied for its experts, and their results are.
    experts = shape.active_experts * 4 * shape.expert_feed_forward + 4 * shape.shared_feed_forward
    divided = of_heads * heads + max(dense, experts)
    return of_hidden * shape.hidden + 2 * shape.active_experts * shape.hidden + divided / sizes.tensor


def checkpointed_layers(component: ComponentPlan, free_gib: float) -> int | None:
    """Fewest layers of a learner to recompute, if `free_gib` more may be used than with all; None if not known."""
    shape = known_shape(component)
    if shape is None:
        return None

    def needed(layers: int | None) -> float:
        return _learner(with_layers(component, layers), shape).active or 0.0

    whole = needed(None)
    return next((count for count in range(shape.layers) if needed(count) - whole <= free_gib), shape.layers)


def recomputed_of(model: ModelUse) -> int | None:
    """Layers that a learner recomputes, from the first; None: all."""
    return model.recomputed_layers if model.recomputes else 0


def with_layers(component: ComponentPlan, recomputed: int | None) -> ComponentPlan:
    """The learner, with the first so many layers recomputed."""
    return replace(component, model=replace(component.model, recomputes=recomputed != 0, recomputed_layers=recomputed))


def engine_memory(
    shape: ModelShape, sizes: ParallelSizes, device_gib: float, fraction: float | None, weight_bytes: int = 2
) -> EngineMemory:
    """Memory of an engine that uses `fraction` of each device; what weights leave is KV cache.

    The KV cache is negative if the weights alone are too large.
    """
    weights = shape.parameters * weight_bytes / (sizes.tensor * sizes.pipeline) / GIB
    reserved = device_gib * (ENGINE_FRACTION if fraction is None else fraction)
    return EngineMemory(weights, reserved - weights - ENGINE_OVERHEAD_GIB)


def needed_fraction(component: ComponentPlan, device_gib: float | None) -> float | None:
    """Fraction of each device at which an engine has room for all its sequences; None if it is not known.

    An engine that sleeps takes longer to wake up the larger its KV cache is.
    """
    shape, sequences = known_shape(component), component.model.kv_sequences
    if device_gib is None or shape is None or sequences is None:
        return None
    sizes = engine_sizes(component)
    weights = engine_memory(shape, sizes, device_gib, None, component.model.weight_bytes).weights
    count, tokens = sequences
    own = math.ceil(count / component.world_size) * max(tokens, component.model.sequence or 0)
    cache = own * kv_bytes(shape, sizes, cached_bytes(component)) / GIB
    # Twice the overhead: the profiling run of a large vocabulary takes as much again.
    fraction = math.ceil((weights + cache + 2 * ENGINE_OVERHEAD_GIB) / device_gib * 100) / 100
    return min(max(fraction, MIN_ENGINE_FRACTION), ENGINE_FRACTION)


def cached_bytes(component: ComponentPlan) -> int:
    """Bytes of each number in an engine's KV cache, which has the type of its activations."""
    return max(component.model.weight_bytes, COMPUTE_BYTES)


def kv_bytes(shape: ModelShape, sizes: ParallelSizes, value_bytes: int = 2) -> float:
    """Bytes of a token's keys and values on each device of an engine."""
    return shape.kv_values_per_token * value_bytes / (min(sizes.tensor, shape.kv_heads) * sizes.pipeline)


def kv_tokens(shape: ModelShape, sizes: ParallelSizes, kv_cache_gib: float, value_bytes: int = 2) -> int:
    """Tokens that fit into an engine's KV cache."""
    return max(0, int(kv_cache_gib * GIB / kv_bytes(shape, sizes, value_bytes)))


DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*DENSE_FAMILIES, *EXPERT_FAMILIES)
# PEFT takes dense feed-forward layers of these for experts, and would read their adapter wrongly: they get none.
CONVERTED_BY_PEFT = ("qwen3_moe",)
LAYER_KEYS = ("num_hidden_layers", "num_experts", "num_local_experts")
MAX_LAYERS = 10_000
MAX_SIZE = 100_000_000


class UnknownShape(ValueError):
    """The parameters of a model cannot be counted; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Model sizes that memory depends on."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    ties_embeddings: bool
    expert_layers: int = 0
    experts: int = 0
    active_experts: int = 0
    expert_feed_forward: int = 0
    shared_feed_forward: int = 0

    @property
    def embedding_parameters(self) -> int:
        """Input embedding, and the output projection unless it is tied."""
        return self.vocabulary * self.hidden * (1 if self.ties_embeddings else 2)

    @property
    def attention_parameters(self) -> int:
        """Parameters per layer: four projections, and the family's biases and norms."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        projections = self.hidden * (2 * queries + 2 * keys)
        if self.family in ("qwen2", "qwen2_moe"):
            projections += queries + 2 * keys  # biases of the query, key and value projections
        if self.family in ("qwen3", "qwen3_moe"):
            projections += 2 * self.head_size  # norms of queries and keys
        return projections + 2 * self.hidden  # the two norms of a layer

    @property
    def dense_parameters(self) -> int:
        """Parameters other than the routed experts."""
        dense_layers = self.layers - self.expert_layers
        feed_forward = dense_layers * 3 * self.hidden * self.feed_forward
        router = self.expert_layers * self.hidden * self.experts
        shared = self.expert_layers * 3 * self.hidden * self.shared_feed_forward
        if self.shared_feed_forward:
            shared += self.expert_layers * self.hidden  # the gate of the shared expert
        layers = self.layers * self.attention_parameters + feed_forward + router + shared
        return self.embedding_parameters + layers + self.hidden  # and the last norm

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts in all layers."""
        return self.expert_layers * self.experts * 3 * self.hidden * self.expert_feed_forward

    @property
    def parameters(self) -> int:
        """All parameters.

        >>> shape = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        ...          "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}
        >>> f"{shape_from_config(shape).parameters:,}"  # Qwen2.5-7B
        '7,615,616,512'
        """
        return self.dense_parameters + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token: of a mixture, only the experts that it is routed to."""
        return self.dense_parameters + self.expert_parameters // max(1, self.experts) * self.active_experts

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from a `config.json`. Raise UnknownShape for an unknown family or a missing size."""
    inner = config.get("text_config")  # multimodal models keep the language model's sizes there
    config = inner if isinstance(inner, Mapping) else config
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise UnknownShape(f"model_type {family or 'is missing'}; Roost counts {', '.join(FAMILIES)}")
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    layers = _size(config, "num_hidden_layers")
    experts = _experts(config, family, layers)
    return ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_size=_size(config, "head_dim", hidden // heads),
        feed_forward=_size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        ties_embeddings=config.get("tie_word_embeddings") is True,
        **experts,
    )


def _experts(config: Mapping[str, Any], family: str, layers: int) -> dict[str, int]:
    if family not in EXPERT_FAMILIES:
        return {}
    if family == "mixtral":
        return {
            "expert_layers": layers,
            "experts": _size(config, "num_local_experts"),
            "active_experts": _size(config, "num_experts_per_tok"),
            "expert_feed_forward": _size(config, "intermediate_size"),
        }
    step = _size(config, "decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise UnknownShape(f"mlp_only_layers is {shown(listed)}")
    dense = set(listed)
    sparse = sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    return {
        "expert_layers": sparse,
        # transformers 5 writes the second name.
        "experts": _size(config, "num_experts" if config.get("num_experts") is not None else "num_local_experts"),
        "active_experts": _size(config, "num_experts_per_tok"),
        "expert_feed_forward": _size(config, "moe_intermediate_size"),
        "shared_feed_forward": _size(config, "shared_expert_intermediate_size", 0) if family == "qwen2_moe" else 0,
    }


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None and default is not None else config.get(key)
    most = MAX_LAYERS if key in LAYER_KEYS else MAX_SIZE
    is_absent = value == 0 and config.get(key) is None  # a part that the model does not have
    if isinstance(value, int) and not isinstance(value, bool) and (0 < value <= most or is_absent):
        if key == "head_dim" and value == 0:
            raise UnknownShape("there are more attention heads than hidden units")
        return value
    raise UnknownShape(f"{key} is {shown(value)}")


DEFAULT_TOKENS = 4_096  # per micro-batch of a learner, if the config does not set it


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a component on each of its devices, in GiB; None if unknown."""

    active: float | None  # while it generates or learns
    scoring: float | None  # while a learner computes log-probs
    syncing: float | None  # during weight sync, when the others have freed what they can
    resident: float | None  # idle on the device; working memory is freed
    idle: float | None  # on the device while it sleeps or is offloaded
    host: float | None  # in host memory while it sleeps or is offloaded
    kept: float | None = 0.0  # always in host memory: an optimizer's state that is kept there

    def times(self, count: int) -> Footprint:
        """Return the footprint of `count` processes on one device."""
        sizes = (self.active, self.scoring, self.syncing, self.resident, self.idle, self.host, self.kept)
        return Footprint(*(None if size is None else size * count for size in sizes))


UNKNOWN = Footprint(None, None, None, None, None, None)
NOTHING = Footprint(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def footprint(component: ComponentPlan, device_gib: float | None, fraction: float | None = None) -> Footprint:
    """Compute a component's memory from its model's `config.json` and the engine's settings.

    An engine with an unknown model still uses its fraction of the device; `fraction` overrides its own.
    """
    shape = known_shape(component)
    if component.role is Role.LEARNER and shape is not None:
        return _learner(component, shape)
    if component.role is Role.SCORER and shape is not None:
        return _scorer(component, shape)
    if component.role is Role.ENGINE and device_gib is not None:
        return _engine(component, shape, device_gib, component.model.memory_fraction if fraction is None else fraction)
    if component.role is Role.HELPER and component.model.path is None and component.name != "env":
        return NOTHING  # rule-based rewards and agents compute on the CPU, whatever their placement
    return UNKNOWN


def known_shape(component: ComponentPlan) -> ModelShape | None:
    """Shape of the component's model; None if its config is not known or its family not supported."""
    if component.model.config is None:
        return None
    try:
        return shape_from_config(component.model.config)
    except UnknownShape:
        return None


def engine_sizes(component: ComponentPlan) -> ParallelSizes:
    """Parallel sizes of the smallest engine; a last one with fewer devices is sharded over those."""
    fewest = int(np.diff(component.table.offsets).min(initial=10**9))
    sizes = component.parallel
    return ParallelSizes(tensor=fewest) if 0 < fewest < sizes.tensor * sizes.pipeline else sizes


def shards_of(component: ComponentPlan) -> int:
    """Processes that share the state of one copy of a learner's or scorer's model."""
    try:
        mesh = MeshSizes.of(component.parallel, component.world_size)
    except ValueError:  # named elsewhere
        return component.world_size
    return component.world_size // mesh.replicate


def _scorer(component: ComponentPlan, shape: ModelShape) -> Footprint:
    sharding = component.model.sharding
    per_worker = int(np.diff(component.table.offsets).max(initial=1)) or 1
    parts = shards_of(component) if sharding is Sharding.FULL else per_worker
    sizes = component.parallel if sharding is Sharding.OPTIMIZER else ParallelSizes()
    held = held_parameters(shape, sizes, 1 if sharding is Sharding.OPTIMIZER else parts)
    weights = held * component.model.weight_bytes / GIB
    whole = weights + CONTEXT_GIB
    return Footprint(whole, whole, whole, whole, CONTEXT_GIB, weights)


def _learner(component: ComponentPlan, shape: ModelShape) -> Footprint:
    model = component.model

    def needed(recomputed_layers: int | None) -> LearnerMemory:
        return learner_memory(
            shape,
            component.parallel,
            1 if model.sharding is Sharding.NONE else shards_of(component),
            model.tokens or DEFAULT_TOKENS,
            model.weight_bytes,
            model.sharding,
            model.lora_rank,
            recomputed_layers,
            model.optimizer,
            model.compute_bytes,
            model.compiles,
        )

    memory = needed(recomputed_of(model))
    scoring = needed(None).activations  # nothing is kept for a backward pass
    on_host = memory.optimizer if component.model.optimizer_on_host else 0.0
    if on_host:
        memory = replace(memory, optimizer=0.0, activations=max(memory.activations, STREAMED_GIB))
    kept, moved = _split_by_offload(memory, component.model.offloads)
    # Between phases a learner keeps what it does not offload. To score it has loaded everything, as it learns next; to
    # send it needs its weights.
    weights = memory.weights if "weight" in component.model.offloads else 0.0
    return Footprint(
        active=memory.total + CONTEXT_GIB,
        scoring=kept + moved + scoring + CONTEXT_GIB,
        syncing=kept + weights + CONTEXT_GIB,
        resident=memory.total - memory.activations + CONTEXT_GIB,
        idle=kept + CONTEXT_GIB,
        host=moved + on_host,
        kept=on_host,
    )


def _split_by_offload(memory: LearnerMemory, offloads: tuple[str, ...]) -> tuple[float, float]:
    """Return GiB kept on the device and GiB moved to the host between phases; gradients are simply freed."""
    parts = {"weight": memory.weights, "grad": memory.gradients, "optimizer": memory.optimizer}
    kept = sum(size for name, size in parts.items() if name not in offloads)
    return kept, sum(size for name, size in parts.items() if name in offloads and name != "grad")


def _engine(component: ComponentPlan, shape: ModelShape | None, device_gib: float, fraction: float | None) -> Footprint:
    reserved = device_gib * (ENGINE_FRACTION if fraction is None else fraction)
    if shape is None:
        # The KV cache is allocated after the weights arrive, but its size is unknown here.
        return Footprint(reserved, reserved, None, reserved, SLEEPING_ENGINE_GIB, None)
    memory = engine_memory(shape, engine_sizes(component), device_gib, fraction, component.model.weight_bytes)
    syncing = memory.weights + ENGINE_OVERHEAD_GIB
    return Footprint(reserved, reserved, syncing, reserved, SLEEPING_ENGINE_GIB, memory.weights)
