"""Memory of learners and engines on one device, in GiB. Every constant has a name, a unit and a source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roost.config.job import ParallelSizes, Sharding
from roost.placement.model_shape import ModelShape

GIB = 1024**3

# Bytes that training keeps for each parameter: mixed precision with Adam (Rajbhandari et al. 2020, "ZeRO", 3.1).
OPTIMIZER_BYTES = 12  # 32-bit master weight, first moment, second moment
MEGATRON_GRADIENT_BYTES = 4  # Megatron accumulates gradients in 32 bits
# Bytes of activations for each token and hidden unit inside one layer without storing attention scores
# (Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1 less its attention term).
ACTIVATION_BYTES = 34
CHECKPOINT_BYTES = (
    2  # what full recomputation keeps for each token, hidden unit and layer: the layer's input in 16 bits
)
LOGIT_BYTES = 4 + 2  # 32-bit logits and their 16-bit gradient, for each token of a chunk and vocabulary entry
LOGIT_CHUNK = 4_096  # tokens whose logits exist at once in the learner; logits of a whole batch never do

RESERVED_FRACTION = 0.95  # of a device; ml-loop's rule, the rest is for the driver, NCCL and fragmentation
ENGINE_FRACTION = 0.9  # of a device that vLLM takes unless told otherwise (its gpu_memory_utilization)
ENGINE_OVERHEAD_GIB = 2.0  # CUDA context, graphs and workspace of an engine beside weights and KV cache
SLEEPING_ENGINE_GIB = 1.0  # left on the device by a sleeping vLLM (0.95 GiB measured on an H200)
SYNC_BUCKET_GIB = 1.0  # weights in flight; ROLL's model_update_buffer_size_mb default
CONTEXT_GIB = 0.5  # CUDA context of an offloaded learner


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """What a learner process holds on its device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What an engine holds on each of its devices while it runs: its weights, and the KV cache beside them."""

    weights: float
    kv_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache + ENGINE_OVERHEAD_GIB


def held_parameters(shape: ModelShape, sizes: ParallelSizes, processes: int = 1) -> float:
    """Parameters on one device of a model cut by its sizes and, where fully sharded, over processes."""
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
) -> LearnerMemory:
    """The memory of one learner process that works on `tokens` tokens at a time.

    Fully sharded (FSDP): weights, gradients and optimizer state are cut over all processes, and two layers at a time
    are gathered whole. Megatron with the distributed optimizer: weights and gradients are cut over the model sizes,
    optimizer state over all processes. With an adapter (LoRA) only the adapter has gradients and optimizer state.

    >>> from roost.placement.model_shape import shape_from_config
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
    layer = (shape.parameters - shape.embedding_parameters) / shape.layers
    gathered = 2 * layer * weight_bytes if sharding is Sharding.FULL and processes > 1 else 0.0
    moments = OPTIMIZER_BYTES if weight_bytes < 4 else OPTIMIZER_BYTES - 4  # 32-bit weights are their own master copy
    return LearnerMemory(
        weights=held * weight_bytes / GIB,
        gradients=held * trained / shape.parameters * gradient_bytes / GIB,
        optimizer=trained * moments / processes / GIB,
        activations=(activation_bytes(shape, sizes, tokens, sharding) + gathered) / GIB,
    )


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of a LoRA adapter on the seven linear projections of every layer."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return shape.layers * rank * (attention + 3 * (shape.hidden + shape.feed_forward))


def activation_bytes(shape: ModelShape, sizes: ParallelSizes, tokens: int, sharding: Sharding = Sharding.FULL) -> float:
    """An estimate with full recomputation: the inputs of all layers, one layer's inside, and a chunk of logits.

    A pipeline keeps as many batches in flight as it has stages, so cutting layers over stages saves nothing there.
    Only Megatron cuts activations by its sizes.
    """
    cut = sizes if sharding is Sharding.OPTIMIZER else ParallelSizes()
    whole = tokens / cut.context
    own = whole / cut.tensor
    kept = own * shape.hidden * CHECKPOINT_BYTES * math.ceil(shape.layers / cut.pipeline) * cut.pipeline
    inside = own * shape.hidden * ACTIVATION_BYTES
    logits = min(whole, LOGIT_CHUNK) * shape.vocabulary / cut.tensor * LOGIT_BYTES
    return kept + inside + logits


def engine_memory(
    shape: ModelShape, sizes: ParallelSizes, device_gib: float, fraction: float | None, weight_bytes: int = 2
) -> EngineMemory:
    """The memory of an engine that takes `fraction` of each device; what weights leave is KV cache.

    The KV cache is negative where the weights alone are too large.
    """
    weights = shape.parameters * weight_bytes / (sizes.tensor * sizes.pipeline) / GIB
    taken = device_gib * (ENGINE_FRACTION if fraction is None else fraction)
    return EngineMemory(weights, taken - weights - ENGINE_OVERHEAD_GIB)


def kv_tokens(shape: ModelShape, sizes: ParallelSizes, kv_cache_gib: float, value_bytes: int = 2) -> int:
    """How many tokens fit into the KV cache of an engine."""
    per_device = shape.kv_values_per_token * value_bytes / (min(sizes.tensor, shape.kv_heads) * sizes.pipeline)
    return max(0, int(kv_cache_gib * GIB / per_device))
