"""Weight updates of the built-in engine: IPC handles, LoRA adapters, and updates that can be undone."""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from roost.engines.weights.carriers import WeightGroup
from roost.engines.weights.payload import DEVICE_ARGUMENT, GROUP_NAME, GroupInvitation, TensorInfo

# Classes allowed in a pickled handle. Anything else is refused, so that a message cannot run code here.
ALLOWED = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
    ("torch.nn.parameter", "Parameter"),
}


def read_handles(text: str) -> Any:
    """Unpickle handles: a list with one per tensor, or one for a packed buffer."""
    return _HandleReader(io.BytesIO(base64.b64decode(text))).load()


def open_handle(handle: dict[str, tuple[Any, ...]], device: torch.device) -> torch.Tensor:
    """Open the tensor of a handle on the device that both processes share."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid not in handle:
        raise ValueError(
            f"the weights are on device {', '.join(handle)}, and this engine is on {uuid}; send them by broadcast"
        )
    arguments = list(handle[uuid])
    arguments[DEVICE_ARGUMENT] = device.index if device.index is not None else torch.cuda.current_device()
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return tensor


class _HandleReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.split(".")[0] == "torch" else None
        if (module, name) in ALLOWED or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in an IPC handle")


PREFIX = "base_model.model."  # PEFT's prefix of module names
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
# Settings of an adapter's config that do not change its result, or that are supported.
HARMLESS = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "layers_to_transform",
    "layers_pattern", "megatron_core", "eva_config", "qalora_group_size", "runtime_config",
)  # fmt: skip
UNUSED: tuple[Any, ...] = (None, False, "none", {}, [], "")  # values that disable a setting
INITIALIZATIONS = (True, "gaussian", "eva", "orthogonal", *UNUSED)  # others change the base weights too


@dataclass(frozen=True, slots=True)
class Correction:
    """LoRA matrices of one linear layer: adds up(down(x)), with the scale already in `up`."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """Corrections by layer name."""

    corrections: Mapping[str, Correction]


class Adapters:
    """Loaded adapters, and the rows of the current batch that use each."""

    def __init__(self, module: nn.Module) -> None:
        self._linears = {
            name: each
            for name, each in module.named_modules()
            if isinstance(each, nn.Linear) and each is not module.get_output_embeddings()  # type: ignore[operator]
        }
        self._loaded: dict[str, Adapter] = {}
        self._loads = 0
        self._roots: dict[str, bytes] = {}
        self._hooks: dict[str, Any] = {}
        self._used: list[tuple[Adapter, Tensor | None]] = []  # with the rows, or None for all

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def root(self, name: str | None) -> bytes:
        """Root of block hashes in the prefix cache; it changes when an adapter is reloaded under the same name."""
        return b"" if name is None else self._roots[name]

    def read(self, folder: str) -> Adapter:
        """Read a PEFT adapter into host memory; raise ValueError if it does not fit the model. Thread-safe."""
        scale = _scale(json.loads((Path(folder) / "adapter_config.json").read_text()), folder)
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        corrections = {}
        for key in [key for key in tensors if key.endswith(DOWN)]:
            name = key.removeprefix(PREFIX).removesuffix(DOWN)
            down, up = tensors.pop(key), tensors.pop(key.removesuffix(DOWN) + UP, torch.empty(0, 0))
            linear = self._linears.get(name)
            if linear is None:
                raise ValueError(f"{folder} adapts {name!r}, which is not a linear layer of the model's body")
            _check_shapes(f"{folder}: {name}", down, up, linear)
            dtype = linear.weight.dtype
            corrections[name] = Correction(down.to(dtype), up.mul(scale).to(dtype))
        if tensors:
            raise ValueError(f"{folder} has tensors that are not supported: {sorted(tensors)[:4]}")
        if not corrections:
            raise ValueError(f"{folder} has no LoRA weights")
        return Adapter(corrections)

    def put(self, name: str, adapter: Adapter) -> None:
        """Move an adapter to the device and register it under the name. Call it between steps only."""
        moved = Adapter({layer: self._moved(layer, each) for layer, each in adapter.corrections.items()})
        self._loads += 1
        self._roots[name] = f"{name}#{self._loads}".encode()
        self._loaded[name] = moved
        for layer in adapter.corrections.keys() - self._hooks.keys():
            self._hooks[layer] = self._linears[layer].register_forward_hook(self._corrected(layer))

    def remove(self, name: str) -> None:
        if name not in self._loaded:
            raise ValueError(f"there is no adapter {name!r}; loaded are {list(self._loaded)}")
        del self._loaded[name], self._roots[name]
        in_use = {layer for adapter in self._loaded.values() for layer in adapter.corrections}
        for layer in self._hooks.keys() - in_use:
            self._hooks.pop(layer).remove()

    def select(self, names: Sequence[str | None], sizes: Sequence[int], device: torch.device) -> None:
        """Set the adapter and number of rows of each sequence of the next batch."""
        if not self._loaded:
            self._used = []
        elif len(set(names)) == 1:
            self._used = [] if names[0] is None else [(self._loaded[names[0]], None)]
        else:
            owners = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(sizes))
            self._used = []
            for name in dict.fromkeys(each for each in names if each is not None):
                is_user = torch.tensor([each == name for each in names])
                self._used.append((self._loaded[name], is_user[owners].nonzero().squeeze(-1).to(device)))

    def _moved(self, layer: str, correction: Correction) -> Correction:
        device = self._linears[layer].weight.device
        return Correction(correction.down.to(device), correction.up.to(device))

    def _corrected(self, layer: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for adapter, rows in self._used:
                correction = adapter.corrections.get(layer)
                if correction is None:
                    continue
                rows_in = inputs[0] if rows is None else inputs[0][:, rows]
                change = F.linear(F.linear(rows_in, correction.down), correction.up)
                output = output + change if rows is None else output.index_add_(1, rows, change)
            return output

        return hook


def _scale(config: Mapping[str, Any], folder: str) -> float:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} is a {config.get('peft_type')} adapter; only LORA is supported")
    for key, value in config.items():
        allowed = INITIALIZATIONS if key == "init_lora_weights" else UNUSED
        if key not in HARMLESS and value not in allowed:
            raise ValueError(f"{folder} sets {key} to {value!r}, which is not supported")
    rank, alpha = config["r"], config["lora_alpha"]
    return float(alpha / math.sqrt(rank)) if config.get("use_rslora") else float(alpha / rank)


def _check_shapes(where: str, down: Tensor, up: Tensor, linear: nn.Linear) -> None:
    wanted = (up.shape[1], linear.in_features), (linear.out_features, down.shape[0])
    if (tuple(down.shape), tuple(up.shape)) != wanted:
        raise ValueError(
            f"{where} has lora_A {tuple(down.shape)} and lora_B {tuple(up.shape)}, but the layer has "
            f"{linear.in_features} input and {linear.out_features} output features"
        )


Named = Iterator[tuple[str, torch.Tensor]]


class OpenUpdate:
    """A weight update that has started and can be undone. Call its methods between steps only."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        manifest: Sequence[TensorInfo] | None,
        host_buffer: Callable[[str], torch.Tensor] | None,
    ) -> None:
        """Check the manifest, if any. `host_buffer` returns memory for old weights; None: none are to be restored."""
        self._weights = weights
        self._host_buffer = host_buffer
        self._old: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = set()
        if manifest is not None:
            check_manifest(weights, manifest)

    def take(self, tensors: Named) -> None:
        """Overwrite weights; the old ones are kept in host memory until the update is finished."""
        device = next(iter(self._weights.values())).device
        with torch.no_grad():
            for name, tensor in tensors:
                weight = self._weights.get(name)
                if weight is None:
                    raise ValueError(f"{name} is not a tensor of this model")
                if weight.shape != tensor.shape:
                    raise ValueError(f"{name} is {list(tensor.shape)}, and this model has {list(weight.shape)}")
                if self._host_buffer is not None and name not in self._old:
                    self._old[name] = self._host_buffer(name).copy_(weight, non_blocking=True)
                weight.copy_(tensor)
                self._loaded.add(name)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the sender may reuse its memory once this returns

    def check_complete(self) -> None:
        missing = sorted(set(self._weights) - self._loaded)
        if missing:
            raise ValueError(f"{len(missing)} of {len(self._weights)} tensors were not sent, such as {missing[0]}")

    def undo(self) -> bool:
        """Restore the old weights; return True if the weights are usable again."""
        with torch.no_grad():
            for name, tensor in self._old.items():
                self._weights[name].copy_(tensor)
        return self._host_buffer is not None


