"""Arithmetic scenario for a laptop, and a small model with one token per character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from roost.rollout.episode import EpisodeReward, Split, Task, Transcript

CHARACTERS = "0123456789+-*= "
END = "<end>"
SIZES: dict[str, Any] = {
    "vocab_size": len(CHARACTERS) + 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": len(CHARACTERS),
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}


class Arithmetic:
    """`3+4=` must be answered with `7` and the end token; the reward is the share of correct characters.

    >>> Arithmetic(tokenizer=None, largest=1).task(Split.TRAIN, 3).name
    '1+1='
    """

    single_turn = True

    def __init__(self, tokenizer: Any, largest: int = 9) -> None:
        self._tokenizer = tokenizer
        self._count = largest + 1
        self._ids = lru_cache(self._count**2)(self._tokenized)

    def size(self, split: Split) -> int:
        return self._count**2

    def task(self, split: Split, index: int) -> Task:
        left, right = divmod(index, self._count)
        return Task(f"{left}+{right}=", {"prompt_text": f"{left}+{right}=", "answer": str(left + right)})

    async def run_episode(self, task: Task, transcript: Transcript) -> EpisodeReward:
        answer = self._ids(task.data["answer"])
        transcript.give(self._ids(task.name))
        completion = await transcript.take(max_tokens=len(answer) + 1)
        wanted = [*answer, self._tokenizer.eos_token_id]
        return EpisodeReward(
            share_right(completion, wanted), self._tokenizer.decode(completion, skip_special_tokens=True)
        )

    def _tokenized(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def share_right(completion: Sequence[int], wanted: Sequence[int]) -> float:
    """Share of positions at which both are equal.

    >>> share_right([1, 2, 9], [1, 3, 9]), share_right([1], [1, 9])
    (0.6666666666666666, 0.5)
    """
    right = sum(one == other for one, other in zip(completion, wanted, strict=False))
    return right / max(len(completion), len(wanted), 1)


def write_arithmetic_model(folder: Path | str, seed: int = 0, family: str = "llama", **sizes: Any) -> Path:
    """Write an untrained model of a family and its tokenizer; return the folder."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **{**SIZES, **sizes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    vocabulary = {character: index for index, character in enumerate([*CHARACTERS, END])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder
