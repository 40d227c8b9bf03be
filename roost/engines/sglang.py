"""Request and response formats of SGLang's routes, and `SglangEngine`, the client that calls them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roost.engines.http_calls import ServerClient, ServerFailed, all_of, finish, served_model, version_spans
from roost.engines.protocol import (
    NO_IMAGES,
    Capabilities,
    Completion,
    EngineError,
    EngineLoad,
    EngineLost,
    EngineRefused,
    Finish,
    InFlight,
    NotOffered,
    Part,
    Sampling,
    UpdateFailed,
    VersionSpan,
    listed_routes,
    unknown_logprobs,
)
from roost.engines.version_ledger import version_number
from roost.engines.weights.payload import (
    DEVICE_ARGUMENT,
    DeviceHandles,
    GroupInvitation,
    Manifest,
    PackedHandle,
    SharedMemory,
    WeightPayload,
)
from roost.vision.image import Image

Body = dict[str, Any]

SELECTOR = "target"  # the policy, not its draft model
TAGS = {Part.WEIGHTS: ("weights",), Part.KV_CACHE: ("kv_cache", "cuda_graph")}


def sampling_fields(sampling: Sampling) -> Body:
    """Sampling parameters of a request; all are set, so that no default of the model or server applies."""
    fields: Body = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "min_new_tokens": min(sampling.min_tokens, sampling.max_tokens),  # SGLang refuses more than max_new_tokens
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.json_schema is not None:
        fields["json_schema"] = sampling.json_schema
    return fields


def generate_request(token_ids: Sequence[int], sampling: Sampling, request_id: str | None, adapter: str | None) -> Body:
    """Request body for /generate."""
    body: Body = {"input_ids": list(token_ids), "sampling_params": sampling_fields(sampling)}
    body["return_logprob"] = sampling.logprobs
    if request_id is not None:
        body["rid"] = request_id
    if adapter is not None:
        body["lora_path"] = adapter
    return body


def score_request(token_ids: Sequence[int], adapter: str | None) -> Body:
    """Request body for /generate that generates nothing and scores all tokens without the prefix cache."""
    body = generate_request(token_ids, Sampling(), None, adapter)
    body["sampling_params"]["max_new_tokens"] = 0
    return {**body, "logprob_start_len": 0}


def completion(
    answer: Mapping[str, Any], spans: tuple[VersionSpan, ...] | None, has_logprobs: bool = True
) -> Completion:
    """Parse a completion; `spans` are the version spans if the server does not report them."""
    reply = answer["meta_info"]
    token_ids = tuple(answer.get("output_ids") or ())
    if spans is None:
        spans = version_spans(reply["weight_versions"])
    logprobs = tuple(entry[0] for entry in reply.get("output_token_logprobs") or ())
    if not has_logprobs:
        logprobs = unknown_logprobs(len(token_ids))
    return Completion(token_ids, logprobs, _finish(reply.get("finish_reason")), spans)


def reports_versions(answer: Mapping[str, Any]) -> bool:
    return "weight_versions" in answer["meta_info"]


def _finish(reason: Mapping[str, Any] | None) -> Finish:
    return finish(None if reason is None else reason.get("type"))


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probs of all prompt tokens but the first."""
    reply = answer["meta_info"].get("input_token_logprobs") or ()
    if [entry[1] for entry in reply] != list(token_ids):
        raise EngineError(
            f"{len(token_ids)} tokens were scored, and log-probabilities of {len(reply)} other tokens came back"
        )
    return tuple(entry[0] for entry in reply[1:])


def load_of(loads: Mapping[str, Any]) -> EngineLoad:
    """Load of a server, from /v1/loads: the sum over its ranks, and the fullest KV cache.

    >>> load_of({"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}]})
    EngineLoad(running=3, waiting=1, kv_usage=0.5)
    """
    used = [load["token_usage"] for load in loads["loads"] if load.get("token_usage") is not None]
    running, waiting = (
        sum(load.get(name, 0) for load in loads["loads"]) for name in ("num_running_reqs", "num_waiting_reqs")
    )
    return EngineLoad(running, waiting, max(used, default=None))


