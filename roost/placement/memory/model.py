"""Memory of a model: parameters, optimizer state, activations, KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from roost.config.job import (
    COMPILED_SIZE,
    MICRO_BATCH_TOKENS,
    Component,
    MeshSizes,
    ModelUse,
    ParallelSizes,
    Role,
    Sharding,
)
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.shape import CONVERTED_BY_PEFT, ModelShape, UnknownShape, shape_from_config

GIB = 1024**3

# Bytes that training keeps for each parameter, unless the optimizer is Roost's: mixed precision with Adam (Rajbhandari
# et al. 2020, "ZeRO", 3.1).
MASTER_BYTES = 4  # 32-bit master weight, beside weights of 16 bits
MOMENT_BYTES = 4  # of AdamW's first and second moment each, and of Muon's momentum
MOMENT_BYTES_8BIT = 1 + 4 / 256  # a code, and a scale for each block of 256
REDUCED_BYTES = 4  # FSDP sums gradients in 32 bits
MEGATRON_GRADIENT_BYTES = 4  # Megatron accumulates gradients in 32 bits
# Bytes of activations for each token and hidden unit inside one layer of Megatron without storing attention scores
# (Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1 less its attention term).
MEGATRON_ACTIVATION_BYTES = 34
EXCHANGED_VALUES = 3  # for each token, expert of the token and hidden unit: sent, received and returned
# Bytes for each token of a chunk and vocabulary entry, at most. Compiled: 32-bit logits and their 16-bit gradient.
# Without torch.compile, 13.5 were counted on a CPU; with a divided vocabulary, which is not compiled, 11.5, or 19.5
# with an entropy loss.
COMPILED_LOGIT_BYTES, LOGIT_BYTES, DIVIDED_LOGIT_BYTES = 4 + 2, 14, 20
LOGIT_CHUNK = 2**29 // 4  # 32-bit logits of a chunk in the learner, 512 MiB; those of a whole batch never exist

RESERVED_FRACTION = 0.95  # of a device (ml-loop's rule); the rest is for the driver, NCCL and fragmentation
ENGINE_FRACTION = 0.9  # vLLM's default gpu_memory_utilization
MIN_ENGINE_FRACTION = 0.2  # an engine refuses to start if its profiling run leaves no room
ENGINE_OVERHEAD_GIB = 2.0  # CUDA context, graphs and workspace of an engine besides weights and KV cache
SLEEPING_ENGINE_GIB = 1.0  # left on the device by a sleeping vLLM (0.95 GiB measured on an H200)
COMPUTE_BYTES = 2  # of a number in forward and backward passes, unless the job says otherwise
SYNC_BUCKET_GIB = 1.0  # weights in flight, at least; ROLL's model_update_buffer_size_mb default
BUCKET_GIB = 0.5  # weights that are sent together, unless one alone is larger
STREAMED_WEIGHTS = 2**28 // 4  # weights whose optimizer state is on the device at a time, if the host keeps it
CONTEXT_GIB = 0.5  # CUDA context of an offloaded learner


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Device memory of a learner process, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float = 0.0  # at the end of a backward pass and in the optimizer's step

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of a running engine on each of its devices, in GiB: weights and KV cache."""

    weights: float
    kv_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + ENGINE_OVERHEAD_GIB


def held_parameters(shape: ModelShape, sizes: ParallelSizes) -> float:
    """Parameters on one device that Megatron divides by the parallel sizes."""
    dense = shape.dense_parameters / (sizes.tensor * sizes.pipeline)
    parts = (sizes.expert_tensor or sizes.tensor) * sizes.expert * sizes.pipeline
    return dense + shape.expert_parameters / parts


def copy_parameters(shape: ModelShape, sizes: ParallelSizes, sharding: Sharding) -> int:
    """Parameters that all ranks of one copy of the model hold together.

    Tensor parallelism of Roost's learner does not divide the shared expert: each rank of a tensor group has all of it,
    sharded by FSDP alone.
    """
    more = (sizes.tensor - 1) * shape.shared_parameters if sharding is Sharding.FULL else 0
    return shape.parameters + more


