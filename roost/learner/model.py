"""Load a model and shard it over all ranks; only rank 0 reads the checkpoint."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForTokenClassification, GenerationConfig, PreTrainedModel

from roost.config.job import COMPILED_SIZE, MeshSizes, eos_ids, heads_divide
from roost.config.train import LearnerSettings
from roost.learner.adapter import ADAPTER_PART, adapter_weights, add_adapter, merged_weights, write_adapter
from roost.learner.attention import NAME, register
from roost.learner.distributed import patient_group, rank, results_of_ranks, world_size
from roost.learner.forward import Head, LogitProcessors, Outputs, PolicyOutputs, ValueOutputs
from roost.learner.parallel.mesh import LearnerMesh, check_experts, divide_experts
from roost.learner.parallel.tensor import TensorPlan
from roost.learner.parallel.vocabulary import VocabularyShard
from roost.learner.routing import SOFTMAX_ROUTERS
from roost.procs.files import disk_full, is_disk_full
from roost.vision.processor import reads_images
from roost.vision.tower import attention_of, model_class

DISK_LIMIT_S = 4 * 3600.0  # to read or write a model, on a slow disk
LOGIT_BYTES = 1 << 29  # of logits in float32 at the same time; larger matrix products are faster


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    compute: torch.dtype,
    device: torch.device,
    mesh: LearnerMesh,
    tensor: TensorPlan | None,
) -> None:
    """Shard a model that is whole on rank 0 and on the `meta` device on the others.

    Rank 0 broadcasts layer by layer, and each rank keeps its shard of a layer before the next one comes.
    """
    with patient_group(DISK_LIMIT_S) as group:
        _check_same(root, group)
    types = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*layers, root):
        for weight in _moved_unsharded(module, device):
            dist.broadcast(weight, 0)
        if tensor is not None:
            tensor.apply(module)
        divide_experts(module, mesh, types)
        # The root's inputs are ids, pixels and logits of a teacher, which must not be cast to the compute dtype.
        fully_shard(module, mesh=mesh.fsdp, mp_policy=replace(types, cast_forward_inputs=module is not root))


def _check_same(root: nn.Module, group: Any) -> None:
    """Raise ValueError on all ranks unless their weights have the same names, shapes and dtypes.

    Broadcasts of others would hang.
    """
    here = [(name, tuple(weight.shape), str(weight.dtype)) for name, weight in root.named_parameters()]
    first, *others = results_of_ranks(lambda: here, group)
    for other in others:
        if other != first:
            (name, *_), *_ = sorted(set(first) ^ set(other))
            name = name.removeprefix("model.")
            raise ValueError(
                f"{name} of the checkpoint does not follow from its config.json: if the embeddings and the head of the "
                "checkpoint differ, write tie_word_embeddings: false there"
            )


def _moved_unsharded(module: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Move weights that are not sharded yet and buffers to the device, and yield them; tied weights stay tied.

    Those on the `meta` device are allocated.
    """
    moved: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            if not isinstance(weight, DTensor):
                if weight not in moved:
                    moved[weight] = nn.Parameter(_on_device(weight.data, device), weight.requires_grad)
                setattr(owner, name, moved[weight])
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer not in moved:
                moved[buffer] = _on_device(buffer, device)
            setattr(owner, name, moved[buffer])
    for tensor in moved.values():
        yield tensor.data


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()


# Settings of models that change logits after the last layer, with the value that has no effect.
CHANGES_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


