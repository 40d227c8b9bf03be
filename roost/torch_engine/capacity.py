"""How many blocks of keys and values there is room for."""

from __future__ import annotations

import os

import torch

from roost.torch_engine.cache import bytes_per_block
from roost.torch_engine.flash import FLASH_BLOCK
from roost.torch_engine.model import LoadedModel
from roost.torch_engine.settings import EngineSettings

CPU_BLOCK, CUDA_BLOCK = 16, FLASH_BLOCK
CPU_FRACTION, CUDA_FRACTION = 0.25, 0.9
CONTEXT_BYTES = 1 << 29  # what CUDA and its libraries hold per process, beside torch's own memory
LOGIT_COPIES = 4  # the model's, in float32, sorted or summed, and their probabilities


def block_size(settings: EngineSettings, device: torch.device) -> int:
    return settings.block_size or (CUDA_BLOCK if device.type == "cuda" else CPU_BLOCK)


def block_count(settings: EngineSettings, model: LoadedModel, size: int) -> int:
    """The blocks that fit; raises with the numbers if not even one does."""
    each = bytes_per_block(model.layers, size, model.dtype)
    if settings.kv_bytes is not None:
        room, why = settings.kv_bytes, "kv_bytes"
    elif model.device.type == "cuda":
        room, why = _cuda_room(settings, model), "memory_fraction, less the weights and what a step needs,"
    else:
        room, why = _host_room(settings, model, size, each), "memory_fraction of the host's memory"
    if room < each:
        raise ValueError(f"a block of {size} tokens takes {each:,} bytes, but {why} leaves {max(room, 0):,}")
    return room // each


def _host_room(settings: EngineSettings, model: LoadedModel, size: int, each: int) -> int:
    # More than this is never in use at a time. The system gives the memory only when it is written to.
    most = settings.max_sequences * -(-model.max_context // size) * each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, int((settings.memory_fraction or CPU_FRACTION) * memory))


def _cuda_room(settings: EngineSettings, model: LoadedModel) -> int:
    free, total = torch.cuda.mem_get_info(model.device)
    own = torch.cuda.memory_reserved(model.device) + CONTEXT_BYTES
    return cuda_room(settings.memory_fraction or CUDA_FRACTION, total, free, own, _step_bytes(settings, model))


def cuda_room(fraction: float, total: int, free: int, own: int, step: int) -> int:
    """Of this process's share of a device, what is left beside what it holds (`own`) and what a full step needs.

    What other processes hold is not counted against the share, but what is left must really be free.

    >>> cuda_room(0.5, total=100, free=60, own=20, step=5)
    25
    """
    left = int(fraction * total) - own
    if left > free:
        raise ValueError(
            f"memory_fraction {fraction} of {total:,} bytes leaves this process {left:,} beside its weights, but only "
            f"{free:,} are free on the device: others use the rest. With {1000 * (own + free) // total / 1000} it fits"
        )
    return left - step


def _step_bytes(settings: EngineSettings, model: LoadedModel) -> int:
    rows = max(settings.max_sequences, settings.max_logit_rows)
    config = model.module.config.get_text_config()
    hidden_size: int = config.hidden_size
    widest: int = max(getattr(config, "intermediate_size", None) or 0, hidden_size)
    hidden = settings.max_batch_tokens * (3 * widest + 8 * hidden_size) * model.dtype.itemsize
    logits = rows * model.vocabulary * 4 * LOGIT_COPIES
    return hidden + logits
