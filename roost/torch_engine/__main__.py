"""The built-in engine as a program: `python -m roost.torch_engine --model FOLDER`."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from roost.config.job import ModelLocation, model_location
from roost.engines.guarded.roost_key_guard import KEY_VARIABLE
from roost.net.server import bound_socket, url_of
from roost.torch_engine.settings import EngineSettings

HARD_END_S, GRACE_S = 3.0, 5.0

DTYPES = ("auto", "float32", "bfloat16", "float16")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; options that vLLM has too have its names."""
    parser = argparse.ArgumentParser(
        prog="python -m roost.torch_engine",
        description="Roost's built-in inference engine, with vLLM's routes.",
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder with a Hugging Face checkpoint, or a name on the hub")
    add("--served-model-name", help="model name in requests; default: --model")
    add("--host", default="127.0.0.1")
    add(
        "--port",
        type=int,
        default=8000,
        choices=range(65536),
        metavar="PORT",
        help="0: any free port, which is in the first line printed",
    )
    add("--api-key", help=f"required on every route except /health; set {KEY_VARIABLE} to hide it from other users")
    add("--parent-pid", type=int, help="end when this process ends")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", default="auto", choices=DTYPES, help="auto: the checkpoint's own")
    add("--max-model-len", type=int, help="maximum tokens of prompt and completion; default: the model's")
    add("--gpu-memory-utilization", type=float, help="fraction of the device for weights and KV cache")
    add("--kv-cache-memory-bytes", type=int, help="size of the KV cache, instead of --gpu-memory-utilization")
    add("--block-size", type=int, help="tokens per KV cache block")
    add("--max-num-seqs", type=int, help="maximum number of concurrent completions")
    add("--max-num-batched-tokens", type=int, help="maximum number of tokens per step")
    add("--enforce-eager", action="store_true", help="no CUDA graphs, and layers are not compiled")
    add("--seed", type=int, help="for requests without one")
    add("--enable-lora", action="store_true", help="allow loading adapters")
    add("--max-lora-rank", type=int, help="ignored, accepted for compatibility with vLLM: adapters may have any rank")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace) -> EngineSettings:
    """Settings from the given options; the others keep their defaults."""
    given: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "dtype": options.dtype,
        "max_context": options.max_model_len,
        "block_size": options.block_size,
        "max_sequences": options.max_num_seqs,
        "max_batch_tokens": options.max_num_batched_tokens,
        "kv_bytes": options.kv_cache_memory_bytes,
        "memory_fraction": options.gpu_memory_utilization,
        "seed": options.seed,
        "cuda_graphs": not options.enforce_eager,
    }
    return EngineSettings(**{name: value for name, value in given.items() if value is not None})


def end_with(pid: int) -> None:
    """End this process when process `pid` ends."""
    wait = wait_for(pid)

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)  # Python handles a signal late while it loads a model
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def wait_for(pid: int) -> Callable[[], object]:
    """Return a function that waits for the process to end, even if its pid is reused meanwhile."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise ValueError(f"there is no process {pid} to end with") from error
        except OSError:
            pass  # an older kernel
        else:
            return lambda: select.select([descriptor], [], [])
    try:
        return psutil.Process(pid).wait
    except psutil.NoSuchProcess as error:
        raise ValueError(f"there is no process {pid} to end with") from error


def run(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    if model_location(options.model) is ModelLocation.MISSING:
        raise ValueError(f"there is no folder {options.model}")
    if options.parent_pid is not None:
        end_with(options.parent_pid)
    bound = bound_socket(options.host, options.port)

    # Imported here, so that a wrong command line is reported at once.
    gc.disable()  # collecting during these imports frees nothing and takes a tenth of their time
    from transformers.utils.logging import disable_progress_bar

    from roost.torch_engine.engine import TorchEngine
    from roost.torch_engine.server import EngineServer, create_app, served_engine

    gc.freeze()
    gc.enable()
    disable_progress_bar()
    engine = TorchEngine(settings)
    served = served_engine(engine, options.served_model_name)
    if served.codec.missing:
        logging.getLogger("roost.engine").warning("%s; only routes with token ids work", served.codec.missing)
    app = create_app(served, options.enable_lora, options.api_key or os.environ.get(KEY_VARIABLE))
    ready = f"{options.model} on {engine.model.device}, {engine.load.num_blocks} KV blocks, {url_of(bound)}"
    try:
        EngineServer(app, served, ready, HARD_END_S).run([bound])
    finally:
        engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    # uvicorn raises the signals that it handled again when it has ended; they are not failures.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    options = arguments(argv)
    try:
        run(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
