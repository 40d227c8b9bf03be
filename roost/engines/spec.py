"""What a server is started with, whichever engine it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EngineKind(StrEnum):
    """The engines Roost drives."""

    TORCH = "torch"  # built in
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One inference server."""

    kind: EngineKind
    model: str  # a folder, or a name on the Hugging Face hub
    name: str = "engine"  # in logs and errors
    served_name: str | None = None  # what requests call the model; what `model` says where None
    device: str = "auto"  # auto, cpu or cuda
    tensor: int = 1
    pipeline: int = 1
    dtype: str = "auto"
    max_context: int | None = None  # tokens of prompt and completion; the model's own where None
    memory_fraction: float | None = None  # of each device; the engine's own default where None
    seed: int | None = None  # every start draws its own from it; from the operating system where None
    sleeps: bool = False  # the server is to free its device memory between its phases
    lora_rank: int | None = None  # the largest LoRA rank it must take; None: no adapters
    weight_transfer: str | None = None  # ipc or nccl, for engines that must know at start
    host: str = "127.0.0.1"
    api_key: str | None = None
    python: str | None = None  # the interpreter that has the engine; this one where None
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()  # passed on to the server as they are
