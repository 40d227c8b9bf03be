"""Checkpoints of a learner: its state as a nested dictionary of tensors, written in the background and restored."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from roost.config.train import OptimizerType
from roost.learner.checksums import sums_of, write_sums
from roost.learner.distributed import rank, results_of_ranks, to_local, world_size
from roost.procs.files import DiskFull, FileSystem, chain_of, disk_full, is_disk_full, put_in_place, unfinished

MODEL, RANDOM = "model", "random"
NORMS = "gradient_norms"  # present if outliers among gradients are skipped
OPTIMIZER_TYPE = "optimizer_type"  # checkpoints without it are of AdamW
INDEX = ".metadata"

State = dict[str, Any]  # nested, with tensors, as torch.distributed.checkpoint takes it


def learner_state(
    model: nn.Module,
    moments: Mapping[Tensor, State],
    optimizer: OptimizerType,
    progress: Tensor,
    device: torch.device,
) -> State:
    """The live tensors to be written or filled: weights, moments, progress and random states."""
    trained = _trained(model)
    state: State = {
        MODEL: written_weights(model),
        "optimizer": {name: moments[weight] for name, weight in trained.items()},
        "progress": progress,
        RANDOM: {str(rank()): _random_states(device)},
    }
    return state | {OPTIMIZER_TYPE: optimizer.value} if trained else state


def written_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights that a checkpoint has, by name.

    If some weights are trained, the frozen ones are left out, as the model has them. A model that only scores has all
    of its weights written, as they may be a copy of a policy's.
    """
    trained = _trained(model)
    is_partial = bool(trained) and any(not weight.requires_grad for weight in model.parameters())
    buffers = {} if is_partial else _persistent_buffers(model)
    return {name: weight.detach() for name, weight in (trained or dict(model.named_parameters())).items()} | buffers


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def saved_optimizer(folder: Path) -> str:
    """Type of the optimizer whose state a checkpoint has."""
    return _optimizer_of(folder, saved_names(folder))


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole weights of a checkpoint, by name, however they were sharded."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    of_model = {name.removeprefix(f"{MODEL}."): each for name, each in entries if name.startswith(f"{MODEL}.")}
    return {name: tuple(each.size) for name, each in of_model.items() if isinstance(each, TensorStorageMetadata)}


def fill(state: State, folder: Path, device: torch.device) -> None:
    """Read a checkpoint into a state, and restore the random generators."""
    check_whole(folder)
    saved = saved_names(folder)
    own = state.get(OPTIMIZER_TYPE)  # None for a model that only scores
    found = _optimizer_of(folder, saved)
    if own not in (None, found):
        raise ValueError(
            f"{folder} has the state of optimizer {found}, but the run's is {own}; write optimizer: {found} to resume, "
            "or start a new run from the exported policy"
        )
    absent = {OPTIMIZER_TYPE}
    if f"{RANDOM}.{rank()}.{device.type}" not in saved:
        absent.add(RANDOM)  # saved with fewer ranks or on another device: keep the current random state
    if NORMS not in saved:
        absent.add(NORMS)  # the run did not skip outliers until now
    load_state({name: part for name, part in state.items() if name not in absent}, folder)
    if RANDOM not in absent:
        _set_random_states(state[RANDOM][str(rank())], device)


