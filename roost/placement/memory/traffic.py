"""Bytes that a learner's ranks send in a step, by dimension of their mesh."""

from __future__ import annotations

from dataclasses import dataclass

from roost.config.job import MICRO_BATCH_TOKENS, MeshSizes, Role
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.model import (
    COMPUTE_BYTES,
    REDUCED_BYTES,
    adapter_parameters,
    known_shape,
    recomputed_of,
)
from roost.placement.memory.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in an optimizer step, with ring algorithms."""

    replicate: float
    fsdp: float
    context: float
    tensor: float
    expert: float = 0.0

    @property
    def total(self) -> float:
        return self.replicate + self.fsdp + self.context + self.tensor + self.expert


def learner_traffic(
    shape: ModelShape,
    mesh: MeshSizes,
    tokens: int,
    rounds: int,
    compute_bytes: int = COMPUTE_BYTES,
    recomputed_layers: int | None = None,
    lora_rank: int | None = None,
) -> Traffic:
    """Traffic of a step on `rounds` micro-batches of each group of ranks, of `tokens` tokens in all.

    - fsdp: every micro-batch gathers the layers for the forward and again for the backward pass, and sums gradients.
      With expert parallelism, a rank gathers its own experts alone.
    - replicate: copies (HSDP) sum their gradient shards after the last micro-batch; also after half of them, to measure
      the norm, unless experts are divided.
    - context: every layer exchanges queries, keys, values and results. KV heads that are fewer than the context size
      are repeated up to it first.
    - tensor: every layer sums its two results and the gradients of its two inputs; then come the embeddings and the
      gradient of the last layer's input. The shared expert is not divided.
    - expert: every pass sends each token to its experts and back, as if routers chose all experts equally often.

    Recomputed layers (None: all) repeat what their forward pass sent, but not their last sum, which no gradient needs.
    With LoRA, only the adapter has gradients.

    >>> from roost.placement.memory.shape import shape_from_config
    >>> shape = shape_from_config({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    ...     "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064})
    >>> of = lambda mesh: learner_traffic(shape, mesh, tokens=32768, rounds=4)
    >>> [round(of(MeshSizes(shard=8)).fsdp / 2**30), round(of(MeshSizes(shard=4, tensor=2)).tensor / 2**30, 1)]
    [191, 31.1]
    """
    root = (shape.embedding_parameters + shape.hidden) / mesh.tensor
    experts = shape.expert_parameters / mesh.expert if mesh.expert > 1 else 0.0  # of a rank, if they are divided
    divided = shape.parameters - experts * mesh.expert - shape.shared_parameters
    layers = divided / mesh.tensor + shape.shared_parameters - root
    gathered = (2 * layers + root) * compute_bytes
    trained = layers + root if lora_rank is None else adapter_parameters(shape, lora_rank) / mesh.tensor
    reduced, expert_bytes = trained * REDUCED_BYTES, REDUCED_BYTES if lora_rank is None else 0
    summed_shard = reduced / mesh.fsdp + experts * expert_bytes / mesh.expert_shards
    own = tokens / mesh.context
    recomputed = 1.0 if recomputed_layers is None else recomputed_layers / shape.layers
    passes = 2 + recomputed  # forward and backward
    keys = max(shape.kv_heads / mesh.tensor, mesh.context)
    heads = 2 * (shape.heads / mesh.tensor + keys) * shape.head_size
    exchanged = own * heads * shape.layers * passes * compute_bytes
    routed = own / mesh.tensor * shape.active_experts * shape.hidden * shape.expert_layers * 2 * passes * compute_bytes
    summed = own * shape.hidden * ((4 + recomputed) * shape.layers + 2) * compute_bytes
    return Traffic(
        replicate=2 * _others(mesh.replicate) * summed_shard * (1 if mesh.expert > 1 else min(rounds, 2)),
        fsdp=_others(mesh.fsdp) * (gathered + reduced) * rounds
        + _others(mesh.expert_shards) * experts * (2 * compute_bytes + expert_bytes) * rounds,
        context=_others(mesh.context) * exchanged,
        tensor=2 * _others(mesh.tensor) * summed,
        expert=_others(mesh.expert) * routed,
    )


def micro_batch_tokens(component: ComponentPlan) -> int:
    """Tokens of a micro-batch of a learner."""
    return component.model.tokens or MICRO_BATCH_TOKENS


def micro_batch_traffic(component: ComponentPlan) -> Traffic | None:
    """Traffic of a learner's micro-batch; None if it is not known, or Roost does not divide the model."""
    shape, mesh, model = known_shape(component), component.sharded_mesh, component.model
    if component.role is not Role.LEARNER or shape is None or mesh is None:
        return None
    tokens, layers = micro_batch_tokens(component), recomputed_of(model)
    return learner_traffic(shape, mesh, tokens, 1, model.compute_bytes, layers, model.lora_rank)


def _others(ranks: int) -> float:
    """Share of the data that is on other ranks."""
    return (ranks - 1) / ranks
