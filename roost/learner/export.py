"""Export the trained policy in transformers format, or an adapter in PEFT format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from roost.config.train import LearnerSettings
from roost.learner.adapter import ADAPTER_PART, adapter_weights, merged_weights, write_adapter
from roost.learner.distributed import rank, world_size

# Files of a model beside its weights, not changed by training.
BESIDE_WEIGHTS = (
    "*token*",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "generation_config.json",
)


def export(model: PreTrainedModel, settings: LearnerSettings, folder: Path) -> None:
    """Gather the weights on all ranks and write them on the first: the whole model, or the adapter alone."""
    if settings.adapter is None:
        export_whole(model, settings, folder)
        return
    weights = _on_first_rank(adapter_weights(model))
    if rank() == 0:
        write_adapter(folder, weights, settings.adapter, settings.model)
        _complete(settings.model, folder)
    if world_size() > 1:
        dist.barrier()


def export_whole(model: PreTrainedModel, settings: LearnerSettings, folder: Path) -> None:
    """Write the whole model, with the adapter merged."""
    weights = _on_first_rank(merged_weights(model))
    if rank() == 0:
        model.save_pretrained(folder, state_dict=weights)
        _complete(settings.model, folder)
    if world_size() > 1:
        dist.barrier()


def whole_bytes(model: PreTrainedModel) -> int:
    """Bytes of the model's weights without the adapter."""
    named = model.state_dict(keep_vars=True).items()
    sizes = {id(weight): weight.numel() * weight.element_size() for name, weight in named if ADAPTER_PART not in name}
    return sum(sizes.values())


def _on_first_rank(gathered: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, weight in gathered:
        if rank() == 0:
            weights[name] = weight.cpu().contiguous()
    return weights


def _complete(model: str, folder: Path) -> None:
    _copy_beside(model, folder)
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)  # safetensors writes files readable by their owner only, whatever the umask


def _copy_beside(model: str, folder: Path) -> None:
    source = Path(model)
    if not source.is_dir():
        source = Path(snapshot_download(model, allow_patterns=list(BESIDE_WEIGHTS)))
    for pattern in BESIDE_WEIGHTS:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
