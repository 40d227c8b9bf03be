"""Servers of a judge: its own engine or an external endpoint, and the checks of their config."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from roost.config.engine_options import FORMS, is_text
from roost.config.findings import Findings, Where, did_you_mean, shown
from roost.engines.command import EngineKind, ServerSpec
from roost.engines.http_calls import HttpCalls
from roost.engines.members import RestartLimit
from roost.engines.protocol import EngineError
from roost.engines.server_process import LocalOwner
from roost.placement.rules.rewards import engine_sizes
from roost.procs.files import ScratchFolder
from roost.rollout.rewards.reward import RewardFailed
from roost.transport.context import worker_setup

# Set by other keys of the judge, by its placement, or only for a model that is trained.
DECIDED = ("model", "name", "served_name", "device", "host", "api_key", "sleeps", "lora_rank", "weight_transfer")
OPTIONS = tuple(field.name for field in fields(ServerSpec) if field.name not in DECIDED)
KINDS = [kind.value for kind in EngineKind]
EXAMPLE = "engine: {kind: vllm}"


def check_served(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
    """Report a judge with no server or with two, and invalid options of its own engine."""
    base_url, engine = config.get("base_url"), config.get("engine")
    if base_url is None and engine is None:
        why = "a judge asks an external server, or starts its own"
        findings.error(
            "RST-A019",
            where,
            "has neither base_url nor engine",
            why,
            f"write base_url: http://HOST:8000/v1, or {EXAMPLE}",
        )
    elif base_url is not None and engine is not None:
        fix = "leave out engine to ask that server, or base_url for an engine of its own"
        findings.error("RST-A019", where, "has both base_url and engine", f"base_url is {shown(base_url)}", fix)
    elif engine is not None and config.get("api_key_env") is not None:
        why = "only an external server takes a key; the judge's own listens on its machine only"
        findings.error("RST-A020", where.under("api_key_env"), "has no effect beside engine", why, "leave it out")
    if engine is not None:
        _check_engine(engine, where.under("engine"), findings)
        _check_model(config.get("model"), where.under("model"), findings)


def _check_model(model: Any, where: Where, findings: Findings) -> None:
    if not is_text(model):
        fix = "write a folder with a checkpoint, or a name on the Hugging Face hub"
        findings.error("RST-A021", where, "names no model", f"it is {shown(model)}", fix)


def _check_engine(engine: Any, where: Where, findings: Findings) -> None:
    if not isinstance(engine, Mapping):
        findings.error(
            "RST-A022", where, "is not a mapping of an engine's keys", f"it is {shown(engine)}", f"write {EXAMPLE}"
        )
        return
    for key in engine:
        if key not in OPTIONS:
            fix = "write model beside engine" if key == "model" else did_you_mean(str(key), OPTIONS) or "leave it out"
            findings.error(
                "RST-A024",
                where.under(str(key)),
                "is not a key of a judge's engine",
                f"it has {', '.join(OPTIONS)}",
                fix,
            )
    if engine.get("kind") not in KINDS:
        why = f"it is {shown(engine['kind'])}" if "kind" in engine else "it is missing"
        fix = did_you_mean(str(engine.get("kind")), KINDS) or f"write one of {', '.join(KINDS)}"
        findings.error("RST-A023", where.under("kind"), "names no engine", why, fix)
    for key, (is_right, form) in FORMS.items():
        if key in OPTIONS and engine.get(key) is not None and not is_right(engine[key]):
            findings.error(
                "RST-A025", where.under(key), f"is not {form}", f"it is {shown(engine[key])}", f"write {form}"
            )


def server_of(engine: Mapping[str, Any], model: str, name: str, devices: int) -> ServerSpec:
    """Return the server that a judge starts in a process with `devices` accelerators, using all of them.

    >>> server = server_of({"kind": "vllm", "max_context": 8192}, "org/judge", "reward.judge-0", devices=4)
    >>> server.kind, server.device, server.tensor, server.max_context
    (<EngineKind.VLLM: 'vllm'>, 'auto', 4, 8192)
    >>> server_of({"kind": "torch"}, "org/judge", "judge", devices=0).device
    'cpu'
    """
    written = {key: value for key, value in engine.items() if value is not None}
    kind = EngineKind(written.pop("kind"))
    tensor, pipeline = engine_sizes(kind, written.pop("tensor", None), written.pop("pipeline", None), devices)
    return ServerSpec(
        kind,
        str(Path(model).expanduser()) if model.startswith("~") else model,
        name,
        served_name=model,
        device="auto" if devices else "cpu",
        tensor=tensor,
        pipeline=pipeline,
        args=tuple(map(str, written.pop("args", ()))),
        env={str(key): str(value) for key, value in written.pop("env", {}).items()},
        **written,
    )


class ModelServer(Protocol):
    """A server of the judge's model."""

    @property
    def counts(self) -> dict[str, int]: ...

    async def calls(self) -> HttpCalls:
        """Return the client once the server is ready; a new client after a restart."""
        ...

    async def is_lost(self) -> bool:
        """Return True if the server must be restarted, which `calls` does."""
        ...

    async def close(self) -> None: ...


