"""`TorchEngine`, the built-in engine: continuous batching over a paged KV cache, pause, sleep and weight updates."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from roost.engines.protocol import Finish, InFlight, Part
from roost.engines.weights.source import checkpoint_parts, named_weights, part_shape
from roost.torch_engine.attention import PAGED_BLOCK, can_page, split_bytes
from roost.torch_engine.model import LoadedModel, load_model, new_graphs
from roost.torch_engine.runner import NewToken, Runner, Sampler, StepThread
from roost.torch_engine.scheduler import (
    BlockPool,
    LayerCache,
    Progress,
    Request,
    RoutingTable,
    Scheduler,
    Tracked,
    bytes_per_block,
    new_cache,
)
from roost.torch_engine.settings import EngineSettings
from roost.torch_engine.update import Adapter, Adapters, OpenUpdate
from roost.vision.processor import PromptPositions

CPU_BLOCK, CUDA_BLOCK = 16, PAGED_BLOCK
CPU_FRACTION, CUDA_FRACTION = 0.25, 0.9
CONTEXT_BYTES = 1 << 29  # memory of CUDA and its libraries per process, outside torch's allocator
LOGIT_COPIES = 4  # the model's output, its float32 copy, a sorted or cumulated copy, and probabilities


def block_size(settings: EngineSettings, device: torch.device) -> int:
    return settings.block_size or (CUDA_BLOCK if device.type == "cuda" else CPU_BLOCK)


def block_count(settings: EngineSettings, model: LoadedModel, size: int) -> int:
    """Number of KV cache blocks that fit; raise ValueError if there is room for none."""
    each = bytes_per_block(model.layers, size, model.dtype)
    if settings.kv_bytes is not None:
        room, why = settings.kv_bytes, "kv_bytes"
    elif model.device.type == "cuda":
        room, why = _cuda_room(settings, model), "memory_fraction, less the weights and what a step needs,"
    else:
        room, why = _host_room(settings, model, size, each), "memory_fraction of the host's memory"
    if room < each:
        raise ValueError(f"a block of {size} tokens takes {each:,} bytes, but {why} leaves {max(room, 0):,}")
    return room // each


def _host_room(settings: EngineSettings, model: LoadedModel, size: int, each: int) -> int:
    # Not more than all sequences can use. The system allocates memory only when it is written to.
    most = settings.limits(on_cuda=False).sequences * -(-model.max_context // size) * each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(most, int((settings.memory_fraction or CPU_FRACTION) * memory))


def _cuda_room(settings: EngineSettings, model: LoadedModel) -> int:
    free, total = torch.cuda.mem_get_info(model.device)
    own = torch.cuda.memory_reserved(model.device) + CONTEXT_BYTES
    return cuda_room(settings.memory_fraction or CUDA_FRACTION, total, free, own, _step_bytes(settings, model))


def cuda_room(fraction: float, total: int, free: int, own: int, step: int) -> int:
    """Bytes for the KV cache: this process's share of a device, less what it holds (`own`) and the peak of a full step.

    Memory of other processes does not count against the share, but the share must be free.

    >>> cuda_room(0.5, total=100, free=60, own=20, step=5)
    25
    """
    left = int(fraction * total) - own
    if left > free:
        raise ValueError(
            f"memory_fraction {fraction} of {total:,} bytes leaves this process {left:,} beside its weights, but only "
            f"{free:,} are free on the device; set memory_fraction to {1000 * (own + free) // total / 1000} at most"
        )
    return left - step


def _step_bytes(settings: EngineSettings, model: LoadedModel) -> int:
    limits = settings.limits(on_cuda=True)
    rows = max(limits.sequences, settings.max_logit_rows)
    config = model.module.config.get_text_config()
    hidden_size: int = config.hidden_size
    widest: int = max(getattr(config, "intermediate_size", None) or 0, hidden_size)
    hidden = limits.tokens * (3 * widest + 8 * hidden_size) * model.dtype.itemsize
    logits = rows * model.vocabulary * 4 * LOGIT_COPIES
    split = split_bytes(model.layers, config.num_attention_heads, limits.sequences, model.max_context)
    return hidden + logits + split


class Weights:
    """Parameters and persistent buffers of a model: on the device, in host memory, or dropped."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = named_weights(module)
        # By checkpoint name, as the learner sends them: experts are views of the model's fused weights.
        parts = checkpoint_parts(module, self._weights)
        self._owners = {part: (name, index) for name, found in parts.items() for part, index in found.items()}
        self._shapes = {name: weight.shape for name, weight in self._weights.items()}
        self._device = next(iter(self._weights.values())).device
        self._host: dict[str, Tensor] | None = None
        self._pinned: dict[str, Tensor] = {}
        self.are_here = True

    def named(self) -> dict[str, Tensor]:
        """Live tensors by checkpoint name, to be read or written in place."""
        if not self.are_here:
            raise RuntimeError("the weights are asleep; wake them first")
        return {part: self._weights[name].data[index] for part, (name, index) in self._owners.items()}

    def move_to_host(self) -> None:
        if not self.are_here:
            return
        self._host = {name: self._host_copy(name, weight) for name, weight in self._weights.items()}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # copies must be complete before the originals are freed
        self._leave()

    def drop(self) -> None:
        self._host = None
        self._leave()

    def bring_back(self) -> None:
        """Restore the weights on the device; dropped ones are uninitialized until they are written."""
        if self.are_here:
            return
        for name, weight in self._weights.items():
            if self._host is None:
                weight.data = torch.empty(self._shapes[name], dtype=weight.dtype, device=self._device)
            else:
                weight.data = self._host[name].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._host = None
        self.are_here = True

    def host_buffer(self, part: str) -> Tensor:
        """Host buffer for a weight, by its checkpoint name; pinned if the weight is on a GPU."""
        name, index = self._owners[part]
        if self._device.type == "cpu":
            return torch.empty(part_shape(self._shapes[name], index), dtype=self._weights[name].dtype)
        return self._pinned_buffer(name)[index]

    def _pinned_buffer(self, name: str) -> Tensor:
        """Pinned buffer of a weight, kept for reuse because pinning is slow."""
        if name not in self._pinned:
            self._pinned[name] = torch.empty(self._shapes[name], dtype=self._weights[name].dtype, pin_memory=True)
        return self._pinned[name]

    def _host_copy(self, name: str, weight: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return weight.data
        return self._pinned_buffer(name).copy_(weight.data, non_blocking=True)

    def _leave(self) -> None:
        for weight in self._weights.values():
            weight.data = torch.empty(0, dtype=weight.dtype, device=self._device)
        self.are_here = False


__all__ = ["EngineSettings", "Load", "Progress", "Request", "TorchEngine"]

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and free KV cache blocks of the engine."""

    running: int
    waiting: int
    free_blocks: int
    num_blocks: int


class TorchEngine:
    """A model that generates for many requests concurrently, on its own thread."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.model = load_model(settings)
        self.version = 0
        self.has_weights = True  # False if dropped or half updated: no step runs until new weights arrive
        self.open_update: OpenUpdate | None = None
        self.is_paused = False
        self.sleeping: frozenset[Part] = frozenset()
        size = block_size(settings, self.model.device)
        count = block_count(settings, self.model, size)
        self.max_context = min(self.model.max_context, count * size)
        self._weights = Weights(self.model.module)
        self._adapters = Adapters(self.model.module)
        queries: int = self.model.module.config.get_text_config().num_attention_heads
        pages = can_page(self.model.layers, queries, size, self.model.dtype, self.model.device)
        # Graphs have one position per token; models that read images need three.
        graphs = None
        if self.model.processor is None:
            graphs = new_graphs(self.model, settings, pages, width=-(-self.max_context // size))
        self._runner = Runner(self.model, self._adapters, size, pages, graphs)
        self._sampler = Sampler()
        self._scheduler = Scheduler(
            BlockPool(count, size),
            *settings.limits(self.model.device.type == "cuda"),
            settings.max_logit_rows,
            self._adapters.root,
        )
        self._cache: list[LayerCache] = []
        self._make_cache()
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self._live: dict[str, Tracked] = {}
        self._accepted: dict[str, Tracked] = {}  # `_live` and requests that the thread has not seen yet
        self._accepted_lock = threading.Lock()
        self._is_asleep = False
        self._drained: Future[None] | None = None
        self._held: list[Tracked] = []  # requests that arrived during a drain
        self._thread = StepThread("roost-engine", self._step, self._end_all, clock)

    # Called from any thread.

    def submit(self, request: Request, deliver: Callable[[Progress], None]) -> None:
        """Accept a request; `deliver` is called on the engine's thread with its new tokens."""
        self._check(request)
        sampling, prompt = request.sampling, len(request.token_ids)
        tracked = Tracked(
            request,
            deliver,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.model.eos_ids),
            limit=min(prompt + sampling.max_tokens, self.max_context),
            layout=self._layout(request),
        )
        with self._accepted_lock:
            if request.request_id in self._accepted:
                raise ValueError(f"request {request.request_id!r} is already being worked on")
            self._thread.post(lambda: self._add(tracked))
            self._accepted[request.request_id] = tracked

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Abort these requests, or all; each gets a last Progress. Return their number."""
        return self._thread.call(lambda: self._abort(request_ids))

    def pause(self, in_flight: InFlight) -> None:
        """Stop taking steps and return when paused; raise ValueError if resumed before. New requests wait."""
        drained = self._thread.call(lambda: self._pause(in_flight))
        self._thread.wait(drained)

    def resume(self) -> None:
        """Take steps again; an open update is abandoned."""
        self._thread.call(self._resume)

    def sleep(self, level: int) -> None:
        """Stop taking steps. Level 1 drops the cache and moves the weights to the host, 2 drops both, 0 frees nothing.

        An open update is abandoned.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level is {level}; there are 0, 1 and 2")
        self._thread.call(lambda: self._sleep(level))

    def wake(self, parts: Collection[Part] | None = None) -> None:
        """Restore parts, or all; the engine resumes with the last of them."""
        self._thread.call(lambda: self._wake(frozenset(Part if parts is None else parts)))

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache for new prompts; running requests keep their blocks."""
        self._thread.call(self._scheduler.pool.forget_all)
        return True

    def set_version(self, version: int) -> None:
        self._thread.call(lambda: self._set_version(version))

    def between_steps(self, action: Callable[[], T]) -> T:
        """Run an action on the engine's thread between steps; return its result or raise its error."""
        return self._thread.call(action)

    def named_weights(self) -> dict[str, Tensor]:
        """Live weights by checkpoint name; write to them in place, and only between steps."""
        return self._weights.named()

    def host_buffer(self, name: str) -> Tensor:
        """Host buffer for a copy of a weight, valid until the next sleep."""
        return self._weights.host_buffer(name)

    def weights_replaced(self, version: int) -> None:
        """Set the version after all weights were replaced. Call it between steps only."""
        self._set_version(version)
        self.has_weights = True
        self.open_update = None
        self._scheduler.pool.forget_all()
        self._runner.forget_images()

    def abandon_update(self) -> bool:
        """Undo the open update, if any; return True if the weights are usable. Call it between steps only."""
        update, self.open_update = self.open_update, None
        if update is not None:
            self.has_weights = False  # if undoing raises
            self.has_weights = update.undo()
        return self.has_weights

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, replacing one of the same name."""
        if self.model.processor is not None:
            raise ValueError("adapters of models that read images are not supported; send whole weights")
        adapter = self._adapters.read(path)
        self._thread.call(lambda: self._put_adapter(name, adapter))

    def unload_adapter(self, name: str) -> None:
        self._thread.call(lambda: self._unload_adapter(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._adapters.names

    @property
    def load(self) -> Load:
        scheduler = self._scheduler
        running = len(scheduler.running)
        return Load(running, max(len(self._accepted) - running, 0), scheduler.pool.free, scheduler.pool.count)

    @property
    def takes_steps(self) -> bool:
        """True if requests are being processed."""
        return not self.is_paused and not self._is_asleep and self.has_weights

    @property
    def step_seconds(self) -> float | None:
        """Seconds the current step has run; None between steps."""
        return self._thread.step_seconds

    @property
    def failure(self) -> BaseException | None:
        """Exception that ended the engine's thread, if any; every request was aborted then."""
        return self._thread.failure

    def close(self) -> None:
        """Abort every request and stop the thread."""
        self._thread.stop()

    def _check(self, request: Request) -> None:
        ids, vocabulary = request.token_ids, self.model.vocabulary
        if not ids:
            raise ValueError("the prompt is empty; it must have at least 1 token")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; a context of {self.max_context} has room for "
                f"{self.max_context - 1} and a generated one"
            )
        if not (min(ids) >= 0 and max(ids) < vocabulary):
            wrong = next(token for token in ids if not 0 <= token < vocabulary)
            raise ValueError(f"token id {wrong} is not in the vocabulary of {vocabulary}")
        if request.sampling.return_routed_experts and self.model.routers is None:
            raise ValueError(f"{type(self.model.module).__name__} has no routers; do not request routed experts")
        if request.adapter is not None and request.adapter not in self._adapters.names:
            raise ValueError(f"there is no adapter {request.adapter!r}; loaded are {list(self._adapters.names)}")

    def _layout(self, request: Request) -> PromptPositions | None:
        images = request.sampling.images
        if not images:
            return None
        if self.model.processor is None:
            raise ValueError(f"{len(images)} images were sent, but the model reads text alone")
        return self.model.processor.layout(request.token_ids, images)

    # On the engine's thread.

    def _step(self) -> bool:
        """Compute the next chunks and deliver their tokens; return False if there is nothing to do."""
        if not self.takes_steps:
            return False
        chunks = self._scheduler.plan()
        if chunks:
            logits = self._runner.run(chunks, self._cache)
            for chunk in chunks:
                chunk.tracked.computed = chunk.end
            self._hand_out(self._sampler.next_tokens(chunks, logits))
        if self._drained is not None and not self._scheduler.has_work:
            self.is_paused = True
            self._end_drain()
        return bool(chunks)

    def _hand_out(self, tokens: Iterable[NewToken]) -> None:
        """Append tokens to their sequences, then deliver them all; a listener may submit the next request."""
        ended: list[Tracked] = []
        ready: list[tuple[Tracked, Progress]] = []
        for tracked, token_id, logprob, mask in tokens:
            finish = tracked.add(token_id, logprob, mask)
            request = tracked.request
            if finish is not None:
                ended.append(tracked)
            if finish is not None:
                ready.append((tracked, self._last_progress(tracked, finish)))
            elif request.streams or request.wants_prompt_logprobs:
                ready.append((tracked, tracked.progress(self.version)))
        self._forget(ended)
        self._deliver_all(ready)

    def _deliver_all(self, ready: Iterable[tuple[Tracked, Progress]]) -> None:
        unheard = [tracked for tracked, progress in ready if not self._deliver(tracked, progress)]
        self._forget([tracked for tracked in unheard if self._live.get(tracked.request.request_id) is tracked])

    def _set_version(self, version: int) -> None:
        """Set the policy version, after delivering what was generated by the one before."""
        undelivered = [each for each in self._live.values() if each.delivered < len(each.logprobs)]
        self._deliver_all([(each, each.progress(self.version)) for each in undelivered])
        self.version = version

    def _deliver(self, tracked: Tracked, progress: Progress) -> bool:
        try:
            tracked.deliver(progress)
        except Exception:  # a failing listener must not end other requests
            log.exception("request %s is ended: its listener failed", tracked.request.request_id)
            return False
        return True

    def _add(self, tracked: Tracked) -> None:
        self._live[tracked.request.request_id] = tracked
        if tracked.request.sampling.return_routed_experts:
            self._keep_routing()
        if tracked.request.adapter not in (None, *self._adapters.names):
            self._abort([tracked.request.request_id])  # unloaded after the request was accepted
        elif self._drained is None:
            self._scheduler.add(tracked)
        else:
            self._held.append(tracked)

    def _keep_routing(self) -> None:
        """Record the experts of all tokens from now on; clear the prefix cache, for which they were not recorded."""
        routers, pool = self.model.routers, self._scheduler.pool
        if self._runner.routing is None and routers is not None:
            slots = pool.count * pool.block_size
            self._runner.routing = RoutingTable(slots, routers.layers, routers.top_k, routers.experts)
            self._scheduler.pool.forget_all()

    def _abort(self, request_ids: Collection[str] | None) -> int:
        ids = list(self._live) if request_ids is None else request_ids
        gone = [self._live[each] for each in ids if each in self._live]
        last = [self._last_progress(tracked, Finish.ABORT) for tracked in gone]
        self._forget(gone)
        for tracked, progress in zip(gone, last, strict=True):
            self._deliver(tracked, progress)
        return len(gone)

    def _last_progress(self, tracked: Tracked, finish: Finish) -> Progress:
        """Last tokens of an ending sequence, with its routed experts; call it before its blocks are released."""
        progress, table = tracked.progress(self.version, finish), self._runner.routing
        if table is None or not tracked.request.sampling.return_routed_experts or not tracked.blocks:
            return progress
        routing = table.read(tracked.blocks, self._scheduler.pool.block_size, tracked.computed)
        return replace(progress, routing=routing)

    def _forget(self, gone: Collection[Tracked]) -> None:
        if not gone:
            return
        self._scheduler.remove(gone)
        self._held = [each for each in self._held if each not in gone]
        with self._accepted_lock:
            for tracked in gone:
                del self._live[tracked.request.request_id]
                del self._accepted[tracked.request.request_id]

    def _pause(self, in_flight: InFlight) -> Future[None]:
        """Return a future that is done once the engine has paused."""
        if in_flight is InFlight.DROP:
            self._abort(None)
        if in_flight is InFlight.DRAIN and self._scheduler.has_work:
            self.abandon_update()  # requests must finish with consistent weights
            if self._is_asleep or not self.has_weights:
                raise ValueError(
                    f"{len(self._live)} requests cannot be finished while the engine sleeps or has no weights: "
                    "wake it, or send it weights"
                )
            self.is_paused = False
            self._drained = self._drained or Future()
            return self._drained
        self._end_drain()
        self.is_paused = True
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _end_drain(self, failure: str | None = None) -> None:
        """End a drain: queue the requests that were held back, and resolve its future."""
        for tracked in self._held:
            self._scheduler.add(tracked)
        self._held = []
        drained, self._drained = self._drained, None
        if drained is not None and failure is None:
            drained.set_result(None)
        elif drained is not None:
            drained.set_exception(ValueError(failure))

    def _resume(self) -> None:
        self.abandon_update()
        self._end_drain("the engine was resumed while it was being paused; pause it again")
        self.is_paused = False

    def _sleep(self, level: int) -> None:
        self.abandon_update()  # the storage that it writes to is freed below
        self._end_drain("the engine was put to sleep while it was being paused")
        self._is_asleep = True
        if level == 0:
            return
        self._scheduler.preempt_all()
        self._scheduler.pool.forget_all()
        self._runner.drop_graphs()
        self._runner.forget_images()
        self._cache = []
        if level == 1:
            self._weights.move_to_host()
        else:
            self._weights.drop()
            self.has_weights = False
        self.sleeping = frozenset(Part)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, parts: frozenset[Part]) -> None:
        if not self._is_asleep:
            return
        if Part.WEIGHTS in parts & self.sleeping:
            self._weights.bring_back()
            self.sleeping -= {Part.WEIGHTS}
        if Part.KV_CACHE in parts & self.sleeping:
            self._make_cache()
            self.sleeping -= {Part.KV_CACHE}
        if not self.sleeping:
            self._is_asleep = False
            self._resume()

    def _make_cache(self) -> None:
        pool, model = self._scheduler.pool, self.model
        self._cache = new_cache(model.layers, pool.count, pool.block_size, model.dtype, model.device)

    def _put_adapter(self, name: str, adapter: Adapter) -> None:
        self._adapters.put(name, adapter)
        self._runner.drop_graphs()

    def _unload_adapter(self, name: str) -> None:
        users = sum(tracked.request.adapter == name for tracked in self._live.values())
        if users:
            raise ValueError(f"{users} requests use adapter {name!r}; abort them first or wait for them")
        self._adapters.remove(name)
        self._runner.drop_graphs()

    def _end_all(self, failure: BaseException | None) -> None:
        if failure is not None:
            log.error("the engine died with %d requests in flight", len(self._accepted), exc_info=failure)
        with self._accepted_lock:
            self._live = dict(self._accepted)
        self._abort(None)
