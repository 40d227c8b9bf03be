"""Model of a component: folder, precision, and its `config.json` if the folder is on this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from roost.config.findings import shown
from roost.config.job import Role
from roost.config.section import MAX_NUMBER, Section, Unresolved
from roost.config.teacher import is_teacher

DEFAULT_ADAPTER_RANK = 16
COMPILED_SIZE = 200_000_000  # parameters from which compiling layers pays, in learner and engine
OFFLOADED_PARTS = ("weight", "grad", "optimizer")
ENGINE_STRATEGIES = ("vllm", "sglang")
_BYTES = {"32": 4, "fp32": 4, "float32": 4, "32-true": 4, "fp8": 1, "float8": 1, "int8": 1}
_MAX_CONFIG_BYTES = 1 << 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
_LONGEST_HUB_NAME = 96


class ModelLocation(StrEnum):
    """Location of a model that a config names."""

    FOLDER = "folder"  # that is here
    MISSING = "missing"  # a path, and there is nothing at it here
    HUB = "hub"  # no folder here, and a possible name on the Hugging Face hub


def model_location(model: str) -> ModelLocation:
    """Decide whether a model is a local path or a hub name, from the name and that path alone.

    A relative path such as `runs/model` is also a possible hub name. Without a folder of that name it counts as one,
    whether or not `runs` exists; only a look-up can tell.

    >>> [model_location(name).value for name in ("Qwen/Qwen2.5-0.5B", "./Qwen", "/data/models/Qwen")]
    ['hub', 'missing', 'missing']
    """
    if _local(model) is not None:
        return ModelLocation.FOLDER
    is_name = len(model) <= _LONGEST_HUB_NAME and _HUB_NAME.fullmatch(model)
    return ModelLocation.HUB if is_name else ModelLocation.MISSING


def is_in_hub_cache(model: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the hub's cache here has a model; without the hub's client, which planning does not import."""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    snapshots = Path(cache).expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/config.json"))


def resolve_model(model: str) -> str:
    """The absolute path of a local model, for processes with another working directory; a hub name stays as it is."""
    path = _local(model)
    return model if path is None else str(path.absolute())


def _local(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, or the home of an unknown user
        return None


def read_model_config(path: str | None) -> dict[str, Any] | None:
    """The `config.json` in a model's folder; None where the path is a hub name or the folder is elsewhere."""
    if not path:
        return None
    try:
        file = Path(path).expanduser() / "config.json"
        with file.open("rb") as stream:
            config = json.loads(stream.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: ~somebody who is not here, or nesting without end
        return None
    return config if isinstance(config, dict) else None


def first_text(*places: tuple[Section, str]) -> str | None:
    """The first of several keys that holds a word; for settings of other programs, which are not judged here.

    A job without the word can be planned, so one that is not known is a note.
    """
    for section, key in places:
        value = section.values.get(key)
        if isinstance(value, Unresolved):
            what = f"{shown(value.text)} is not known, and is left out"
            section.findings.note("RST-N086", section.where(key), what, value.reason, value.fix)
        if isinstance(value, str) and value:
            return value
    return None


def first_number(*places: tuple[Section, str]) -> float | None:
    """The first of several keys that holds a number above zero."""
    for section, key in places:
        value = section.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER:
            return value
    return None


def fraction_of_device(section: Section, *keys: str) -> float | None:
    """The part of each device that an engine takes; what is no such part is an error."""
    for key in keys:
        value = section.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            section.error(
                "RST-M001",
                key,
                f"is {shown(value)}; it is a part of the device, above 0 and at most 1",
                fix="write 0.9",
            )
            return None
        return float(value)
    return None


def bytes_of(precision: str | None) -> int:
    """Bytes of a weight in a precision as configs name it; 16 bits by default."""
    return _BYTES.get(str(precision).lower().removeprefix("torch."), 2)


def teacher_model(root: Section, component: str) -> str | None:
    """The model that `train.teacher` names for a component."""
    return first_text((root.below("train", *component.split(".")), "model"))


def role_by_name(name: str) -> Role:
    """The role that a component's name implies, in the notations that do not say it otherwise."""
    if name in ("actor", "critic"):
        return Role.LEARNER
    if name == "rollout" or name.startswith("rollout_"):
        return Role.ENGINE
    if name in ("inference", "actor_inference", "critic_inference", "reference") or is_teacher(name):
        return Role.SCORER
    return Role.HELPER


def role_by_strategy(strategy: str | None, name: str) -> Role:
    """The role that a ROLL strategy implies; without one, the name decides."""
    if strategy is None:
        return role_by_name(name)
    if strategy.endswith("_train"):
        return Role.LEARNER
    if strategy in ENGINE_STRATEGIES or (strategy == "hf_infer" and name == "rollout"):
        return Role.ENGINE  # the built-in engine takes the place of Hugging Face's generate
    return Role.HELPER if name.startswith("reward") else Role.SCORER


def eos_ids(generation: Any, config: Any) -> frozenset[int]:
    """End-of-text tokens: those of the generation config if any, else those of the model's config."""
    for ids in (getattr(generation, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
