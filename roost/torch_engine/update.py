"""Taking new weights: checked before the first byte, written in place, and undone if they do not all arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from roost.engines.weights.group import WeightGroup
from roost.engines.weights.parcel import GROUP_NAME, GroupInvitation, TensorInfo
from roost.torch_engine.handles import open_handle, read_handles

Named = Iterator[tuple[str, torch.Tensor]]


class WeightUpdate:
    """One update from start to finish. Every method runs while no step does."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        manifest: Sequence[TensorInfo] | None,
        host_buffer: Callable[[str], torch.Tensor] | None,
    ) -> None:
        """`host_buffer` gives memory for what is overwritten; None where there is nothing to go back to."""
        self._weights = weights
        self._host_buffer = host_buffer
        self._old: dict[str, torch.Tensor] = {}
        self._taken: set[str] = set()
        if manifest is not None:
            check_manifest(weights, manifest)

    def take(self, tensors: Named) -> None:
        """Write tensors over the old ones, which are kept in host memory until the update is finished."""
        device = next(iter(self._weights.values())).device
        with torch.no_grad():
            for name, tensor in tensors:
                weight = self._weights.get(name)
                if weight is None:
                    raise ValueError(f"there is no tensor {name} in this model")
                if weight.shape != tensor.shape:
                    raise ValueError(f"{name} is {list(tensor.shape)}, and this model has {list(weight.shape)}")
                if self._host_buffer is not None and name not in self._old:
                    self._old[name] = self._host_buffer(name).copy_(weight, non_blocking=True)
                weight.copy_(tensor)
                self._taken.add(name)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the sender may use its memory again once it is told

    def check_complete(self) -> None:
        missing = sorted(set(self._weights) - self._taken)
        if missing:
            raise ValueError(f"{len(missing)} of {len(self._weights)} tensors did not come, such as {missing[0]}")

    def undo(self) -> bool:
        """Write the old tensors back; whether there are usable weights again."""
        with torch.no_grad():
            for name, tensor in self._old.items():
                self._weights[name].copy_(tensor)
        return self._host_buffer is not None


def check_manifest(weights: Mapping[str, torch.Tensor], manifest: Sequence[TensorInfo]) -> None:
    """Refuse an update that lacks a tensor, brings an unknown one, or one of another shape; all of them are named."""
    coming = {info.name: info.shape for info in manifest}
    wrong = [f"{name} is missing" for name in weights if name not in coming]
    wrong += [f"{name} is unknown" for name in coming if name not in weights]
    wrong += [
        f"{name} is {list(coming[name])} and should be {list(weight.shape)}"
        for name, weight in weights.items()
        if name in coming and tuple(weight.shape) != tuple(coming[name])
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"the new weights do not fit this model: {', '.join(wrong[:5])}{more}")


def named_tensors(info: Mapping[str, Any], group: WeightGroup | None, device: torch.device) -> Named:
    """The tensors of one parcel, however it comes."""
    names, shapes, dtypes = info["names"], info["shapes"], info["dtype_names"]
    if not len(names) == len(shapes) == len(dtypes):
        raise ValueError(f"{len(names)} names came with {len(shapes)} shapes and {len(dtypes)} types")
    if "path" in info:
        return _from_file(info["path"], names)
    if "ipc_handles_pickled" in info:
        handles = read_handles(info["ipc_handles_pickled"])
        if isinstance(handles, dict):
            return _from_buffer(handles, names, shapes, dtypes, info["tensor_sizes"], device)
        return ((name, open_handle(handle, device)) for name, handle in zip(names, handles, strict=True))
    if group is None:
        raise ValueError("weights were announced by broadcast, and this engine has joined no group")
    return _from_group(group, names, shapes, dtypes, device)


def join(invitation: Mapping[str, Any], device: torch.device) -> WeightGroup:
    """Join the sender's group; an engine of one process has the rank of its offset."""
    backend = invitation.get("backend") or ("nccl" if device.type == "cuda" else "gloo")
    group = GroupInvitation(
        invitation["master_address"],
        int(invitation["master_port"]),
        int(invitation["rank_offset"]),
        int(invitation["world_size"]),
        backend,
        invitation.get("group_name", GROUP_NAME),
    )
    return WeightGroup(group, group.rank_offset, device)


def checkpoint_files(folder: str) -> dict[str, list[TensorInfo]]:
    """What each file of a checkpoint holds, by its path; tensors are not read yet."""
    from safetensors import safe_open

    found: dict[str, list[TensorInfo]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            found[str(path)] = [
                TensorInfo(name, one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()
            ]
    if not found:
        raise ValueError(f"there are no safetensors files in {folder}")
    return found


def _from_file(path: str, names: Sequence[str]) -> Named:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        for name in names:
            yield name, file.get_tensor(name)


def _from_buffer(
    handle: dict[str, tuple[Any, ...]],
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    sizes: Sequence[int],
    device: torch.device,
) -> Named:
    buffer, start = open_handle(handle, device), 0
    for name, shape, dtype, size in zip(names, shapes, dtypes, sizes, strict=True):
        piece = buffer[start : start + size]
        # Tensors of different types follow one another: one may start where its type may not.
        aligned = piece if piece.data_ptr() % 8 == 0 else piece.clone()
        yield name, aligned.view(getattr(torch, dtype)).view(tuple(shape))
        start += size


def _from_group(
    group: WeightGroup,
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    device: torch.device,
) -> Named:
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
        group.broadcast(tensor)
        yield name, tensor
