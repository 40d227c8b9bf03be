"""The client of a running server."""

from __future__ import annotations

from typing import assert_never

from roost.engines.command import EngineKind
from roost.engines.http_calls import TimeLimits
from roost.engines.protocol import Engine
from roost.engines.sglang import SglangEngine
from roost.engines.vllm import VllmEngine


def connect(
    kind: EngineKind, url: str, *, sleeps: bool = False, api_key: str | None = None, limits: TimeLimits | None = None
) -> Engine:
    """Create the client of the server at a URL; `sleeps`: the server was started with sleep mode.

    >>> connect(EngineKind.TORCH, "http://127.0.0.1:8000/").url
    'http://127.0.0.1:8000'
    """
    match kind:
        case EngineKind.TORCH | EngineKind.VLLM:  # the built-in engine has vLLM's routes
            return VllmEngine(url, sleeps=sleeps, api_key=api_key, limits=limits)
        case EngineKind.SGLANG:
            return SglangEngine(url, sleeps=sleeps, api_key=api_key, limits=limits)
        case _:
            assert_never(kind)
