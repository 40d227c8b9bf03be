"""Write weights as a checkpoint folder that every engine can load, atomically."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from roost.engines.protocol import UpdateFailed
from roost.engines.weights.payload import TensorInfo, cut, size_of
from roost.engines.weights.source import WeightSource
from roost.procs.files import put_in_place, unfinished

FILE_BYTES = 4 * 2**30
INDEX = "model.safetensors.index.json"


def write_checkpoint(source: WeightSource, model: Path | str, folder: Path | str, file_bytes: int = FILE_BYTES) -> Path:
    """Write the weights with the config and tokenizer of their model; return the folder.

    Everything goes to a sibling folder first, which is then renamed: a reader never sees half a checkpoint, and a full
    disk leaves the previous one intact.
    """
    model, folder = _local_folder(str(model)), Path(folder)
    draft = unfinished(folder)
    size = sum(map(size_of, source.tensors))
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _check_room(draft, size)
        _copy_companions(model, draft)
        _write_weights(source, draft, file_bytes)
        put_in_place(folder, is_durable=False)  # of use to this run only
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UpdateFailed(
                f"the disk of {folder} is full: a checkpoint needs {size / 2**30:.2f} GiB; nothing was replaced. "
                "Free some room, or choose another folder"
            ) from error
        raise UpdateFailed(f"cannot write a checkpoint to {folder}: {error}; nothing was replaced") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def _local_folder(model: str) -> Path:
    """Local folder of a model; a Hub name is looked up in the Hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def _check_room(folder: Path, size: int) -> None:
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy_companions(model: Path, folder: Path) -> None:
    """Copy all files but weights from the model's folder: config, generation settings, tokenizer."""
    for file in model.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".gguf") and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)


def _write_weights(source: WeightSource, folder: Path, file_bytes: int) -> None:
    files = list(cut(source.tensors, file_bytes))
    names = ["model.safetensors"] if len(files) == 1 else [_part_name(index, len(files)) for index in range(len(files))]
    stream = source.stream()
    for name, infos in zip(names, files, strict=True):
        _write_file(folder / name, infos, stream)
    if len(files) > 1:
        homes = {info.name: name for name, infos in zip(names, files, strict=True) for info in infos}
        total = sum(map(size_of, source.tensors))
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=1))


def _write_file(path: Path, infos: Sequence[TensorInfo], stream: Iterator[torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({info.name: next(stream).cpu() for info in infos}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors does not expose errno
        number = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(number, str(error)) from error


def _part_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
