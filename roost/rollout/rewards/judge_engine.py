"""An engine of a judge's own, as a config names it: what is wrong with that, and the server that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from roost.config.engine_options import FORMS, is_text
from roost.config.errors import Findings, Where, did_you_mean, shown
from roost.engines.spec import EngineKind, ServerSpec
from roost.placement.reward_rules import engine_sizes

# What the judge's other keys and its place decide, and what only a model that is trained has a use for.
DECIDED = ("model", "name", "served_name", "device", "host", "api_key", "sleeps", "lora_rank", "weight_transfer")
OPTIONS = tuple(field.name for field in fields(ServerSpec) if field.name not in DECIDED)
KINDS = [kind.value for kind in EngineKind]
EXAMPLE = "engine: {kind: vllm}"


def check_served(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
    """Find a judge that nobody serves, or two do, and what its own engine cannot be started with."""
    base_url, engine = config.get("base_url"), config.get("engine")
    if base_url is None and engine is None:
        why = "its model is served by others, or by itself"
        findings.error(
            where, "has neither base_url nor engine", why, f"write base_url: http://HOST:8000/v1, or {EXAMPLE}"
        )
    elif base_url is not None and engine is not None:
        fix = "leave out engine to ask that server, or base_url for an engine of its own"
        findings.error(where, "has both base_url and engine", f"base_url is {shown(base_url)}", fix)
    elif engine is not None and config.get("api_key_env") is not None:
        why = "it is for a server of others; the judge's own listens on its machine only"
        findings.error(where.under("api_key_env"), "is of no use beside engine", why, "leave it out")
    if engine is not None:
        _check_engine(engine, where.under("engine"), findings)
        _check_model(config.get("model"), where.under("model"), findings)


def _check_model(model: Any, where: Where, findings: Findings) -> None:
    if not is_text(model):
        fix = "write a folder with a checkpoint, or a name on the Hugging Face hub"
        findings.error(where, "names no model", f"it is {shown(model)}", fix)


def _check_engine(engine: Any, where: Where, findings: Findings) -> None:
    if not isinstance(engine, Mapping):
        findings.error(where, "is no mapping of an engine's keys", f"it is {shown(engine)}", f"write {EXAMPLE}")
        return
    for key in engine:
        if key not in OPTIONS:
            fix = "write model beside engine" if key == "model" else did_you_mean(str(key), OPTIONS) or "leave it out"
            findings.error(
                where.under(str(key)), "is not a key of a judge's engine", f"it has {', '.join(OPTIONS)}", fix
            )
    if engine.get("kind") not in KINDS:
        why = f"it is {shown(engine['kind'])}" if "kind" in engine else "it is missing"
        fix = did_you_mean(str(engine.get("kind")), KINDS) or f"write one of {', '.join(KINDS)}"
        findings.error(where.under("kind"), "names no engine", why, fix)
    for key, (is_right, form) in FORMS.items():
        if key in OPTIONS and engine.get(key) is not None and not is_right(engine[key]):
            findings.error(where.under(key), f"is not {form}", f"it is {shown(engine[key])}", f"write {form}")


def server_of(engine: Mapping[str, Any], model: str, name: str, devices: int) -> ServerSpec:
    """The server that a judge starts in a process with so many accelerators; all of them are its own.

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
