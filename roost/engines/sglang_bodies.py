"""What SGLang's routes are sent and what they answer, as values: no calls here."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roost.engines.errors import EngineError, NotOffered
from roost.engines.generation import Completion, Finish, Sampling, VersionSpan
from roost.engines.protocol import Part
from roost.engines.told_by_servers import finish, version_spans
from roost.engines.weights.parcel import (
    DEVICE_ARGUMENT,
    DeviceHandles,
    GroupInvitation,
    PackedHandle,
    Parcel,
    SharedMemory,
)

Body = dict[str, Any]

SELECTOR = "target"  # the policy, not a draft model beside it
TAGS = {Part.WEIGHTS: ("weights",), Part.KV_CACHE: ("kv_cache", "cuda_graph")}


def sampling_fields(sampling: Sampling) -> Body:
    """How tokens are drawn. All of it is said, so that no default of the model's or the server's has a say."""
    fields: Body = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return fields if sampling.seed is None else {**fields, "sampling_seed": sampling.seed}


def generate_request(token_ids: Sequence[int], sampling: Sampling, request_id: str | None, adapter: str | None) -> Body:
    """For /generate."""
    body: Body = {"input_ids": list(token_ids), "sampling_params": sampling_fields(sampling), "return_logprob": True}
    if request_id is not None:
        body["rid"] = request_id
    if adapter is not None:
        body["lora_path"] = adapter
    return body


def score_request(token_ids: Sequence[int], adapter: str | None) -> Body:
    """For /generate: nothing is made, and from token 0 on nothing is taken from the prefix cache."""
    body = generate_request(token_ids, Sampling(), None, adapter)
    body["sampling_params"]["max_new_tokens"] = 0
    return {**body, "logprob_start_len": 0}


def completion(answer: Mapping[str, Any], unknown: tuple[VersionSpan, ...] | None) -> Completion:
    """A completion; `unknown` are the version spans where the server does not tell them."""
    told = answer["meta_info"]
    token_ids = tuple(answer.get("output_ids") or ())
    spans = unknown if unknown is not None else version_spans(told["weight_versions"])
    logprobs = tuple(entry[0] for entry in told.get("output_token_logprobs") or ())
    return Completion(token_ids, logprobs, _finish(told.get("finish_reason")), spans)


def tells_spans(answer: Mapping[str, Any]) -> bool:
    return "weight_versions" in answer["meta_info"]


def _finish(reason: Mapping[str, Any] | None) -> Finish:
    return finish(None if reason is None else reason.get("type"))


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...]:
    """The log-probability of every token of a prompt but the first."""
    told = answer["meta_info"].get("input_token_logprobs") or ()
    if [entry[1] for entry in told] != list(token_ids):
        raise EngineError(f"{len(token_ids)} tokens were scored, and log-probabilities of {len(told)} others came back")
    return tuple(entry[0] for entry in told[1:])


def requests_at_work(loads: Mapping[str, Any]) -> int:
    """How many requests run or wait, from /v1/loads."""
    return sum(load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0) for load in loads["loads"])


def memory_tags(parts: Iterable[Part]) -> set[str]:
    """What SGLang calls the parts of its memory.

    >>> sorted(memory_tags([Part.KV_CACHE]))
    ['cuda_graph', 'kv_cache']
    """
    return {tag for part in parts for tag in TAGS[part]}


def group_fields(invitation: GroupInvitation) -> Body:
    return {
        "master_address": invitation.master_address,
        "master_port": invitation.master_port,
        "rank_offset": invitation.rank_offset,
        "world_size": invitation.world_size,
        "group_name": invitation.name,
        "backend": invitation.backend,
    }


def parcel_request(parcel: Parcel, group: str | None, flush_cache: bool) -> tuple[str, Body]:
    """The route a parcel goes to, and its body."""
    fields: Body = {"selector": SELECTOR, "flush_cache": flush_cache, "abort_all_requests": False}
    names = [tensor.name for tensor in parcel.tensors]
    if isinstance(parcel.by, SharedMemory):
        raise NotOffered("SGLang does not read weights from shared memory; send them as a checkpoint")
    if isinstance(parcel.by, PackedHandle):
        raise NotOffered("SGLang does not read packed handles; send live ones (LiveDeviceCarrier)")
    if isinstance(parcel.by, DeviceHandles):
        tensors = payloads(names, parcel.by.handles)
        return "/update_weights_from_tensor", {**fields, "serialized_named_tensors": tensors}
    if group is None:
        raise NotOffered("this engine has joined no group that weights could be broadcast in; join one first")
    dtypes = [tensor.dtype for tensor in parcel.tensors]
    shapes = [list(tensor.shape) for tensor in parcel.tensors]
    named: Body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
    return "/update_weights_from_distributed", {**fields, **named}


def payloads(names: Sequence[str], handles: Sequence[Mapping[str, tuple[object, ...]]]) -> list[str]:
    """One message for each device, in the order of the handles' UUIDs, which is that of the tensor-parallel ranks."""
    named = list(zip(names, handles, strict=True))
    for_each = [[(name, _SharedTensor(uuid, handle[uuid])) for name, handle in named] for uuid in handles[0]]
    return [base64.b64encode(pickle.dumps(tensors)).decode() for tensors in for_each]


class _SharedTensor:
    """Pickled, this is what torch writes for a tensor that another process is to open: a call that rebuilds it."""

    def __init__(self, uuid: str, arguments: tuple[object, ...]) -> None:
        changed = list(arguments)
        changed[DEVICE_ARGUMENT] = uuid  # which SGLang takes as well as a number
        self._arguments = tuple(changed)

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor, self._arguments


def checksums(answer: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints by name; where several ranks have parts of a tensor, each under its own name."""
    ranks: list[Mapping[str, Any]] = answer.get("ranks") or []
    if len(ranks) == 1:
        return dict(ranks[0]["checksums"])
    return {
        f"rank {number}: {name}": digest
        for number, rank in enumerate(ranks)
        for name, digest in rank["checksums"].items()
    }
