"""A small model with random weights and a tokenizer of bytes, for tests and demos without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCABULARY = 272  # bytes, special tokens, and room for those that a family's tokenizer class adds
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# More sizes of families with mixtures of experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def write_tiny_model(folder: Path | str, family: str = "qwen2", seed: int = 0, **sizes: Any) -> Path:
    """Write a checkpoint of a family (llama, qwen2, qwen3_moe, ...) that any engine can load; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    config = AutoConfig.for_model(family, **{**SIZES, **MIXTURES.get(family, {}), **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _spread(model)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


def write_byte_tokenizer(folder: Path | str) -> None:
    """Write a tokenizer with a token for every byte, and special tokens for the roles of a chat."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet has a printable character for every byte. Sorted, so that it is the same everywhere.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _spread(model: Any) -> None:
    """Make the random weights larger, so that tokens differ clearly in probability and rounding changes no choice."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