class ExternalServer:
    """A server that Roost does not start or stop."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._calls = HttpCalls(base_url, api_key, trust_env=True)

    @property
    def counts(self) -> dict[str, int]:
        return {}

    async def calls(self) -> HttpCalls:
        return self._calls

    async def is_lost(self) -> bool:
        return False

    async def close(self) -> None:
        await self._calls.close()


class OwnServer:
    """A server on this worker's accelerators, or on the CPU if it has none or runs in the driver.

    It is started on first use, restarted when it dies, up to a limit, and ends with this process.
    """

    def __init__(
        self, engine: Mapping[str, Any], model: str, limit: RestartLimit | None = None, api: str = "/v1"
    ) -> None:
        setup = worker_setup()
        name = "judge" if setup is None else f"{setup.address.group}-{setup.address.rank}"
        self._spec = server_of(engine, model, name, 0 if setup is None else len(setup.physical_ids))
        self._logs = None if setup is None else Path(setup.log_path).parent
        self._limit, self._api = limit or RestartLimit(), api
        self._scratch: ScratchFolder | None = None  # for logs, in the driver
        self._owner: LocalOwner | None = None
        self._start: asyncio.Task[HttpCalls] | None = None
        self._calls: HttpCalls | None = None
        self._recent: deque[float] = deque()  # times of restarts
        self._restarts = 0
        self._is_closed = False

    @property
    def counts(self) -> dict[str, int]:
        return {"restarts": self._restarts}

    async def calls(self) -> HttpCalls:
        """Return the client. One start serves all callers, so it continues when one of them is cancelled."""
        is_lost = await self.is_lost()
        if self._is_closed:
            raise RewardFailed("the judge was closed")
        if self._start is None or is_lost:
            self._start = asyncio.create_task(self._started())
        start = self._start
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if self._is_closed and start.cancelled():
                raise RewardFailed("the judge was closed") from None
            raise

    async def is_lost(self) -> bool:
        has_tried = self._start is not None and self._start.done()
        return has_tried and not (self._owner is not None and await self._owner.is_running())

    async def close(self) -> None:
        self._is_closed = True
        if self._start is not None:
            self._start.cancel()
            await asyncio.wait([self._start])
        if self._calls is not None:
            await self._calls.close()
        if self._owner is not None:
            await self._owner.stop()
        if self._scratch is not None:
            self._scratch.remove()

    async def _started(self) -> HttpCalls:
        if self._owner is None:
            self._owner = LocalOwner(self._spec, self._logs_folder())
        else:
            self._count_restart(time.monotonic())
        if self._calls is not None:
            await self._calls.close()
        try:
            url = await self._owner.start()
        except EngineError as error:
            raise RewardFailed(f"the judge's engine does not start: {error}") from error
        self._calls = HttpCalls(f"{url}{self._api}", self._owner.spec.api_key)
        return self._calls

    def _logs_folder(self) -> Path:
        if self._logs is None:
            self._scratch = ScratchFolder("judge")
            self._logs = self._scratch.path
        return self._logs

    def _count_restart(self, now: float) -> None:
        limit = self._limit
        if not limit.allows(self._recent, now):
            raise RewardFailed(
                f"the judge's engine {self._spec.name} is gone, and was started again {len(self._recent)} times in the "
                f"last {limit.within_s:g} s; see its logs for why it ends"
            )
        self._recent.append(now)
        self._restarts += 1
