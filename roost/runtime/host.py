"""The Ray actor of a worker: constructs the worker, runs its methods, and reports its failures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import ray
from ray import cloudpickle

from roost.procs.child import redirect_output
from roost.procs.loop_watch import LoopWatch
from roost.procs.user_code import contain_tasks
from roost.trace.spans import SpanRecorder
from roost.transport.context import (
    Address,
    Current,
    DaemonContact,
    Failure,
    FailureKind,
    PeerLost,
    ProcessLink,
    ProcessSetup,
    SimulatedDevices,
    WaitedTooLong,
    enter_context,
)

CONSTRUCTOR = "__init__"
ENROLL_LIMIT = 180.0  # seconds for accelerators to be allocated and the daemon to answer
TELL_LIMIT = 10.0  # seconds for the daemon to accept a failure
FLUSH_EVERY = 1.0  # seconds between flushes of spans


class CallFailed(Exception):
    """Raised to the caller when a worker's method raises."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type[CallFailed], tuple[Failure]]:
        return type(self), (self.failure,)


class Host:
    """Actor that runs the methods of one worker in the main thread, in call order.

    The worker's class is unpickled here, so that a failed import is reported like other failures.
    """

    def __init__(self, address: tuple[str, int], packed_daemon: bytes, packed: bytes) -> None:
        from pathlib import Path

        daemon: DaemonContact = cloudpickle.loads(packed_daemon)
        setup: ProcessSetup = cloudpickle.loads(_enrolled(address, daemon))

        redirect_output(Path(setup.log_path))
        # Set the plan's variables before the worker's class is imported; the user's are set since process start.
        os.environ.update(setup.env)
        self._setup = setup
        self._recorder = SpanRecorder()
        self._link = ProcessLink(setup.address, setup.daemon)
        enter_context(Current(setup, self._link, self._recorder))
        self._last_flush = 0.0
        if setup.simulated is not None:
            show_to_torch(setup.simulated)
        self._worker: Any = None
        self._broken: CallFailed | None = None
        try:
            with self._guarded(CONSTRUCTOR):
                with _without_gc():
                    cls, args, kwargs = cloudpickle.loads(packed)
                worker = cls.__new__(cls)
                worker._setup = setup
                worker.__init__(*args, **kwargs)
                self._worker = worker
        except CallFailed as error:
            self._broken = error  # raised to callers, as Ray would only report that the actor died

    def _roost_ready(self) -> tuple[int, None]:
        """Return once the worker is constructed; raise if its constructor failed."""
        if self._broken is not None:
            raise self._broken
        return 0, None

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
        """Run a method; return its duration in nanoseconds and its result."""
        self._roost_ready()
        with self._guarded(method):
            start = time.perf_counter_ns()
            result = getattr(self._worker, method)(*args, **kwargs)
            return time.perf_counter_ns() - start, result

    @contextlib.contextmanager
    def _guarded(self, method: str) -> Iterator[None]:
        begin = os.fstat(1).st_size
        try:
            with self._recorder.timer(method, "call"):
                yield
        # Anything a worker raises, SystemExit included, must reach the caller and not end the process.
        except BaseException as error:
            raise self._reported(self._failure(method, error), begin) from None
        finally:
            self._send_spans()

    def _failure(self, method: str, error: BaseException) -> Failure:
        summary = f"it called exit({error.code!r})" if isinstance(error, SystemExit) else _one_line(error)
        return Failure(
            self._setup.address,
            FailureKind.RAISED,
            summary,
            time.time_ns(),
            method="its constructor" if method == CONSTRUCTOR else method,
            traceback=_own_traceback(error),
            call=self._call_id(method),
            cause=_packed(error),
            is_consequence=isinstance(error, PeerLost),
        )

    def _reported(self, failure: Failure, log_begin: int) -> CallFailed:
        """Report a failure to the node daemon, which adds the node and the log; return the error to raise."""
        sys.stdout.flush()
        sys.stderr.flush()
        complete = failure
        # Through Ray, because a worker may fail before its link is open. The daemon may be slow to answer.
        with contextlib.suppress(ray.exceptions.RayError):
            complete = ray.get(self._setup.daemon.handle.ask.remote("failed", failure, log_begin), timeout=TELL_LIMIT)
        print(failure.traceback, flush=True)  # after the daemon has read the end of the log
        return CallFailed(complete)

    def _call_id(self, method: str) -> str:
        """Id shared by ranks that fail together: the call's, or the launch's."""
        if method == CONSTRUCTOR:
            return f"launch at {self._setup.env['MASTER_ADDR']}:{self._setup.env['MASTER_PORT']}"
        return ray.get_runtime_context().get_task_id() or ""

    def _send_spans(self) -> None:
        """Flush spans periodically if the link is open; other workers flush when the driver asks."""
        now = time.monotonic()
        if self._link.is_open and now - self._last_flush > FLUSH_EVERY:
            self._last_flush = now
            self._roost_flush()

    def _roost_flush(self) -> None:
        """Send the spans recorded so far to the daemon."""
        spans = self._recorder.drain()
        if spans:
            self._link.get().tell("spans", [tuple(span) for span in spans], self._recorder.dropped)