def memory_tags(parts: Iterable[Part]) -> set[str]:
    """SGLang's memory tags of these parts.

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


def payload_request(payload: WeightPayload, group: str | None, flush_cache: bool) -> tuple[str, Body]:
    """Route and request body for a payload."""
    fields: Body = {"selector": SELECTOR, "flush_cache": flush_cache, "abort_all_requests": False}
    names = [tensor.name for tensor in payload.tensors]
    if isinstance(payload.by, SharedMemory):
        raise NotOffered("SGLang does not read weights from shared memory; send them as a checkpoint")
    if isinstance(payload.by, PackedHandle):
        raise NotOffered("SGLang does not read packed handles; send live ones (LiveDeviceCarrier)")
    if isinstance(payload.by, DeviceHandles):
        tensors = payloads(names, payload.by.handles)
        return "/update_weights_from_tensor", {**fields, "serialized_named_tensors": tensors}
    if group is None:
        raise NotOffered("this engine has not joined a broadcast group; call join_group first")
    dtypes = [tensor.dtype for tensor in payload.tensors]
    shapes = [list(tensor.shape) for tensor in payload.tensors]
    named: Body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
    return "/update_weights_from_distributed", {**fields, **named}


def payloads(names: Sequence[str], handles: Sequence[Mapping[str, tuple[object, ...]]]) -> list[str]:
    """One message per device, in the order of the handles' UUIDs, which is that of the tensor-parallel ranks."""
    named = list(zip(names, handles, strict=True))
    for_each = [[(name, _SharedTensor(uuid, handle[uuid])) for name, handle in named] for uuid in handles[0]]
    return [base64.b64encode(pickle.dumps(tensors)).decode() for tensors in for_each]


class _SharedTensor:
    """Pickles like a torch tensor shared with another process: as a call that rebuilds it."""

    def __init__(self, uuid: str, arguments: tuple[object, ...]) -> None:
        changed = list(arguments)
        changed[DEVICE_ARGUMENT] = uuid  # SGLang accepts it in place of an index
        self._arguments = tuple(changed)

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor, self._arguments