def check_manifest(weights: Mapping[str, torch.Tensor], manifest: Sequence[TensorInfo]) -> None:
    """Raise ValueError if an update has missing or unknown tensors, or other shapes."""
    shapes = {info.name: info.shape for info in manifest}
    wrong = [f"{name} is missing" for name in weights if name not in shapes]
    wrong += [f"{name} is unknown" for name in shapes if name not in weights]
    wrong += [
        f"{name} is {list(shapes[name])} and should be {list(weight.shape)}"
        for name, weight in weights.items()
        if name in shapes and tuple(weight.shape) != tuple(shapes[name])
    ]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"the new weights do not fit this model: {', '.join(wrong[:5])}{more}")


def named_tensors(info: Mapping[str, Any], group: WeightGroup | None, device: torch.device) -> Named:
    """Names and tensors of one payload, by any transport."""
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
        raise ValueError("the weights are sent by broadcast, but this engine has not joined a group")
    return _from_group(group, names, shapes, dtypes, device)


def join(invitation: Mapping[str, Any], device: torch.device) -> WeightGroup:
    """Join the sender's group. This engine has one process, whose rank is the engine's offset."""
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
    """Tensor infos of each file of a checkpoint by path; tensors are not read."""
    from safetensors import safe_open

    found: dict[str, list[TensorInfo]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
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
        # Tensors of different dtypes are packed together, so one may be misaligned for its dtype.
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
