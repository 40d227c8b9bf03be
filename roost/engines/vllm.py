"""Request and response formats of vLLM's routes, and `VllmEngine`, the client that calls them."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any

from roost.engines.http_calls import ServerClient, ServerFailed, all_of, finish, served_model, version_spans
from roost.engines.protocol import (
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
    SamplingMasks,
    UpdateFailed,
    VersionSpan,
    listed_routes,
    request_fields,
    unknown_logprobs,
)
from roost.engines.version_ledger import version_number
from roost.engines.vllm_images import IMAGE_FIELD, IMAGES_NEED, TOKEN_REQUEST, check_prompt, with_images
from roost.engines.weights.payload import (
    DeviceHandles,
    GroupInvitation,
    Manifest,
    PackedHandle,
    SharedMemory,
    WeightPayload,
    announced,
)
from roost.net.routing import decode_routing
from roost.vision.image import Image

Body = dict[str, Any]


def sampling_fields(sampling: Sampling, n: int = 1) -> Body:
    """Sampling parameters of a request; all are set, so that no default of the model or server applies."""
    fields: Body = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": min(sampling.min_tokens, sampling.max_tokens),  # vLLM refuses more than max_tokens
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if n > 1:
        fields["n"] = n
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.json_schema is not None:
        fields["structured_outputs"] = {"json": json.loads(sampling.json_schema)}
    return fields


def tokens_request(
    token_ids: Sequence[int], sampling: Sampling, model: str, request_id: str | None, n: int = 1
) -> Body:
    """Request body for /inference/v1/generate."""
    body: Body = {
        "model": model,
        "token_ids": list(token_ids),
        # Stop strings are found in text, which needs detokenization.
        "sampling_params": {**sampling_fields(sampling, n), "detokenize": bool(sampling.stop)},
    }
    if sampling.logprobs:
        body["sampling_params"]["logprobs"] = 0  # of the sampled token only
    return body if request_id is None else {**body, "request_id": request_id}


def completions_request(
    token_ids: Sequence[int], sampling: Sampling, model: str, request_id: str | None, n: int = 1
) -> Body:
    """Request body for /v1/completions."""
    body = {
        "model": model,
        "prompt": list(token_ids),
        **sampling_fields(sampling, n),
        "logprobs": 1 if sampling.logprobs else None,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    return body if request_id is None else {**body, "request_id": request_id}


def with_prompt_logprobs(body: Body) -> Body:
    """The request with log-probs of its prompt enabled."""
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], "prompt_logprobs": 0}}
    return {**body, "prompt_logprobs": 0}


def salted(body: Body, version: int) -> Body:
    """The request with a cache salt per version: the prefix cache is not reset while requests are held."""
    return {**body, "cache_salt": f"version-{version}"}


def request_names(request_id: str) -> tuple[str, ...]:
    """Possible ids of a request inside the server: vLLM prepends the route's name."""
    return request_id, f"generate-tokens-{request_id}", f"cmpl-{request_id}-0"


def completion(
    choice: Mapping[str, Any], spans: tuple[VersionSpan, ...] | None = None, sampling: Sampling = Sampling()
) -> Completion:
    """Parse a choice of either route; `spans` are the version spans if the server does not report them."""
    token_ids = tuple(choice["token_ids"] or ())
    logprobs = choice.get("logprobs") or {}
    found = logprobs.get("token_logprobs")
    if found is None:
        found = [entry["logprob"] for entry in logprobs.get("content") or ()]
    if not sampling.logprobs:
        found = unknown_logprobs(len(token_ids))
    if spans is None:
        spans = version_spans(choice.get("weight_versions") or ())
    masks = None
    if sampling.wants_mask:
        if (given := choice.get("sampling_mask")) is None:
            raise EngineError(NO_MASK)
        masks = SamplingMasks.of(given)
    given = choice.get("routed_experts") if sampling.return_routed_experts else None
    end = finish(choice["finish_reason"])
    if sampling.return_routed_experts and given is None and end is not Finish.ABORT:
        raise EngineError(NO_ROUTING)
    return Completion(token_ids, tuple(found), end, spans, masks, None if given is None else decode_routing(given))


