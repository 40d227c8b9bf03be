"""What vLLM's routes are sent and what they answer, as values: no calls here."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from roost.engines.errors import EngineError, NotOffered
from roost.engines.generation import Completion, Sampling, VersionSpan
from roost.engines.told_by_servers import finish, version_spans
from roost.engines.weights.parcel import (
    DeviceHandles,
    GroupInvitation,
    Manifest,
    PackedHandle,
    Parcel,
    SharedMemory,
    announced,
)

Body = dict[str, Any]


def sampling_fields(sampling: Sampling) -> Body:
    """How tokens are drawn. All of it is said, so that no default of the model's or the server's has a say."""
    fields: Body = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    return fields if sampling.seed is None else {**fields, "seed": sampling.seed}


def tokens_request(token_ids: Sequence[int], sampling: Sampling, model: str, request_id: str | None) -> Body:
    """For /inference/v1/generate."""
    body = {
        "model": model,
        "token_ids": list(token_ids),
        "sampling_params": {**sampling_fields(sampling), "logprobs": 0, "detokenize": False},
    }
    return body if request_id is None else {**body, "request_id": request_id}


def completions_request(token_ids: Sequence[int], sampling: Sampling, model: str, request_id: str | None) -> Body:
    """For /v1/completions."""
    body = {
        "model": model,
        "prompt": list(token_ids),
        **sampling_fields(sampling),
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    return body if request_id is None else {**body, "request_id": request_id}


def scored(body: Body) -> Body:
    """The same request, asked for the log-probabilities of its prompt."""
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], "prompt_logprobs": 0}}
    return {**body, "prompt_logprobs": 0}


def salted(body: Body, version: int) -> Body:
    """The same request, kept from the prefix cache of other versions, which stays as long as requests are held."""
    return {**body, "cache_salt": f"version-{version}"}


def request_names(request_id: str) -> tuple[str, ...]:
    """What a request may be called inside the server: vLLM puts the route's name before the caller's."""
    return request_id, f"generate-tokens-{request_id}", f"cmpl-{request_id}-0"


def completion(answer: Mapping[str, Any], unknown: tuple[VersionSpan, ...] | None = None) -> Completion:
    """A completion from either route; `unknown` are the version spans where the server does not tell them."""
    choice = answer["choices"][0]
    logprobs = choice.get("logprobs") or {}
    found = logprobs.get("token_logprobs")
    if found is None:
        found = [entry["logprob"] for entry in logprobs.get("content") or ()]
    spans = unknown if unknown is not None else version_spans(choice.get("weight_versions") or ())
    return Completion(tuple(choice["token_ids"] or ()), tuple(found), finish(choice["finish_reason"]), spans)


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...]:
    """The log-probability of every token of a prompt but the first."""
    told = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs") or ()
    if len(told) != len(token_ids):
        raise EngineError(f"{len(token_ids)} tokens were scored, and {len(told)} log-probabilities came back")
    return tuple(entry[str(token)]["logprob"] for entry, token in zip(told[1:], token_ids[1:], strict=True))


def group_fields(invitation: GroupInvitation, is_built_in: bool) -> Body:
    """The init_info of a process group."""
    fields = {
        "master_address": invitation.master_address,
        "master_port": invitation.master_port,
        "rank_offset": invitation.rank_offset,
        "world_size": invitation.world_size,
    }
    if is_built_in:
        return {**fields, "backend": invitation.backend, "group_name": invitation.name}
    if invitation.backend != "nccl":
        raise NotOffered(f"vLLM joins groups of nccl only, not of {invitation.backend}")
    return {**fields, "packed": False}


def manifest_fields(manifest: Manifest) -> Body:
    """What an update brings, for an engine that checks it first."""
    return {"version": manifest.version, "tensors": [[t.name, t.dtype, list(t.shape)] for t in manifest.tensors]}


def parcel_fields(parcel: Parcel, takes_shared_memory: bool, says_packed: bool = False) -> Body:
    """The update_info of a parcel; `says_packed`: the server is told here that handles are packed, not at the start."""
    fields = announced(parcel.tensors)
    if isinstance(parcel.by, SharedMemory):
        if not takes_shared_memory:
            raise NotOffered("this engine does not read weights from shared memory; send them as a checkpoint")
        return {**fields, "path": parcel.by.path}
    if isinstance(parcel.by, DeviceHandles):
        return {**fields, "ipc_handles_pickled": _pickled([dict(handle) for handle in parcel.by.handles])}
    if isinstance(parcel.by, PackedHandle):
        told = {"packed": True} if says_packed else {}
        packed = {"ipc_handles_pickled": _pickled(dict(parcel.by.handle)), "tensor_sizes": list(parcel.by.sizes)}
        return {**fields, **packed, **told}
    return fields  # the tensors follow by broadcast


def _pickled(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()


def part_query(parts: Collection[str] | None) -> list[tuple[str, str]]:
    return [("tags", str(part)) for part in parts or ()]