def load_outputs(settings: LearnerSettings, device: torch.device, head: Head, mesh: LearnerMesh) -> Outputs:
    """Load the model onto its device, sharded over all ranks; random initialization is seeded."""
    check_types(settings)
    if head is Head.VALUE and settings.adapter is not None:
        raise ValueError("a critic trains a new last layer, so it cannot be trained with an adapter; leave it out")
    torch.manual_seed(settings.seed)
    model = _load(settings, head, reads_weights=rank() == 0)
    check_mesh(model, mesh.sizes)
    if device.type == "cpu":
        for parameter in model.parameters():
            # Weights that were mapped from a file could not be freed when they are offloaded.
            parameter.data = parameter.data.clone()
    if settings.adapter is not None:
        if reads_images(model.config):
            raise ValueError("a model that reads images cannot be trained with an adapter; leave it out")
        add_adapter(model, settings.adapter, float_type(settings.weight_dtype))
    check_experts(model, mesh.sizes)
    layers = decoder_layers(model)
    # Divided layers are compiled only on request: DTensors of changing lengths are slow to trace.
    compiles_by_default = model.num_parameters() >= COMPILED_SIZE and mesh.sizes.tensor == mesh.sizes.expert == 1
    compiles = compiles_by_default if settings.compile is None else settings.compile
    recomputed = len(layers) if settings.recomputed_layers is None else settings.recomputed_layers
    for index, layer in enumerate(layers):
        # Only `forward`, inside the hooks that gather sharded weights: a recomputation must not gather them again.
        if compiles:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        # The first layers: when they are recomputed, the others have freed their activations.
        if settings.activation_checkpointing and index < recomputed:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    tensor = None if mesh.tensor is None else TensorPlan(model, mesh.tensor)
    outputs = _outputs(model, settings, head, compiles, None if tensor is None else tensor.vocabulary)
    if outputs.routers is None and (settings.router_replay or settings.router_aux_loss_coef):
        raise ValueError(
            f"{type(model).__name__} has no routers that Roost knows ({', '.join(SOFTMAX_ROUTERS)}); remove "
            "router_replay and router_aux_loss_coef"
        )
    if world_size() > 1:
        shard(outputs, layers, float_type(settings.compute_dtype), device, mesh, tensor)
    # Without dropout, so that scoring and learning compute the same log-probs.
    return outputs.to(device).eval()


def float_type(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{name!r} is not a dtype of weights; write float32, bfloat16 or float16")
    return dtype


def check_types(settings: LearnerSettings) -> None:
    """Raise ValueError for dtypes that would train badly or not at all."""
    weight, compute = float_type(settings.weight_dtype), float_type(settings.compute_dtype)
    if compute is torch.float16:
        raise ValueError("compute_dtype float16 needs loss scaling, which is not supported; write bfloat16")
    if compute is torch.float32 and weight is not torch.float32:
        raise ValueError(
            f"compute_dtype is float32, but weight_dtype is {settings.weight_dtype}; write float32 for both"
        )


def check_mesh(model: PreTrainedModel, mesh: MeshSizes) -> None:
    """Raise ValueError if the model cannot be divided over tensor and context groups."""
    if mesh.model > 1 and reads_images(model.config):
        raise ValueError("a model that reads images cannot be divided; write context and tensor sizes of 1")
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = {"heads": heads, "KV heads": key_heads, "vocabulary": config.vocab_size}
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % mesh.tensor]
    if uneven:
        raise ValueError(f"tensor size {mesh.tensor} does not divide the model's {', '.join(uneven)}")
    if not heads_divide(mesh.context, heads // mesh.tensor, key_heads // mesh.tensor):
        of_rank = f" on each of {mesh.tensor} tensor-parallel ranks" if mesh.tensor > 1 else ""
        raise ValueError(
            f"context size {mesh.context} does not divide the model's {heads // mesh.tensor} heads and "
            f"{key_heads // mesh.tensor} KV heads{of_rank}"
        )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Layers to shard and recompute one by one: the modules that transformers does not split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # fully_shard prefixes the class names of the modules that it shards.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def bare_model(settings: LearnerSettings, head: Head) -> PreTrainedModel:
    """The model that a learner of these settings trains, on the `meta` device, to compare with a checkpoint."""
    model = _load(settings, head, reads_weights=False)
    if settings.adapter is not None:
        with torch.device("meta"):
            add_adapter(model, settings.adapter, float_type(settings.weight_dtype))
    return model


def _load(settings: LearnerSettings, head: Head, reads_weights: bool) -> PreTrainedModel:
    """The model with the weights of its checkpoint, or on the `meta` device."""
    register()
    # Frozen weights need no more precision than the compute dtype.
    dtype = float_type(settings.weight_dtype if settings.adapter is None else settings.compute_dtype)
    config = AutoConfig.from_pretrained(settings.model, **({"num_labels": 1} if head is Head.VALUE else {}))
    if head is Head.VALUE and reads_images(config):
        raise ValueError("a critic reads text alone; use an estimator without a critic, such as grpo, for images")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention_of(config, NAME)}
    kind = AutoModelForTokenClassification if head is Head.VALUE else model_class(config)
    model: PreTrainedModel
    if reads_weights:
        model = kind.from_pretrained(settings.model, config=config, **options)
    else:
        with torch.device("meta"):
            model = kind.from_config(config, **options)
    if head is Head.POLICY:
        _check_logits(model)
    return model