def trained_parameters(shape: ModelShape, sizes: ParallelSizes, sharding: Sharding, lora_rank: int | None) -> int:
    """The trained ones of `copy_parameters`: all, or an adapter's."""
    return copy_parameters(shape, sizes, sharding) if lora_rank is None else adapter_parameters(shape, lora_rank)


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
    trained_bytes: int | None = None,
    ranks: int | None = None,
) -> LearnerMemory:
    """Memory of one learner process. Its context group works on `tokens` tokens at a time.

    With FSDP, weights, gradients and optimizer state are sharded over `processes`, the ranks of one copy of the model;
    `ranks` counts those of all copies (None: one copy). Two layers at a time are gathered, as far as tensor and expert
    parallelism do not divide them. With Megatron's distributed optimizer, weights and gradients are divided by the
    parallel sizes, and optimizer state over all processes. With LoRA, only the adapter has gradients and optimizer
    state. The first `recomputed_layers` (None: all) recompute their activations.

    Roost's optimizers update the weights themselves; `trained_bytes` is the size of a weight and of a moment. Other
    optimizers (None) have 32-bit moments, and a 32-bit copy of narrower weights.

    >>> shape = shape_from_config({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    ...     "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064})
    >>> memory = learner_memory(shape, ParallelSizes(), processes=8, tokens=4096)
    >>> round(memory.weights, 2), round(memory.gradients, 2), round(memory.optimizer, 2)
    (1.77, 1.77, 10.64)
    """
    if sharding is Sharding.OPTIMIZER:
        held, gradient_bytes = held_parameters(shape, sizes), MEGATRON_GRADIENT_BYTES
    else:
        held, gradient_bytes = copy_parameters(shape, sizes, sharding) / processes, trained_bytes or weight_bytes
    trained = trained_parameters(shape, sizes, sharding, lora_rank)
    activations = activation_bytes(shape, sizes, tokens, sharding, recomputed_layers, compute_bytes, compiles)
    transient = 0.0
    if sharding is Sharding.FULL and (ranks or processes) > 1:
        gathered = gathered_bytes(shape, sizes, compute_bytes)
        transient = _reduced_bytes(shape, sizes, compute_bytes, lora_rank, activations + gathered)
    elif sharding is not Sharding.OPTIMIZER and weight_bytes > compute_bytes:
        gathered = shape.parameters * compute_bytes  # autocast keeps its copies of all weights for the backward pass
        if processes == 1 and lora_rank is None:
            # The last layer's gradient exists in both types before it is added to that of earlier micro-batches.
            transient = shape.vocabulary * shape.hidden * (weight_bytes + compute_bytes)
    else:
        gathered = 0.0
    moments = moment_bytes(shape, optimizer, lora_rank, trained_bytes or MOMENT_BYTES)
    if lora_rank is not None:
        moments += trained_bytes or MASTER_BYTES  # the adapter itself
    elif trained_bytes is None and weight_bytes < MASTER_BYTES:
        moments += MASTER_BYTES  # 32-bit weights are their own master copy
    return LearnerMemory(
        weights=held * weight_bytes / GIB,
        gradients=held * trained / copy_parameters(shape, sizes, sharding) * gradient_bytes / GIB,
        optimizer=trained * moments / processes / GIB,
        activations=(activations + gathered) / GIB,
        transient=transient / GIB,
    )


def gathered_bytes(shape: ModelShape, sizes: ParallelSizes, compute_bytes: int = COMPUTE_BYTES) -> float:
    """Bytes of the weights that FSDP has gathered during a pass: two layers, the embedding and the last layer."""
    return (2 * _layer_parameters(shape, sizes) + shape.embedding_parameters / sizes.tensor) * compute_bytes


def _layer_parameters(shape: ModelShape, sizes: ParallelSizes) -> float:
    """Parameters of a layer that a rank gathers: its part by tensor and expert parallelism."""
    dense = (shape.dense_parameters - shape.embedding_parameters - shape.shared_parameters) / sizes.tensor
    return (dense + shape.shared_parameters + shape.expert_parameters / sizes.expert) / shape.layers