def checksums(answer: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints by name; with several ranks, each rank's part has its own name."""
    ranks: list[Mapping[str, Any]] = answer.get("ranks") or []
    if len(ranks) == 1:
        return dict(ranks[0]["checksums"])
    return {
        f"rank {number}: {name}": digest
        for number, rank in enumerate(ranks)
        for name, digest in rank["checksums"].items()
    }


# SGLang has no drain mode, so the client waits until idle. "retract" then requeues requests that arrived meanwhile.
PAUSE_MODES = {InFlight.DROP: "abort", InFlight.DRAIN: "retract", InFlight.HOLD: "in_place"}
LOOK_EVERY_S = 0.1
SPANS_SINCE = (0, 5, 23)  # first release known to report version spans; servers do not advertise them


class SglangEngine(ServerClient):
    """Client of an SGLang server."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._is_open = asyncio.Event()  # cleared while the engine drains: new requests wait
        self._is_open.set()
        self._running = 0
        self._paused: InFlight | None = None
        self._released: set[str] = set()  # memory tags to restore on wake
        self._group: str | None = None

    async def alive(self, is_changing: bool = False) -> bool:
        # /health generates a token, which a paused engine does not. /server_info needs the scheduler, which does not
        # answer while it loads weights; /v1/models is answered without it.
        route = "/v1/models" if is_changing else "/server_info"
        return await self._calls.status("GET", route, limit_s=self._limits.health) == 200

    # Generation

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str | None = None, adapter: str | None = None
    ) -> Completion:
        if sampling.images:
            raise EngineRefused(NO_IMAGES)
        known = await self.capabilities()
        # SGLang refuses max_tokens beyond the context length.
        fitting = replace(sampling, max_tokens=known.room_for(len(token_ids), sampling.max_tokens))
        body = generate_request(token_ids, fitting, request_id, adapter)
        about = f"a prompt of {len(token_ids)} tokens, at most {sampling.max_tokens} more"
        await self._admission()
        with self._versions.request() as ticket:
            with known.refusing(len(token_ids)):
                answer = await self._ask(body, about)
            if reports_versions(answer):
                return completion(answer, None, sampling.logprobs)
            spans = self._versions.spans(ticket, len(answer.get("output_ids") or ()))
            return completion(answer, spans, sampling.logprobs)

    async def generate_n(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, adapter: str | None = None
    ) -> tuple[Completion, ...]:
        # SGLang's own `n` gives every completion the same seed.
        calls = [self.generate(token_ids, sampling.nth(index), adapter=adapter) for index in range(n)]
        return tuple(await all_of(calls))

    async def score(
        self, token_ids: Sequence[int], adapter: str | None = None, images: tuple[Image, ...] = ()
    ) -> tuple[float, ...]:
        if images:
            raise EngineRefused(NO_IMAGES)
        await self._admission()
        answer = await self._ask(score_request(token_ids, adapter), f"the score of {len(token_ids)} tokens")
        return prompt_logprobs(answer, token_ids)

    async def _admission(self) -> None:
        try:
            async with asyncio.timeout(self._limits.generate):
                while not self._is_open.is_set():  # it may be cleared again before this task runs
                    await self._is_open.wait()
        except TimeoutError:
            raise EngineLost(f"{self.url} drained for {self._limits.generate:g} s and took no new request") from None

    async def _ask(self, body: Any, about: str) -> Any:
        self._running += 1
        try:
            return await self._calls.post(
                "/generate", body, limit_s=self._limits.generate, is_idempotent=True, about=about
            )
        finally:
            self._running -= 1

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        if request_ids is None:
            await self._order("/abort_request", {"abort_all": True}, is_idempotent=True)
            return
        for request_id in request_ids:
            await self._order("/abort_request", {"rid": request_id}, is_idempotent=True)

    # Pausing and memory

    async def pause(self, in_flight: InFlight) -> None:
        if in_flight is InFlight.DRAIN:
            self._is_open.clear()
        try:
            if in_flight is InFlight.DRAIN and self._paused in (None, InFlight.HOLD):
                await self._drained()
            mode = {"mode": PAUSE_MODES[in_flight]}
            await self._calls.post("/pause_generation", mode, limit_s=self._limits.drain)
        finally:
            self._is_open.set()
        self._paused = in_flight
        self._versions.paused(in_flight)

    async def _drained(self) -> None:
        """Wait until no request runs, of this client or of others."""
        if self._paused is InFlight.HOLD:
            await self.resume()  # held requests do not finish
        counts_others = (await self.capabilities()).has("/v1/loads")
        try:
            async with asyncio.timeout(self._limits.drain):
                while self._running or (counts_others and await self._in_flight()):
                    await self._sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise EngineLost(
                f"{self.url} did not become idle within {self._limits.drain:g} s; {self._running} requests still run"
            ) from None

    async def _in_flight(self) -> int:
        """Running and waiting requests of all clients."""
        load = load_of(await self._calls.get("/v1/loads", limit_s=self._limits.answer))
        return load.running + load.waiting

    async def load(self) -> EngineLoad | None:
        if not (await self.capabilities()).has("/v1/loads"):
            return None
        return load_of(await self._calls.get("/v1/loads", limit_s=self._limits.answer))

    async def resume(self) -> None:
        self._versions.resumed()
        await self._order("/continue_generation", {})
        self._paused = None

    async def sleep(self, level: int) -> None:
        known = await self.capabilities()
        if not known.can_sleep:
            raise NotOffered(
                "this server cannot free its memory: start it with --enable-memory-saver, or stop it instead"
            )
        if level < 2 and not known.keeps_weights_asleep:
            raise NotOffered(
                "this server drops its weights asleep: start it with --enable-weights-cpu-backup, or use level 2"
            )
        if self._paused in (None, InFlight.HOLD):
            await self.pause(InFlight.DROP)  # a server that is not idle would crash
        await self._memory("/release_memory_occupation", memory_tags(Part) - self._released)
        self._released = memory_tags(Part)

    async def wake(self, parts: Collection[Part] | None = None) -> None:
        tags = memory_tags(Part if parts is None else parts) & self._released
        if not tags:
            return
        await self._memory("/resume_memory_occupation", tags)
        self._released -= tags
        if not self._released:
            await self.resume()

    async def _memory(self, path: str, tags: set[str]) -> None:
        if tags:
            await self._calls.post(path, {"tags": sorted(tags)}, limit_s=self._limits.memory)

    async def reset_cache(self) -> None:
        for _ in range(max(1, round(self._limits.cache / LOOK_EVERY_S))):
            try:
                await self._order("/flush_cache", {}, is_idempotent=True)
                return
            except EngineRefused as error:
                refusal = error
            await self._sleep(LOOK_EVERY_S)
        raise EngineError(f"{self.url} could not flush its cache within {self._limits.cache:g} s: {refusal}")

    # Versions and weights

    async def version(self) -> int:
        reply = await self._calls.get("/model_info", limit_s=self._limits.answer)
        return version_number(reply.get("weight_version"))

    async def set_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._order("/update_weight_version", body, is_idempotent=True)
        self._versions.moved_to(version)

    async def join_group(self, invitation: GroupInvitation) -> None:
        body = group_fields(invitation)
        await self._calls.post("/init_weights_update_group", body, limit_s=self._limits.join)
        self._group = invitation.name

    async def leave_group(self) -> None:
        if self._group is not None:
            await self._order("/destroy_weights_update_group", {"group_name": self._group})
        self._group = None

    async def start_update(self, manifest: Manifest) -> None:
        self._has_written = False
        await self._update("/begin_weight_update", {"selector": SELECTOR})

    async def take(self, payload: WeightPayload) -> None:
        route, body = payload_request(payload, self._group, flush_cache=payload.is_last and self._can_flush)
        self._has_written = True
        await self._update(route, body, flushes=body["flush_cache"])

    async def finish_update(self, version: int) -> None:
        await self._update("/end_weight_update", {})
        await self.set_version(version)

    async def abandon_update(self) -> None:
        await self._order("/end_weight_update", {})  # else no other update could begin
        raise NotOffered(f"SGLang cannot restore its previous weights: {self._state_of_weights()}")

    async def load_checkpoint(self, path: str, version: int) -> None:
        self._has_written = True
        body = {"model_path": path, "weight_version": str(version), "flush_cache": self._can_flush}
        await self._update("/update_weights_from_disk", body, self._can_flush, self._limits.checkpoint)
        self._versions.moved_to(version)

    async def load_adapter(self, name: str, path: str) -> None:
        with contextlib.suppress(EngineRefused):  # no adapter has this name
            await self.unload_adapter(name)  # SGLang refuses to replace an adapter
        body = {"lora_name": name, "lora_path": path}
        await self._calls.post("/load_lora_adapter", body, limit_s=self._limits.checkpoint, about=f"adapter {name}")

    async def unload_adapter(self, name: str) -> None:
        await self._order("/unload_lora_adapter", {"lora_name": name})

    async def fingerprints(self) -> dict[str, str]:
        body = {"action": "checksum"}
        return checksums(
            await self._calls.post("/weights_checker", body, limit_s=self._limits.update, is_idempotent=True)
        )

    @property
    def _can_flush(self) -> bool:
        """False while requests are held: they use the cache, and flushing it fails."""
        return self._paused is not InFlight.HOLD

    async def _update(self, path: str, body: Any, flushes: bool = False, limit_s: float | None = None) -> None:
        """POST a step of an update; a server that fails it is not lost, but its weights may be."""
        try:
            answer = await self._calls.post(path, body, limit_s=limit_s or self._limits.update)
        except (EngineRefused, ServerFailed) as error:
            raise UpdateFailed(f"{error}; {self._state_of_weights(flushes)}") from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpdateFailed(f"{self.url}{path}: {answer.get('message')}; {self._state_of_weights(flushes)}")

    def _state_of_weights(self, flushes: bool = False) -> str:
        version = self._versions.version
        if not self._has_written:
            return f"the engine is still on version {version}"
        if flushes:
            return (
                f"the engine was on version {version}; it may have the new weights and a cache of the old ones, as "
                "SGLang reports an update as failed if it could not flush the cache: update it again while it is idle, "
                "or restart it"
            )
        return (
            f"the engine was on version {version} and may have parts of both versions now: update it again, or "
            "restart it"
        )

    async def _probe(self) -> Capabilities:
        limit = self._limits.answer
        routes = listed_routes(await self._calls.get("/openapi.json", limit_s=limit))
        reply = await self._calls.get("/server_info", limit_s=limit)
        model = served_model(await self._calls.get("/v1/models", limit_s=limit))
        return Capabilities(
            routes,
            can_sleep=bool(reply.get("enable_memory_saver", self._sleeps)),
            takes_adapters=bool(reply.get("enable_lora")),
            reports_versions=_release(reply.get("version", "")) >= SPANS_SINCE,
            keeps_weights_asleep=bool(reply.get("enable_weights_cpu_backup")),
            takes_tokens=True,
            model=model["id"],
            max_context=model.get("max_model_len"),
        )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release.

    >>> _release("0.5.23.post1")
    (0, 5, 23)
    """
    numbers = itertools.takewhile(str.isdigit, version.split("."))
    return tuple(map(int, numbers))
