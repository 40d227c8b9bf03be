"""Sizes of a model that its memory depends on, from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roost.config.engine_options import is_count
from roost.config.findings import shown

DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*DENSE_FAMILIES, *EXPERT_FAMILIES)
# PEFT takes the dense feed-forward layers of these families for experts and misreads their adapter: they get none.
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
        layers = self.layers * self.attention_parameters + feed_forward + router + self.shared_parameters
        return self.embedding_parameters + layers + self.hidden  # and the last norm

    @property
    def shared_parameters(self) -> int:
        """Parameters of the shared experts in all layers, and of their gates."""
        gate = self.hidden if self.shared_feed_forward else 0
        return self.expert_layers * (3 * self.hidden * self.shared_feed_forward + gate)

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


ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
FEED_FORWARD = tuple(f"{name}_proj" for name in ("gate", "up", "down"))


def adaptable_layers(shape: ModelShape) -> list[str]:
    """Paths of the linear layers that may get an adapter.

    If only some layers have experts, all layers are listed with both kinds of feed-forward layers. Routers and routed
    experts get no adapter.
    """
    dense = shape.expert_layers < shape.layers and shape.family not in CONVERTED_BY_PEFT
    parts = [*ATTENTION, *(f"mlp.{name}" for name in FEED_FORWARD if dense)]
    if shape.shared_feed_forward:
        parts += [*(f"mlp.shared_expert.{name}" for name in FEED_FORWARD), "mlp.shared_expert_gate"]
    return [f"model.layers.{layer}.{part}" for layer in range(shape.layers) for part in parts]


def is_named(path: str, name: str) -> bool:
    """Return True if a layer's path ends with a name.

    >>> is_named("model.layers.0.mlp.up_proj", "up_proj"), is_named("model.layers.0.mlp.up_proj", "proj")
    (True, False)
    """
    return f".{path}".endswith(f".{name}")


def unmatched(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Names that no path ends with."""
    return sorted(name for name in names if not any(is_named(path, name) for path in paths))


def model_positions(config: Mapping[str, Any] | None) -> tuple[int | None, bool]:
    """Positions of a model, by its `config.json` (None: not known), and True if it scales them.

    >>> model_positions({"max_position_embeddings": 4096}), model_positions(None)
    ((4096, False), (None, False))
    """
    config = config or {}
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None, False
    positions = text.get("max_position_embeddings")
    scales = any(_factor(text.get(key)) != 1 for key in ("rope_scaling", "rope_parameters"))
    return positions if is_count(positions) else None, scales


def _factor(scaling: Any) -> float:
    factor = scaling.get("factor", 1) if isinstance(scaling, Mapping) else 1
    return factor if isinstance(factor, int | float) else 1


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
    raise UnknownShape(f"config.json has no {key}" if value is None else f"{key} is {shown(value)}")