class AsyncHost(Host):
    """Host of a worker with async methods: they run concurrently in one event loop, sync methods between them."""

    _watch: LoopWatch | None = None

    def _begin_watch(self) -> None:
        """Protect the running loop from being stopped, and start reporting code that blocks it."""
        if self._watch is None:
            contain_tasks(asyncio.get_running_loop())
            self._watch = LoopWatch(self._note)
            self._watch.start()

    def _note(self, text: str) -> None:
        """Write a note to the log and to the job's directory; called from a thread."""
        print(text, flush=True)
        self._setup.daemon.handle.ask.remote("note", f"{self._setup.address}: {text}")

    async def _run_async(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
        self._roost_ready()
        self._begin_watch()
        begin = os.fstat(1).st_size
        try:
            with self._recorder.timer(method, "call"):
                start = time.perf_counter_ns()
                result = getattr(self._worker, method)(*args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
                return time.perf_counter_ns() - start, result
        except BaseException as error:
            # Built here, where Ray knows the current call; reported in a thread, so that other calls continue.
            failure = self._failure(method, error)
            raise await asyncio.to_thread(self._reported, failure, begin) from None
        finally:
            self._send_spans()


def host_class(cls: type, methods: Iterable[str]) -> type[Host]:
    """Actor class for a worker class.

    It has the class's name and methods, so Ray's tools show them and a call needs no method argument.
    """
    is_async = is_asynchronous(cls)
    forwarding = {name: (_forwarding_async if is_async else _forwarding)(name) for name in methods}
    return type(cls.__name__, (AsyncHost if is_async else Host,), forwarding)


def _forwarding(method: str) -> Any:
    def forward(self: Host, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        return self._run(method, args, kwargs)

    return forward


def _forwarding_async(method: str) -> Any:
    async def forward(self: AsyncHost, *args: Any, **kwargs: Any) -> tuple[int, Any]:
        return await self._run_async(method, args, kwargs)

    return forward


def is_asynchronous(cls: type) -> bool:
    """Return True if a worker class has a public async method."""
    return any(
        inspect.iscoroutinefunction(member)
        for name, member in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    )


def _enrolled(address: tuple[str, int], daemon: DaemonContact) -> bytes:
    """Pickled setup of this process, from its daemon. Waits until the job's accelerators are allocated."""
    try:
        reply: bytes = ray.get(daemon.handle.ask.remote("enroll", address, os.getpid()), timeout=ENROLL_LIMIT)
    except ray.exceptions.GetTimeoutError:
        raise WaitedTooLong(
            f"{Address(*address)} could not start: the daemon of node {daemon.node} ({daemon.host}) did not send "
            f"its setup within {ENROLL_LIMIT:g} s"
        ) from None
    return reply


def _one_line(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())


def _own_traceback(error: BaseException) -> str:
    """Traceback starting at the worker's own code, without the host's frames."""
    frames = error.__traceback__
    here = __file__
    while frames is not None and frames.tb_frame.f_code.co_filename in (here, contextlib.__file__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Context without garbage collection, for imports: collection would free nothing and take a tenth of the time."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _packed(error: BaseException) -> bytes | None:
    try:
        packed: bytes = cloudpickle.dumps(error)  # type: ignore[no-untyped-call]
        cloudpickle.loads(packed)
    except Exception:
        return None
    return packed


GIB = 2**30


def show_to_torch(devices: SimulatedDevices) -> None:
    """Make torch report simulated accelerators, now or when it is imported in this process."""
    if "torch" in sys.modules:
        _patch_torch(sys.modules["torch"], devices)
    else:
        sys.meta_path.insert(0, _PatchOnImport(lambda torch: _patch_torch(torch, devices)))


def _patch_torch(torch: Any, devices: SimulatedDevices) -> None:
    count, memory = devices.count, int((devices.memory_gb or 0) * GIB)

    def properties(device: Any = 0) -> SimpleNamespace:
        index = getattr(device, "index", device)
        index = int(str(index).removeprefix("cuda").removeprefix(":") or 0) if index is not None else 0
        if not 0 <= index < count:
            raise AssertionError(f"device {index} is not visible; this process sees {count}")
        return SimpleNamespace(name="simulated", total_memory=memory, major=0, minor=0, multi_processor_count=1)

    torch.cuda.device_count = lambda: count
    torch.cuda.get_device_properties = properties
    torch.cuda.get_device_name = lambda device=0: properties(device).name


class _PatchOnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that loads torch normally and patches it afterwards."""

    def __init__(self, patch_torch: Callable[[Any], None]) -> None:
        self._patch_torch = patch_torch
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        built: ModuleType | None = self._loader.create_module(spec)
        return built

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patch_torch(module)