def _check_logits(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    for name, neutral in CHANGES_LOGITS.items():
        if getattr(config, name, neutral) not in (None, neutral):
            raise ValueError(
                f"{type(model).__name__} has {name} {getattr(config, name)}: logits that are changed after the last "
                "layer are not supported"
            )


def _outputs(
    model: PreTrainedModel,
    settings: LearnerSettings,
    head: Head,
    compiles: bool,
    vocabulary: VocabularyShard | None,
) -> Outputs:
    if head is Head.VALUE:
        return ValueOutputs(model, model.base_model, model.get_submodule("score"))
    if settings.temperature <= 0:
        raise ValueError(f"samples have temperature {settings.temperature}; to learn from them, set it above 0")
    size = model.config.get_text_config().vocab_size if vocabulary is None else vocabulary.size
    return PolicyOutputs(
        model,
        model.base_model,
        model.get_output_embeddings(),
        chunk=settings.logit_tokens or max(1, LOGIT_BYTES // (4 * size)),
        temperature=settings.temperature,
        learns_entropy=settings.loss.learns_entropy,
        distillation=settings.loss.distillation,
        compiles=compiles,
        processors=_processors(model, settings),
        vocabulary=vocabulary,
    )


def _processors(model: PreTrainedModel, settings: LearnerSettings) -> LogitProcessors | None:
    ends: frozenset[int] = frozenset()
    if settings.min_new_tokens:
        try:
            # Not the model's own, which ranks that loaded it on `meta` do not have.
            generation = GenerationConfig.from_pretrained(settings.model)
        except OSError:
            generation = None
        ends = eos_ids(generation, model.config.get_text_config())
    processors = LogitProcessors(settings.repetition_penalty, settings.min_new_tokens, tuple(sorted(ends)))
    return processors if processors.changes_logits else None


# Files of a model that training does not change: tokenizer, chat template, processor, generation config.
COPIED_FILES = (
    "*token*",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "generation_config.json",
)


def export(model: PreTrainedModel, settings: LearnerSettings, folder: Path) -> None:
    """Gather the weights on all ranks and write them on the first: the whole model, or the adapter alone."""
    adapter = settings.adapter
    if adapter is None:
        export_whole(model, settings, folder)
        return
    weights = _on_first_rank(adapter_weights(model))
    _write(folder, settings, lambda: write_adapter(folder, weights, adapter, settings.model))


def export_whole(model: PreTrainedModel, settings: LearnerSettings, folder: Path) -> None:
    """Write the whole model, with the adapter merged, in the compute dtype."""
    dtype = float_type(settings.compute_dtype)
    weights = _on_first_rank(merged_weights(model), dtype)
    config = copy.deepcopy(model.config)  # save_pretrained would write the dtype of the learner's own weights in it
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each.dtype = dtype

    def write() -> None:
        model.save_pretrained(folder, state_dict=weights)
        config.architectures = model.config.architectures
        config.save_pretrained(folder)

    _write(folder, settings, write)


def _write(folder: Path, settings: LearnerSettings, write_weights: Callable[[], None]) -> None:
    """Let the first rank write, and the others wait for it; an error is raised on all."""

    def write() -> None:
        if rank() == 0:
            try:
                write_weights()
                _copy_files(settings.model, folder)
                _use_umask(folder)
            except Exception as error:
                if is_disk_full(error, folder):
                    raise disk_full(folder, "the policy") from error
                raise

    with patient_group(DISK_LIMIT_S) as group:
        results_of_ranks(write, group)


def whole_bytes(model: PreTrainedModel, settings: LearnerSettings) -> int:
    """Bytes of the model's weights without the adapter, as `export_whole` writes them."""
    named = model.state_dict(keep_vars=True).items()
    size = float_type(settings.compute_dtype).itemsize
    sizes = {
        id(weight): weight.numel() * (size if weight.is_floating_point() else weight.element_size())
        for name, weight in named
        if ADAPTER_PART not in name
    }
    return sum(sizes.values())


def _on_first_rank(gathered: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, weight in gathered:
        if rank() == 0:
            weights[name] = weight.to("cpu", dtype if weight.is_floating_point() else None).contiguous()
    return weights


def _use_umask(folder: Path) -> None:
    """Give files the mode that the umask allows: safetensors writes them readable by their owner only."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~mask)


def _copy_files(model: str, folder: Path) -> None:
    source = Path(model)
    if not source.is_dir():
        source = Path(snapshot_download(model, allow_patterns=list(COPIED_FILES)))
    for pattern in COPIED_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
