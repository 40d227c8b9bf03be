"""The state of a learner in a folder that is whole or not there at all, for any number of ranks."""

from __future__ import annotations

import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from roost.learner.distributed import rank, world_size

UNFINISHED = ".unfinished"
REPLACED = ".replaced"

State = dict[str, Any]  # nested, with tensors; what torch.distributed.checkpoint takes


class CheckpointWriter:
    """Writes states in the background, one at a time."""

    def __init__(self) -> None:
        # Of its own, as what is agreed on in the background would get between what the learner asks of its group.
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, state: State, folder: Path) -> None:
        """Copy the state now, and write it in the background; waits for what is still being written."""
        self.wait()
        staged = BlockingAsyncStager().stage(state)
        self._thread = threading.Thread(target=self._write, args=(staged, folder), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the last state is written. Raises if it was not."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(f"the last checkpoint was not written: {failure}") from failure

    def _write(self, state: State, folder: Path) -> None:
        unfinished = folder.with_name(folder.name + UNFINISHED)
        try:
            if rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            if self._group is not None:
                dist.barrier(self._group)
            writer = FileSystemWriter(unfinished, sync_files=True)
            save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            self._finish(unfinished, folder)
        except (Exception, CheckpointException) as failure:  # told by `wait`, as nobody hears a thread
            self._failure = failure
            if rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _finish(self, unfinished: Path, folder: Path) -> None:
        """Rank 0 gives the folder its name; all ranks return once it has it, or raise together."""
        problem: list[str | None] = [None]
        if rank() == 0:
            try:
                _put_in_place(unfinished, folder)
            except OSError as error:
                problem = [str(error)]
        if self._group is not None:
            dist.broadcast_object_list(problem, src=0, group=self._group)
        if problem[0] is not None:
            raise OSError(problem[0])


def load_state(state: State, folder: Path) -> None:
    """Fill the tensors of a state from a folder, and replace what else is in it; whatever the folder lacks is an error.

    Tensors may be sharded in another way than those that were written.
    """
    try:
        load(state, storage_reader=FileSystemReader(folder), no_dist=world_size() == 1)
    except CheckpointException as failure:
        reasons = "; ".join(str(reason) for reason, _ in failure.failures.values())
        raise ValueError(f"{folder} does not fit this learner: {reasons}") from failure


def saved_names(folder: Path) -> frozenset[str]:
    """What is in a checkpoint, as dotted names."""
    return frozenset(FileSystemReader(folder).read_metadata().state_dict_metadata)


def check_whole(folder: Path) -> None:
    """Raise unless all that the folder's index tells of is there."""
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder} is no checkpoint of a learner, or was not finished: it has no index (.metadata)")
    for name, size in _expected_sizes(FileSystemReader(folder).read_metadata().storage_data).items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found < size:
            raise ValueError(f"{folder / name} was cut off: it has {found} of {size} bytes; take an earlier checkpoint")


def _expected_sizes(storage: Mapping[Any, Any]) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for piece in storage.values():
        sizes[piece.relative_path] = max(sizes[piece.relative_path], piece.offset + piece.length)
    return sizes


def _put_in_place(unfinished: Path, folder: Path) -> None:
    """Give the folder its name once all of it is on the disk."""
    _sync(unfinished)
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    unfinished.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