def prompt_logprobs(answer: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probs of all prompt tokens but the first."""
    reply = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs") or ()
    if len(reply) != len(token_ids):
        raise EngineError(f"{len(token_ids)} tokens were scored, and {len(reply)} log-probabilities came back")
    return tuple(entry[str(token)]["logprob"] for entry, token in zip(reply[1:], token_ids[1:], strict=True))


def _release(version: Any) -> tuple[int, ...]:
    """Major and minor number of a release; (0, 0) if it is unknown.

    >>> _release("0.32.1rc1"), _release("0.22.0+cpu"), _release("dev"), _release(None)
    ((0, 32), (0, 22), (0, 0), (0, 0))
    """
    found = re.match(r"(\d+)\.(\d+)", str(version))
    return tuple(map(int, found.groups())) if found else (0, 0)


def group_fields(invitation: GroupInvitation, is_built_in: bool) -> Body:
    """init_info of a process group."""
    fields = {
        "master_address": invitation.master_address,
        "master_port": invitation.master_port,
        "rank_offset": invitation.rank_offset,
        "world_size": invitation.world_size,
    }
    if is_built_in:
        return {**fields, "backend": invitation.backend, "group_name": invitation.name}
    if invitation.backend != "nccl":
        raise NotOffered(f"vLLM joins process groups of nccl only, not of {invitation.backend}")
    return {**fields, "packed": False}


def manifest_fields(manifest: Manifest) -> Body:
    """Manifest of an update, in the format of the built-in engine."""
    return {"version": manifest.version, "tensors": [[t.name, t.dtype, list(t.shape)] for t in manifest.tensors]}


def payload_fields(payload: WeightPayload, takes_shared_memory: bool, with_packed_flag: bool = False) -> Body:
    """update_info of a payload; `with_packed_flag`: the server takes it here, not at the start of an update."""
    fields = announced(payload.tensors)
    if isinstance(payload.by, SharedMemory):
        if not takes_shared_memory:
            raise NotOffered("this engine does not read weights from shared memory; send them as a checkpoint")
        return {**fields, "path": payload.by.path}
    if isinstance(payload.by, DeviceHandles):
        return {**fields, "ipc_handles_pickled": _pickled([dict(handle) for handle in payload.by.handles])}
    if isinstance(payload.by, PackedHandle):
        flag = {"packed": True} if with_packed_flag else {}
        packed = {"ipc_handles_pickled": _pickled(dict(payload.by.handle)), "tensor_sizes": list(payload.by.sizes)}
        return {**fields, **packed, **flag}
    return fields  # the tensors are broadcast


def _pickled(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()


def part_query(parts: Collection[str] | None) -> list[tuple[str, str]]:
    return [("tags", str(part)) for part in parts or ()]


TOKEN_ROUTE = "/inference/v1/generate"
FULL_N = (0, 32)  # earlier releases may return fewer than `n` completions on that route
CORE_ROUTE = "/is_sleeping"  # answered by the engine core process, between two steps
PAUSE_MODES = {InFlight.DROP: "abort", InFlight.DRAIN: "wait", InFlight.HOLD: "keep"}
CACHE_WAIT_S = 0.25
VLLM_RUNNING, VLLM_WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
VLLM_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second in releases before 0.10
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1"
NO_MASK = (
    "the server returned no sampling mask, which sampling_mask_replay needs; use the built-in engine (engine: torch)"
)
NO_ROUTING = (
    "the server returned no routed experts, which router_replay needs; start vLLM 0.32 or later with "
    "--enable-return-routed-experts, or use the built-in engine (engine: torch)"
)
NO_GUIDANCE = (
    "the built-in engine has no guided decoding for JSON schemas; ask for JSON in a message, or use vllm or sglang as "
    "train.engine"
)
TRANSFER = "start a newer vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config, or load a checkpoint instead"


def built_in_load(answer: Mapping[str, int]) -> EngineLoad:
    """Load of the built-in engine, from /load."""
    free, blocks = answer["free_blocks"], answer["num_blocks"]
    return EngineLoad(answer["running"], answer["waiting"], 1 - free / blocks if blocks else None)


def vllm_load(metrics: str) -> EngineLoad | None:
    """Load of a vLLM server, from the text of /metrics: the sum over its engines, and the fullest KV cache.

    >>> vllm_load('vllm:num_requests_running{engine="0"} 3.0\\nvllm:kv_cache_usage_perc{engine="0"} 0.5\\n')
    EngineLoad(running=3, waiting=0, kv_usage=0.5)
    """
    found: dict[str, list[float]] = {}
    for line in metrics.splitlines():
        name, _, rest = line.partition("{")
        if name in (VLLM_RUNNING, VLLM_WAITING, *VLLM_KV):
            found.setdefault(name, []).append(float(rest.rpartition(" ")[2]))
    if VLLM_RUNNING not in found:
        return None
    used = [value for name in VLLM_KV for value in found.get(name, ())]
    running, waiting = (int(sum(found.get(name, ()))) for name in (VLLM_RUNNING, VLLM_WAITING))
    return EngineLoad(running, waiting, max(used, default=None))


class VllmEngine(ServerClient):
    """Client of a vLLM server or of the built-in engine."""

    _can_receive = False  # weight transfer is initialized on the server
    _is_packed = False  # and for packed handles
    _step: asyncio.Task[int | None] | None = None  # a call that is answered when the engine's current step has ended

    async def alive(self, is_changing: bool = False) -> bool:
        is_healthy = await self._calls.status("GET", "/health", limit_s=self._limits.health) == 200
        if is_changing:  # loading weights is one long step
            self._forget_step()
            return is_healthy
        return is_healthy and self._steps_end()

    async def load(self) -> EngineLoad | None:
        if (await self.capabilities()).is_built_in:
            return built_in_load(await self._calls.get("/load", limit_s=self._limits.answer))
        text = await self._calls.get("/metrics", limit_s=self._limits.answer)
        return vllm_load(text) if isinstance(text, str) else None

    def _steps_end(self) -> bool:
        """Return False if the engine core process hangs, which vLLM's /health does not show.

        One call to it is always pending; if it gets no answer within the step limit, the engine hangs.
        """
        known = self._known
        if known is None or known.is_built_in or not known.has(CORE_ROUTE):
            return True  # the built-in engine reports a hung step by its /health
        if self._step is None or (self._step.done() and self._step.result() is not None):
            self._step = asyncio.create_task(self._calls.status("GET", CORE_ROUTE, limit_s=self._limits.step))
        return not self._step.done()

    def _forget_step(self) -> None:
        if self._step is not None:
            self._step.cancel()
        self._step = None

    async def close(self) -> None:
        self._forget_step()
        await super().close()

    # Generation

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str | None = None, adapter: str | None = None
    ) -> Completion:
        return (await self._generate(token_ids, sampling, 1, request_id, adapter))[0]

    async def generate_n(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, adapter: str | None = None
    ) -> tuple[Completion, ...]:
        if (await self.capabilities()).takes_n:
            with suppress(EngineRefused):  # of more than `max_num_seqs`, for example
                return await self._generate(token_ids, sampling, n, None, adapter)
        calls = [self.generate(token_ids, sampling.nth(index), adapter=adapter) for index in range(n)]
        return tuple(await all_of(calls))

    async def _generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, request_id: str | None, adapter: str | None
    ) -> tuple[Completion, ...]:
        known = await self.capabilities()
        with self._versions.request() as ticket:
            answer = await self._ask(known, token_ids, sampling, request_id, adapter, n)
            choices = sorted(answer["choices"], key=itemgetter("index"))
            if len(choices) != n:
                raise EngineError(f"{self.url}: {n} completions were requested, {len(choices)} came back")
            if known.reports_versions:
                return tuple(completion(choice, sampling=sampling) for choice in choices)
            counts = [len(choice["token_ids"] or ()) for choice in choices]
            return tuple(
                completion(choice, self._versions.spans(ticket, count), sampling)
                for choice, count in zip(choices, counts, strict=True)
            )

    async def score(
        self, token_ids: Sequence[int], adapter: str | None = None, images: tuple[Image, ...] = ()
    ) -> tuple[float, ...]:
        known = await self.capabilities()
        sampling = Sampling(max_tokens=1, images=images)
        answer = await self._ask(known, token_ids, sampling, None, adapter, is_scored=True)
        return prompt_logprobs(answer, token_ids)

    async def _ask(
        self,
        known: Capabilities,
        token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str | None,
        adapter: str | None,
        n: int = 1,
        is_scored: bool = False,
    ) -> Any:
        model = adapter or known.model
        if sampling.json_schema is not None and known.is_built_in:
            raise EngineRefused(NO_GUIDANCE)
        if sampling.images and not known.takes_images:
            raise EngineRefused(IMAGES_NEED)
        if known.takes_tokens:
            route, body = TOKEN_ROUTE, tokens_request(token_ids, sampling, model, request_id, n)
            if sampling.wants_mask:
                body["return_sampling_mask"] = True
            if sampling.images and known.is_built_in:
                body["images"] = [{"url": image.data_url, "start": image.start} for image in sampling.images]
            elif sampling.images:
                body = with_images(body, sampling.images, f"{self._versions.version}-{self._versions.changes}")
            if sampling.return_routed_experts and known.is_built_in:  # an option of the server in vLLM
                body["return_routed_experts"] = True
        else:
            # This route refuses a max_tokens beyond the context length; the other one stops at it.
            fitting = replace(sampling, max_tokens=known.room_for(len(token_ids), sampling.max_tokens))
            route, body = "/v1/completions", completions_request(token_ids, fitting, model, request_id, n)
        if is_scored:
            body = with_prompt_logprobs(body)
        if known.has("/weight_info") and not known.is_built_in:  # the built-in engine separates versions itself
            body = salted(body, self._versions.version)
        about = f"a prompt of {len(token_ids)} tokens, at most {sampling.max_tokens} more"
        with known.refusing(len(token_ids)):
            answer = await self._calls.post(route, body, limit_s=self._limits.generate, is_idempotent=True, about=about)
        if sampling.images and not known.is_built_in:
            check_prompt(answer.get("prompt_token_ids"), token_ids)
        return answer

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        known = await self.capabilities()
        if request_ids is not None and not request_ids:
            return  # an empty list would abort all
        if known.has("/abort_requests"):
            names = [name for request_id in request_ids or () for name in request_names(request_id)]
            await self._order("/abort_requests", {"request_ids": names}, is_idempotent=True)
        elif request_ids is None:
            await self._abort_by_pausing()
        else:
            raise NotOffered("this server has no /abort_requests: abort all requests, or cancel their calls")

    async def _abort_by_pausing(self) -> None:
        was_paused = (await self._calls.get("/is_paused", limit_s=self._limits.answer))["is_paused"]
        await self.pause(InFlight.DROP)
        if not was_paused:
            await self.resume()

    # Pausing and memory

    async def pause(self, in_flight: InFlight) -> None:
        (await self.capabilities()).require("/pause", DEV_MODE)
        limit = self._limits.drain if in_flight is InFlight.DRAIN else self._limits.answer
        await self._calls.post("/pause", limit_s=limit, query=[("mode", PAUSE_MODES[in_flight])])
        self._versions.paused(in_flight)

    async def resume(self) -> None:
        (await self.capabilities()).require("/resume", DEV_MODE)
        self._versions.resumed()
        await self._order("/resume")

    async def sleep(self, level: int) -> None:
        """Free device memory; requests in flight are aborted, so pause with drain first to finish them."""
        if not (await self.capabilities()).can_sleep:
            raise NotOffered(
                "this server cannot free its memory: start it with --enable-sleep-mode, or stop it instead"
            )
        query = [("level", str(level)), ("mode", "abort")]
        await self._calls.post("/sleep", limit_s=self._limits.memory, query=query)
        self._versions.paused(InFlight.DROP)

    async def wake(self, parts: Collection[Part] | None = None) -> None:
        if not (await self.capabilities()).can_sleep:
            raise NotOffered("this server has no sleep mode: start it with --enable-sleep-mode")
        if parts is None or Part.KV_CACHE in parts:
            self._versions.resumed()  # the server resumes by itself once all parts are restored
        await self._calls.post("/wake_up", limit_s=self._limits.memory, query=part_query(parts))

    async def reset_cache(self) -> None:
        (await self.capabilities()).require("/reset_prefix_cache", DEV_MODE)
        for _ in range(max(1, round(self._limits.cache / CACHE_WAIT_S))):
            answer = await self._order("/reset_prefix_cache", is_idempotent=True)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            await self._sleep(CACHE_WAIT_S)
        raise EngineError(
            f"{self.url}: requests still held the prefix cache after {self._limits.cache:g} s; pause with drain or drop"
        )

    # Versions and weights

    async def version(self) -> int:
        if not (await self.capabilities()).has("/weight_info"):
            return self._versions.version
        reply = await self._calls.get("/weight_info", limit_s=self._limits.answer)
        return version_number(reply["weight_version"])

    async def set_version(self, version: int) -> None:
        if (await self.capabilities()).has("/update_weight_version"):
            await self._order("/update_weight_version", {"new_version": str(version)}, is_idempotent=True)
        self._versions.moved_to(version)

    async def join_group(self, invitation: GroupInvitation) -> None:
        known = await self.capabilities()
        known.require("/init_weight_transfer_engine", TRANSFER)
        body = {"init_info": group_fields(invitation, known.is_built_in)}
        await self._calls.post("/init_weight_transfer_engine", body, limit_s=self._limits.join)
        self._can_receive = True

    async def leave_group(self) -> None:
        known = await self.capabilities()
        known.require("/shutdown_weight_transfer_engine", "stop the server to make it leave its group")
        await self._order("/shutdown_weight_transfer_engine")
        self._can_receive = False

    async def start_update(self, manifest: Manifest) -> None:
        known = await self.capabilities()
        known.require("/start_weight_update", TRANSFER)
        self._has_written = False
        if known.is_built_in:
            await self._update("/start_weight_update", {"manifest": manifest_fields(manifest)})
            return
        await self._prepare(known, manifest.is_packed)
        await self._update("/start_weight_update", {"is_checkpoint_format": True})

    async def _prepare(self, known: Capabilities, is_packed: bool) -> None:
        """Initialize weight transfer; newer servers need to know in advance whether handles are packed."""
        asks_at_start = known.has("/weight_info")
        if self._can_receive and (not asks_at_start or self._is_packed == is_packed):
            return
        init_info = {"packed": is_packed} if asks_at_start and is_packed != self._is_packed else {}
        await self._update("/init_weight_transfer_engine", {"init_info": init_info})
        self._can_receive, self._is_packed = True, is_packed

    async def take(self, payload: WeightPayload) -> None:
        known = await self.capabilities()
        with_packed_flag = not known.is_built_in and not known.has("/weight_info")
        update_info = payload_fields(payload, known.takes_shared_memory, with_packed_flag)
        self._has_written = True
        await self._update("/update_weights", {"update_info": update_info})

    async def finish_update(self, version: int) -> None:
        known = await self.capabilities()
        await self._update(
            "/finish_weight_update", {"weight_version": str(version)} if known.has("/weight_info") else {}
        )
        self._versions.moved_to(version)

    async def abandon_update(self) -> None:
        known = await self.capabilities()
        known.require("/abandon_weight_update", "it cannot restore its old weights; restart it")
        answer = await self._order("/abandon_weight_update")
        if not answer["is_whole"]:
            raise UpdateFailed(f"{self.url} could not restore its old weights; sync it again, or restart it")

    async def load_checkpoint(self, path: str, version: int) -> None:
        known = await self.capabilities()
        known.require("/collective_rpc", DEV_MODE)
        self._has_written = True
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._update("/collective_rpc", body, self._limits.checkpoint)
        await self.set_version(version)

    async def load_adapter(self, name: str, path: str) -> None:
        known = await self.capabilities()
        known.require("/v1/load_lora_adapter", "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        await self._calls.post("/v1/load_lora_adapter", body, limit_s=self._limits.checkpoint, about=f"adapter {name}")

    async def unload_adapter(self, name: str) -> None:
        await self._order("/v1/unload_lora_adapter", {"lora_name": name})

    async def fingerprints(self) -> dict[str, str]:
        (await self.capabilities()).require("/weight_checker", "compare log-probabilities of a fixed prompt instead")
        body = {"action": "checksum"}
        answer = await self._calls.post("/weight_checker", body, limit_s=self._limits.update, is_idempotent=True)
        return dict(answer["checksums"])

    async def _update(self, path: str, body: Any, limit_s: float | None = None) -> None:
        """POST a step of an update; a server that fails it is not lost, but its weights may be."""
        try:
            await self._calls.post(path, body, limit_s=limit_s or self._limits.update)
        except (EngineRefused, ServerFailed) as error:
            reports_state = self._known is not None and self._known.undoes_updates  # in the error itself
            raise UpdateFailed(str(error) if reports_state else f"{error}; {self._state_of_weights()}") from error

    def _state_of_weights(self) -> str:
        if not self._has_written:
            return f"the engine is still on version {self._versions.version}"
        return (
            f"the engine was on version {self._versions.version} and may have parts of both versions now: "
            "update it again, or restart it"
        )

    async def _probe(self) -> Capabilities:
        limit = self._limits.answer
        openapi = await self._calls.get("/openapi.json", limit_s=limit)
        routes = listed_routes(openapi)
        about = await self._calls.get("/version", limit_s=limit)
        model = served_model(await self._calls.get("/v1/models", limit_s=limit))
        takes_tokens = TOKEN_ROUTE in routes and await self._is_open(TOKEN_ROUTE)
        built_in: dict[str, bool] = about.get("roost") or {}
        sleeps = self._sleeps and not built_in and await self._sleep_mode_is_on(routes)
        return Capabilities(
            routes,
            can_sleep=built_in.get("sleeps", sleeps),
            takes_adapters=built_in.get("adapters", "/v1/load_lora_adapter" in routes),
            reports_versions=built_in.get("spans", takes_tokens and "/weight_info" in routes),
            takes_shared_memory=built_in.get("shared_memory", False),
            undoes_updates=built_in.get("undo", False),
            is_built_in=bool(built_in),
            takes_n=bool(built_in) or not takes_tokens or _release(about.get("version")) >= FULL_N,
            takes_tokens=takes_tokens,
            takes_images=bool(built_in) or (takes_tokens and IMAGE_FIELD in request_fields(openapi, TOKEN_REQUEST)),
            model=model["id"],
            max_context=model.get("max_model_len"),
        )

    async def _is_open(self, route: str) -> bool:
        """Return True if a route is enabled; newer servers list disabled routes and answer them with 403."""
        status = await self._calls.status("POST", route, {}, limit_s=self._limits.answer)
        if status is None:
            raise EngineLost(f"POST {self.url}{route}: no answer")
        return status != 403

    async def _sleep_mode_is_on(self, routes: frozenset[str]) -> bool:
        """Return True if the server's settings enable sleep mode, or, if they are unreadable, if it has /sleep."""
        if not {"/sleep", "/server_info"} <= routes:
            return "/sleep" in routes
        query = [("config_format", "json")]
        reply = await self._calls.get("/server_info", limit_s=self._limits.memory, query=query)
        config = reply.get("vllm_config")  # text in old releases
        return bool(config["model_config"].get("enable_sleep_mode", True)) if isinstance(config, dict) else True