def _reduced_bytes(
    shape: ModelShape, sizes: ParallelSizes, compute_bytes: int, lora_rank: int | None, working: float
) -> float:
    """Bytes of gradients that FSDP has not reduced yet, beyond the `working` memory of the pass.

    During a layer's backward pass, these are its own gradients, those of the layer before, which are summed in 32 bits,
    and those of the last layer. The last layer and the embedding are reduced together at the end, when the layers have
    freed their working memory.
    """
    if lora_rank is not None:
        of_layer = adapter_parameters(shape, lora_rank) / shape.layers / sizes.tensor
        return of_layer * (compute_bytes + REDUCED_BYTES)
    root = shape.embedding_parameters / sizes.tensor
    last = shape.vocabulary * shape.hidden / sizes.tensor
    in_layers = _layer_parameters(shape, sizes) * (compute_bytes + REDUCED_BYTES) + last * compute_bytes
    at_end = root * (2 * compute_bytes + REDUCED_BYTES) - working
    return max(in_layers, at_end)


def moment_bytes(
    shape: ModelShape,
    optimizer: str = "adamw",
    lora_rank: int | None = None,
    each: float = MOMENT_BYTES,
    rounded: float = MOMENT_BYTES_8BIT,
) -> float:
    """Bytes of an optimizer's moments for each trained parameter: a moment has `each` bytes, or `rounded` if 8-bit.

    Muon has one moment for the matrices of layers; embeddings and experts have AdamW's two. 8-bit AdamW rounds all
    moments but those of the input embedding.

    >>> shape = shape_from_config({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    ...     "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064})
    >>> [round(moment_bytes(shape, kind), 2) for kind in ("adamw", "muon", "adamw_8bit")]
    [8, 4.57, 2.46]
    """
    if optimizer == "adamw_8bit":
        exact = shape.vocabulary * shape.hidden / shape.parameters if lora_rank is None else 0
        return 2 * (exact * each + (1 - exact) * rounded)
    if optimizer != "muon":
        return 2 * each
    others = shape.embedding_parameters + shape.expert_parameters if lora_rank is None else 0
    return each * (1 + others / shape.parameters)


def largest_weight(shape: ModelShape) -> int:
    """Parameters of the largest weight: the embedding, or the gates of a layer's experts, which are one weight."""
    gates = shape.experts * 2 * shape.hidden * shape.expert_feed_forward if shape.expert_layers else 0
    return max(shape.vocabulary * shape.hidden, gates)