def _optimizer_of(folder: Path, saved: Collection[str]) -> str:
    found: State = {OPTIMIZER_TYPE: OptimizerType.ADAMW.value}
    if OPTIMIZER_TYPE in saved:
        load_state(found, folder)
    return str(found[OPTIMIZER_TYPE])


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class CheckpointWriter:
    """Writes states in the background, one at a time."""

    def __init__(self) -> None:
        # A separate group, as collectives in the background would interleave with the learner's.
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, state: State, folder: Path) -> None:
        """Copy the state now and write it in the background; waits for a write in progress."""
        self.wait()
        staged = BlockingAsyncStager().stage(state)
        self._thread = threading.Thread(target=self._write, args=(staged, folder), name="checkpoint")
        self._thread.start()

    def is_done(self) -> bool:
        """Return True if nothing is being written; raise if the last write failed."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until the last state is written; raise if that failed."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if isinstance(failure, DiskFull):
            raise failure
        if failure is not None:
            raise RuntimeError(f"the last checkpoint was not written: {failure}") from failure

    def _write(self, state: State, folder: Path) -> None:
        draft = unfinished(folder)
        try:
            if rank() == 0:
                shutil.rmtree(draft, ignore_errors=True)
            if self._group is not None:
                dist.barrier(self._group)
            writer = FileSystemWriter(draft, sync_files=True)
            save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            self._finish(draft, folder)
        except (Exception, CheckpointException) as failure:  # raised by `wait`
            self._failure = _as_disk_full(failure, folder, state)
            if rank() == 0:
                shutil.rmtree(draft, ignore_errors=True)

    def _finish(self, draft: Path, folder: Path) -> None:
        """Each rank computes checksums of its files, rank 0 renames the folder; all ranks return or raise together."""
        sums = results_of_ranks(lambda: sums_of(draft.glob(f"__{rank()}_*")), self._group)
        whole = {name: digest for part in sums for name, digest in part.items()}
        results_of_ranks(lambda: _put_in_place(draft, folder, whole) if rank() == 0 else None, self._group)


def state_bytes(state: State) -> int:
    """Bytes of this rank's tensors."""
    return sum(_bytes(each) for each in _tensors(state))


def written_bytes(state: State) -> int:
    """Approximate bytes that this rank writes to a checkpoint: of replicas (HSDP) only the first is written."""
    return sum(_bytes(each) for each in _tensors(state) if not (isinstance(each, DTensor) and _is_replica(each)))


def _tensors(state: State) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _bytes(tensor: Tensor) -> int:
    return to_local(tensor).nbytes


def _is_replica(tensor: DTensor) -> bool:
    """Return True if another rank, the first of a replicated dimension, has the same shard."""
    coordinates = tensor.device_mesh.get_coordinate() or ()
    pairs = zip(tensor.placements, coordinates, strict=False)
    return any(placement.is_replicate() and coordinate > 0 for placement, coordinate in pairs)


def _as_disk_full(failure: BaseException, folder: Path, state: State) -> BaseException:
    """DiskFull if the disk is full, as torch then reports only a wrong file length; else the error itself."""
    reasons = [failure, *(reason for reason, _ in getattr(failure, "failures", {}).values())]
    needed = state_bytes(state)
    # An error of another rank comes without its cause, which may be the OSError.
    has_other_reason = any(isinstance(one, OSError) for reason in reasons for one in chain_of(reason))
    lacks_room = not has_other_reason and FileSystem.of(folder).free < needed
    if lacks_room or any(is_disk_full(reason, folder) for reason in reasons):
        return disk_full(folder.parent, "a checkpoint", needed)
    return failure


def load_state(state: State, folder: Path) -> None:
    """Fill the tensors of a state from a folder and replace its other entries; raise if an entry is missing.

    Tensors may be sharded differently than when they were written.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended in a single process
            load(state, storage_reader=FileSystemReader(folder), no_dist=world_size() == 1)
    except CheckpointException as failure:
        reasons = "; ".join(str(reason) for reason, _ in failure.failures.values())
        raise ValueError(f"{folder} does not fit this learner: {reasons}") from failure


def saved_names(folder: Path) -> frozenset[str]:
    """Dotted names of a checkpoint's entries."""
    return frozenset(FileSystemReader(folder).read_metadata().state_dict_metadata)


def check_whole(folder: Path) -> None:
    """Raise ValueError if a file of the folder's index is missing or truncated."""
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} is no checkpoint of a learner, or was not finished: it has no index ({INDEX})")
    for name, size in _expected_sizes(FileSystemReader(folder).read_metadata().storage_data).items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found < size:
            raise ValueError(f"{folder / name} was cut off: it has {found} of {size} bytes; take an earlier checkpoint")


def _expected_sizes(storage: Mapping[Any, Any]) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for piece in storage.values():
        sizes[piece.relative_path] = max(sizes[piece.relative_path], piece.offset + piece.length)
    return sizes


def _put_in_place(draft: Path, folder: Path, sums: Mapping[str, str]) -> None:
    """Write the checksums, and rename the folder once all of it is on the disk."""
    write_sums(draft, {**sums, **sums_of([draft / INDEX])})
    put_in_place(folder)
