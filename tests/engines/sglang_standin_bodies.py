"""The bodies that SGLang's routes take, as its documentation has them; a field too many is refused."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Generate(BaseModel, extra="forbid"):
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = False
    logprob_start_len: int = -1
    rid: str | None = None
    lora_path: str | None = None


class Pause(BaseModel, extra="forbid"):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Tags(BaseModel, extra="forbid"):
    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


class Begin(BaseModel, extra="forbid"):
    selector: Literal["target", "draft", "all"] = "all"


class Update(BaseModel, extra="forbid"):
    selector: Literal["target", "draft", "all"] = "all"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class FromTensor(Update):
    serialized_named_tensors: list[str]


class FromDistributed(Update):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class FromDisk(BaseModel, extra="forbid"):
    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class Group(BaseModel, extra="forbid"):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class Version(BaseModel, extra="forbid"):
    new_version: str
    abort_all_requests: bool = True


class Abort(BaseModel, extra="forbid"):
    rid: str = ""
    abort_all: bool = False


class Adapter(BaseModel, extra="forbid"):
    lora_name: str
    lora_path: str = ""
    pinned: bool = False
