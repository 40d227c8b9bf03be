"""The Ray actor in which a worker lives: it starts the worker, runs its methods, and tells of its failures."""

from __future__ import annotations

import asyncio
import contextlib
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

from roost.procs.logs import redirect_output
from roost.procs.loop_watch import LoopWatch
from roost.procs.user_code import contain_tasks
from roost.trace.spans import SpanRecorder
from roost.transport import current
from roost.transport.current import ProcessLink, ProcessSetup, SimulatedDevices
from roost.transport.failure import Address, DaemonContact, Failure, FailureKind, PeerLost, WaitedTooLong

CONSTRUCTOR = "__init__"
ENROLL_LIMIT = 180.0  # seconds: for accelerators to be given out, and for the daemon to answer
TELL_LIMIT = 10.0  # seconds for it to hear of a failure
FLUSH_EVERY = 1.0  # seconds between sendings of spans


class CallFailed(Exception):
    """A worker's method raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[type[CallFailed], tuple[Failure]]:
        return type(self), (self.failure,)


class Host:
    """Runs the methods of one worker, in the main thread and in the order of the calls.

    The class comes packed, so that one that cannot be imported here is reported like any other failure of a worker.
    """

    def __init__(self, address: tuple[str, int], packed_daemon: bytes, packed: bytes) -> None:
        from pathlib import Path

        daemon: DaemonContact = cloudpickle.loads(packed_daemon)
        setup: ProcessSetup = cloudpickle.loads(_enrolled(address, daemon))

        redirect_output(Path(setup.log_path))
        # The plan's own variables, before the worker's class and all it imports; a user's are there since the start.
        os.environ.update(setup.env)
        self._setup = setup
        self._recorder = SpanRecorder()
        self._link = ProcessLink(setup.address, setup.daemon)
        current.enter(current.Current(setup, self._link, self._recorder))
        self._last_flush = 0.0
        if setup.simulated is not None:
            show_to_torch(setup.simulated)
        self._worker: Any = None
        self._broken: CallFailed | None = None
        try:
            with self._guarded(CONSTRUCTOR):
                cls, args, kwargs = cloudpickle.loads(packed)
                worker = cls.__new__(cls)
                worker._setup = setup
                worker.__init__(*args, **kwargs)
                self._worker = worker
        except CallFailed as error:
            self._broken = error  # told to whoever calls, for Ray would only say that the actor died

    def _roost_ready(self) -> tuple[int, None]:
        """Answer once the worker has been made."""
        if self._broken is not None:
            raise self._broken
        return 0, None

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
        """Run a method; how long it took in nanoseconds, and its result."""
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
        # Whatever a worker raises, exits included, must reach the one who called and not end the process.
        except BaseException as error:
            raise self._told(self._failure(method, error), begin) from None
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
            call=self._call(method),
            cause=_packed(error),
            is_consequence=isinstance(error, PeerLost),
        )

    def _told(self, failure: Failure, log_begin: int) -> CallFailed:
        """Tell the daemon, which knows more of the failure, and may be slow to answer."""
        sys.stdout.flush()
        sys.stderr.flush()
        known = failure
        # Told through Ray, as every failure: a worker may fail before it has a link.
        with contextlib.suppress(ray.exceptions.RayError):
            known = ray.get(self._setup.daemon.handle.ask.remote("failed", failure, log_begin), timeout=TELL_LIMIT)
        print(failure.traceback, flush=True)  # after the daemon has read the log's last lines, which come before it
        return CallFailed(known)

    def _call(self, method: str) -> str:
        """What ranks that fail together have in common: the call, or the launch."""
        if method == CONSTRUCTOR:
            return f"launch at {self._setup.env['MASTER_ADDR']}:{self._setup.env['MASTER_PORT']}"
        return ray.get_runtime_context().get_task_id() or ""

    def _send_spans(self) -> None:
        """Now and then, once there is a link: a worker that never used it is asked for its spans at the end."""
        now = time.monotonic()
        if self._link.is_open and now - self._last_flush > FLUSH_EVERY:
            self._last_flush = now
            self._roost_flush()

    def _roost_flush(self) -> None:
        """Give the daemon the spans recorded so far."""
        spans = self._recorder.drain()
        if spans:
            self._link.get().tell("spans", [tuple(span) for span in spans], self._recorder.dropped)


class AsyncHost(Host):
    """For a worker with asynchronous methods: they run side by side in one event loop, the others between them."""

    _watch: LoopWatch | None = None

    def _begin_watch(self) -> None:
        """Once the loop runs: nothing ends it, and what blocks it is reported."""
        if self._watch is None:
            contain_tasks(asyncio.get_running_loop())
            self._watch = LoopWatch(self._note)
            self._watch.start()

    def _note(self, text: str) -> None:
        """Say something in the log, and to whoever watches the job; called from a thread."""
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
            # Described here, where Ray knows which call this is; told in a thread, because the other calls go on.
            failure = self._failure(method, error)
            raise await asyncio.to_thread(self._told, failure, begin) from None
        finally:
            self._send_spans()


def host_class(cls: type, methods: Iterable[str]) -> type[Host]:
    """The actor for a worker class.

    It has the class's name and methods: so Ray shows what runs, and a call needs no argument to say which is meant.
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
    """Whether a worker class has a public asynchronous method."""
    return any(
        inspect.iscoroutinefunction(member)
        for name, member in inspect.getmembers(cls, callable)
        if not name.startswith("_")
    )


def _enrolled(address: tuple[str, int], daemon: DaemonContact) -> bytes:
    """What this process is, from its daemon; it starts while the job still finds out which accelerators it gets."""
    try:
        told: bytes = ray.get(daemon.handle.ask.remote("enroll", address, os.getpid()), timeout=ENROLL_LIMIT)
    except ray.exceptions.GetTimeoutError:
        raise WaitedTooLong(
            f"{Address(*address)} could not start: the daemon of node {daemon.node} ({daemon.host}) did not say within "
            f"{ENROLL_LIMIT:g} s what it is"
        ) from None
    return told


def _one_line(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())


def _own_traceback(error: BaseException) -> str:
    """The traceback from the worker's own code on, without the frames that run it."""
    frames = error.__traceback__
    here = __file__
    while frames is not None and frames.tb_frame.f_code.co_filename in (here, contextlib.__file__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _packed(error: BaseException) -> bytes | None:
    try:
        packed: bytes = cloudpickle.dumps(error)  # type: ignore[no-untyped-call]
        cloudpickle.loads(packed)
    except Exception:
        return None
    return packed


GIB = 2**30


def show_to_torch(devices: SimulatedDevices) -> None:
    """Let torch count simulated accelerators, whenever it is imported in this process."""
    if "torch" in sys.modules:
        _teach(sys.modules["torch"], devices)
    else:
        sys.meta_path.insert(0, _TeachOnImport(lambda torch: _teach(torch, devices)))


def _teach(torch: Any, devices: SimulatedDevices) -> None:
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


class _TeachOnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as everybody else would, and changes it once it is loaded."""

    def __init__(self, teach: Callable[[Any], None]) -> None:
        self._teach = teach
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
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._teach(module)
