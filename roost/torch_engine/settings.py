"""Settings of the built-in engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CPU_SEQUENCES, CPU_TOKENS = 256, 2048
CUDA_SEQUENCES, CUDA_TOKENS = 1024, 8192


class Limits(NamedTuple):
    """Sequences and tokens of a step."""

    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Model, device and capacity limits. None: derived from the model and the device."""

    model: str  # a folder, or a name on the Hugging Face hub
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    dtype: str = "auto"  # auto (the checkpoint's own), float32, bfloat16 or float16
    max_context: int | None = None  # tokens of prompt and completion together; None: the model's
    block_size: int | None = None  # tokens per KV cache block
    max_sequences: int | None = None  # that run concurrently; None: 256, on CUDA 1,024
    max_batch_tokens: int | None = None  # computed in one step; None: 2,048, on CUDA 8,192
    max_logit_rows: int = 512  # prompt positions scored in one step, each with a row as wide as the vocabulary
    kv_bytes: int | None = None  # for the KV cache; a CPU may use as much again for running sequences
    memory_fraction: float | None = None  # of the device, for weights and KV cache; 0.9 on CUDA, 0.25 on CPU
    seed: int | None = None  # of the seeds for requests without one; None: random
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        limits = {
            "max_sequences": self.max_sequences,
            "max_batch_tokens": self.max_batch_tokens,
            "max_logit_rows": self.max_logit_rows,
            "max_context": self.max_context,
            "block_size": self.block_size,
            "kv_bytes": self.kv_bytes,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if (self.max_batch_tokens or CPU_TOKENS) < (self.max_sequences or 1):
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens or CPU_TOKENS}, less than max_sequences "
                f"{self.max_sequences}: a step must have room for one token of every sequence"
            )
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1")

    def limits(self, on_cuda: bool) -> Limits:
        """Limits of a step, by the device where they are not set."""
        sequences, tokens = (CUDA_SEQUENCES, CUDA_TOKENS) if on_cuda else (CPU_SEQUENCES, CPU_TOKENS)
        tokens = self.max_batch_tokens or tokens
        return Limits(self.max_sequences or min(sequences, tokens), tokens)