def in_flight_gib(component: ComponentPlan) -> float:
    """GiB that a weight sync needs on the device besides the weights of learner and engine.

    This is the largest weight in the engine's type, a second copy of it if ranks gather it from shards, and a bucket.
    """
    shape = known_shape(component)
    if component.role is not Role.LEARNER or shape is None:
        return SYNC_BUCKET_GIB
    copies = 2 if shards_of(component) > 1 else 1
    return max(SYNC_BUCKET_GIB, copies * largest_weight(shape) * component.model.compute_bytes / GIB + BUCKET_GIB)


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of a LoRA adapter on all linear layers but the last.

    In a mixture-of-experts layer: the attention and the shared expert with its gate, not the router or routed experts.
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
    learns: bool = True,
) -> float:
    """Estimate activations: inputs of recomputed layers, all activations of the others, and a chunk of logits.

    The first `recomputed_layers` (None: all) are recomputed after the others have freed their activations. A pipeline
    keeps as many batches in flight as it has stages, so splitting layers over stages saves nothing. Context parallelism
    divides the tokens, tensor parallelism the activations inside a layer, and Megatron's also the inputs of layers.
    With expert parallelism, each token is sent to its experts and back; each rank of a tensor group sends its share. A
    pass without gradients (`learns=False`) keeps one layer.
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
        inside += own / sizes.tensor * shape.active_experts * shape.hidden * EXCHANGED_VALUES * compute_bytes
    # During its own backward pass, a recomputed layer needs as much as one that is not; so at least one counts in full.
    recomputed, kept = (recomputed, max(layers - recomputed, 1)) if learns else (1, 1)
    logits = min(tokens / sizes.context * shape.vocabulary / sizes.tensor, LOGIT_CHUNK)
    logits *= COMPILED_LOGIT_BYTES if is_megatron else _logit_bytes(shape, sizes, compiles)
    return recomputed * own * shape.hidden * compute_bytes + kept * inside + logits


def _is_compiled(shape: ModelShape, sizes: ParallelSizes, compiles: bool | None) -> bool:
    """Return True if the learner compiles its layers, and its log-probs unless the vocabulary is divided."""
    is_large = shape.parameters >= COMPILED_SIZE and sizes.tensor == sizes.expert == 1
    return is_large if compiles is None else compiles


def _logit_bytes(shape: ModelShape, sizes: ParallelSizes, compiles: bool | None) -> int:
    if sizes.tensor > 1:
        return DIVIDED_LOGIT_BYTES
    return COMPILED_LOGIT_BYTES if _is_compiled(shape, sizes, compiles) else LOGIT_BYTES


def layer_values(shape: ModelShape, sizes: ParallelSizes, compiles: bool | None = None) -> float:
    """Numbers that a layer of a transformers model keeps for each token until its backward pass.

    Counted with torch 2.11 on an H200, without and with torch.compile; norms compute in 32 bits, twice as wide. Context
    parallelism repeats KV heads that are fewer than its size before it exchanges keys and values. Tensor parallelism
    does not divide the shared expert.
    """
    compiled = _is_compiled(shape, sizes, compiles)
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    has_norms = shape.family in ("qwen3", "qwen3_moe")  # of queries and keys
    of_heads, of_hidden, of_units = (3 if has_norms else 2, 4, 3) if compiled else (5 if has_norms else 2, 8, 4)
    dense = of_units * shape.feed_forward if shape.layers > shape.expert_layers else 0
    # Grouped products of experts are not fused. Each token is copied for each of its experts, and so is each result.
    experts = shape.active_experts * 4 * shape.expert_feed_forward / sizes.tensor + 4 * shape.shared_feed_forward
    copied = 2 * shape.active_experts * shape.hidden
    divided = (of_heads * heads + copied) / sizes.tensor
    repeated = 2 * max(sizes.context - shape.kv_heads / sizes.tensor, 0) * shape.head_size
    return of_hidden * shape.hidden + divided + max(dense / sizes.tensor, experts) + repeated


def recomputed_of(model: ModelUse) -> int | None:
    """Number of layers that a learner recomputes, counted from the first; None: all."""
    return model.recomputed_layers if model.recomputes else 0


def with_recomputed(component: ComponentPlan, recomputed: int | None) -> ComponentPlan:
    """The learner with its first `recomputed` layers recomputed; None: all."""
    return replace(component, model=replace(component.model, recomputes=recomputed != 0, recomputed_layers=recomputed))


def engine_memory(
    shape: ModelShape, sizes: ParallelSizes, device_gib: float, fraction: float | None, weight_bytes: int = 2
) -> EngineMemory:
    """Memory of an engine that uses `fraction` of each device; what the weights leave is KV cache.

    The KV cache is negative if the weights alone are too large.
    """
    # The expert size counts all ranks of a stage: those of a tensor group, and data-parallel copies of the attention.
    held = shape.dense_parameters / sizes.tensor + shape.expert_parameters / max(sizes.tensor, sizes.expert)
    weights = held * weight_bytes / sizes.pipeline / GIB
    reserved = device_gib * (ENGINE_FRACTION if fraction is None else fraction)
    return EngineMemory(weights, reserved - weights - ENGINE_OVERHEAD_GIB)


def needed_fraction(component: ComponentPlan, device_gib: float | None) -> float | None:
    """Smallest fraction of each device at which an engine has room for all its sequences; None if it is not known.

    More is not useful: the larger the KV cache, the longer an engine that sleeps takes to wake up.
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


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a component on each of its devices, in GiB; None if unknown."""

    active: float | None  # while it generates or learns
    scoring: float | None  # while a learner computes log-probs
    syncing: float | None  # during weight sync, when the others have freed what they can
    resident: float | None  # idle on the device; working memory is freed
    idle: float | None  # on the device while it sleeps or is offloaded
    host: float | None  # in host memory while it sleeps or is offloaded
    kept: float | None = 0.0  # always in host memory: optimizer state with optimizer_cpu_offload

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


def known_shape(component: Component | ComponentPlan) -> ModelShape | None:
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
    """Number of ranks that shard one copy of a learner's or scorer's model."""
    try:
        mesh = MeshSizes.of(component.parallel, component.world_size)
    except ValueError:  # reported by check_mesh
        return component.world_size
    return component.world_size // mesh.replicate


def _scorer(component: ComponentPlan, shape: ModelShape) -> Footprint:
    sharding = component.model.sharding
    per_worker = int(np.diff(component.table.offsets).max(initial=1)) or 1
    parts = shards_of(component) if sharding is Sharding.FULL else per_worker
    sizes = component.parallel
    held = held_parameters(shape, sizes)
    if sharding is not Sharding.OPTIMIZER:
        held = copy_parameters(shape, sizes, sharding) / parts
    weights = held * component.model.weight_bytes / GIB
    whole = weights + CONTEXT_GIB
    working = _scoring(component, shape)
    return Footprint(whole + working, whole + working, whole, whole, CONTEXT_GIB, weights)


def pass_tokens(model: ModelUse) -> int:
    """Tokens of the largest micro-batch: a sample longer than the limit is a micro-batch of its own."""
    return max(model.tokens or MICRO_BATCH_TOKENS, model.longest or 0)


def _scoring(component: ComponentPlan, shape: ModelShape) -> float:
    """Working memory of a pass that computes log-probs, in GiB."""
    model, sizes = component.model, component.parallel
    tokens, compute = pass_tokens(model), model.compute_bytes
    working = activation_bytes(shape, sizes, tokens, model.sharding, None, compute, model.compiles, learns=False)
    if model.sharding is Sharding.FULL and component.world_size > 1:
        working += gathered_bytes(shape, sizes, compute)
    elif component.role is Role.LEARNER and model.sharding is not Sharding.OPTIMIZER and model.weight_bytes > compute:
        working += shape.parameters * compute  # copies that autocast keeps of weights that are trained
    return working / GIB


def _learner(component: ComponentPlan, shape: ModelShape) -> Footprint:
    model = component.model
    shards = 1 if model.sharding is Sharding.NONE else shards_of(component)

    def needed(recomputed_layers: int | None) -> LearnerMemory:
        return learner_memory(
            shape,
            component.parallel,
            shards,
            pass_tokens(model),
            model.weight_bytes,
            model.sharding,
            model.lora_rank,
            recomputed_layers,
            model.optimizer,
            model.compute_bytes,
            model.compiles,
            model.trained_bytes,
            component.world_size,
        )

    memory = needed(recomputed_of(model))
    trained = trained_parameters(shape, component.parallel, model.sharding, model.lora_rank)
    if model.sharding is Sharding.FULL and shards < component.world_size:
        # HSDP keeps 32-bit sums of gradient shards until they are summed over all copies.
        memory = replace(memory, transient=memory.transient + trained / shards * REDUCED_BYTES / GIB)
    on_host = memory.optimizer if component.model.optimizer_on_host else 0.0
    if on_host:
        # The state of whole weights is streamed. Memory that gathered weights have freed does not hold it.
        largest = max(STREAMED_WEIGHTS, largest_weight(shape) / shards)
        streamed = on_host * min(1.0, largest / (trained / shards))
        memory = replace(memory, optimizer=0.0, transient=memory.transient + streamed)
    kept, moved = _split_by_offload(memory, component.model.offloads)
    # Between phases a learner keeps what it does not offload. It loads everything to score, as it learns next, and its
    # weights to send them.
    weights = memory.weights if "weight" in component.model.offloads else 0.0
    return Footprint(
        active=memory.total + CONTEXT_GIB,
        scoring=kept + moved + _scoring(component, shape) + CONTEXT_GIB,
        syncing=kept + weights + CONTEXT_GIB,
        resident=memory.total - memory.activations - memory.transient + CONTEXT_GIB,
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
