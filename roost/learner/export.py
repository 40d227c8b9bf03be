"""What was learnt, written as others read it: a checkpoint of transformers, or an adapter of PEFT."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from roost.learner.adapter import adapter_weights, merged_weights, write_adapter
from roost.learner.distributed import rank, world_size
from roost.spec.training import LearnerSettings

# What comes with a model's weights and is not changed by training.
READABLE = 0o644
BESIDE_WEIGHTS = ("*token*", "vocab*", "merges.txt", "chat_template*", "generation_config.json")


def export(model: PreTrainedModel, settings: LearnerSettings, folder: Path) -> None:
    """Gather the weights on all ranks, and write them on the first: the whole model, or the adapter alone."""
    gathered = adapter_weights(model) if settings.adapter is not None else merged_weights(model)
    weights: dict[str, Tensor] = {}
    for name, weight in gathered:
        if rank() == 0:
            weights[name] = weight.cpu().contiguous()
    if rank() == 0:
        if settings.adapter is not None:
            write_adapter(folder, weights, settings.adapter, settings.model)
        else:
            model.save_pretrained(folder, state_dict=weights)
        _copy_beside(settings.model, folder)
        for file in folder.iterdir():
            file.chmod(READABLE)  # safetensors lets nobody but its writer read a file
    if world_size() > 1:
        dist.barrier()


def _copy_beside(model: str, folder: Path) -> None:
    source = Path(model)
    if not source.is_dir():
        source = Path(snapshot_download(model, allow_patterns=list(BESIDE_WEIGHTS)))
    for pattern in BESIDE_WEIGHTS:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
