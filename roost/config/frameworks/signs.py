"""Keys by which config files of other frameworks are recognised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def is_prime(values: Mapping[Any, Any], file: str | None) -> bool:
    """Return True for TOML files with sections of prime-rl; elsewhere, only where several of them are there."""
    sections = {key for key, value in values.items() if isinstance(value, Mapping)}
    if str(file).endswith(".toml"):
        return bool(sections & {"orchestrator", "trainer", "inference", "deployment", "vllm", "model"})
    return "orchestrator" in sections and bool(sections & {"trainer", "inference", "deployment"})


def is_nemo(values: Mapping[Any, Any]) -> bool:
    """Return True for configs with NeMo-RL's keys; `cluster` alone is RLinf's too."""
    cluster, policy = values.get("cluster"), values.get("policy")
    if isinstance(cluster, Mapping) and ("component_placement" in cluster or "num_gpus_per_node" in cluster):
        return False
    has_policy = isinstance(policy, Mapping) and any(
        key in policy for key in ("generation", "model_name", "dtensor_cfg", "megatron_cfg")
    )
    return has_policy or (isinstance(cluster, Mapping) and "gpus_per_node" in cluster)


def is_areal(values: Mapping[Any, Any]) -> bool:
    """Return True for configs with a backend such as `sglang:d4t2` in a role, or with `allocation_mode`."""
    cluster = values.get("cluster")
    if isinstance(cluster, Mapping) and "component_placement" in cluster:
        return False
    roles = (values.get(name) for name in ("rollout", "actor"))
    backends = [role.get("backend") for role in roles if isinstance(role, Mapping)]
    return "allocation_mode" in values or any(
        isinstance(backend, str) and re.match(r"\s*[a-z]+\s*(\[\w*\]\s*)?:", backend) for backend in backends
    )
