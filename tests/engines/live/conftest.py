"""Real engines on a tiny model: our own always, vLLM where ROOST_VLLM_PYTHON names an interpreter that has it."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from roost.engines.command import EngineKind, ServerSpec
from roost.engines.connect import connect
from roost.engines.http_calls import TimeLimits
from roost.engines.server_process import ServerProcess, start_ready
from roost.engines.tiny_model import write_tiny_model

collect_ignore = ["packed_experts.py"]  # imports vLLM
VLLM_PYTHON = "ROOST_VLLM_PYTHON"
READY_LIMIT = 1200.0  # seconds; vLLM takes up to two minutes on two cores
# Long enough for a request that is still under way when a server that gets little of a busy machine hears of the next.
MAX_CONTEXT = 32768
# vLLM's attention on CPUs takes heads of 32 numbers and more, and Qwen2's must be hidden_size / heads.
SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": MAX_CONTEXT}
KEY = "key-of-the-live-tests"
SCENARIO_LIMIT = 1200.0  # seconds; to fill that context takes more than one minute on a machine that is busy


@dataclass(frozen=True)
class RunningEngine:
    """A server that answers, and what it was started on."""

    spec: ServerSpec
    process: ServerProcess

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def model_folder(self) -> Path:
        return Path(self.spec.model)

    def client(self, limits: TimeLimits | None = None):
        """A client for the running event loop; close it there."""
        return connect(self.spec.kind, self.url, sleeps=self.spec.sleeps, api_key=self.spec.api_key, limits=limits)

    def run(self, scenario, limits: TimeLimits | None = None):
        """Run `scenario(client)` to its end in an event loop of its own."""

        async def body():
            engine = self.client(limits)
            try:
                async with asyncio.timeout(SCENARIO_LIMIT):
                    return await scenario(engine)
            except BaseException:
                await engine.resume()  # one that fails must not leave the next ones with a server that is paused
                raise
            finally:
                await engine.close()

        return asyncio.run(body())


def spec_of(kind: EngineKind, model: Path, **changes) -> ServerSpec:
    """Start of an engine in these tests."""
    own = {"python": os.environ.get(VLLM_PYTHON), "args": ("--enforce-eager",)} if kind is EngineKind.VLLM else {}
    same = {"api_key": KEY, "device": "cpu", "dtype": "float32", "max_context": MAX_CONTEXT}
    fields = {"name": f"live-{kind}", **same, **own, **changes}
    return ServerSpec(kind, str(model), **fields)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A tiny model that every engine can run."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", **SIZES)


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_kind(request) -> EngineKind:
    kind = EngineKind(request.param)
    if kind is EngineKind.VLLM and not os.environ.get(VLLM_PYTHON):
        pytest.skip(f"set {VLLM_PYTHON} to the interpreter of an environment with vLLM to run these tests against it")
    return kind


@pytest.fixture(scope="module")
def server_spec(engine_kind, model_folder) -> ServerSpec:
    """Start of a server of the tested kind, on the tiny model."""
    return spec_of(engine_kind, model_folder)


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory):
    """Starts servers, waits until they are ready, and stops them when the module is done."""
    processes = []

    def start(spec: ServerSpec) -> RunningEngine:
        process = asyncio.run(start_ready(spec, tmp_path_factory.mktemp("logs"), READY_LIMIT))
        processes.append(process)
        if spec.kind is EngineKind.VLLM:
            _let_others_in(process.pid)
        return RunningEngine(spec, process)

    yield start
    for process in processes:
        asyncio.run(process.stop())


def _let_others_in(pid: int) -> None:
    """The processes of vLLM that compute spin while they wait, two of them: on two cores nobody else gets a word in."""
    for child in psutil.Process(pid).children(recursive=True):
        if "VLLM::" in " ".join(child.cmdline()):
            child.nice(15)


@pytest.fixture(scope="module")
def running_engine(server_spec, start_engine) -> RunningEngine:
    """One server of each kind for all tests of a module."""
    return start_engine(server_spec)
