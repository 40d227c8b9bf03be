"""Keys and arguments by which jobs of other frameworks are recognised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roost.config.findings import Findings
from roost.config.frameworks.arguments import Start, find_file, is_chain, read_chain, read_config
from roost.config.source import Source

OWN_SKYRL = re.compile(r"(?:.*/)?skyrl(?:_train)?[./](?:.*[./])?(?:entrypoints[./]\w+|main_sft)(?:\.py)?")
OWN_VERL = re.compile(
    r"(?:.*[./])?(?:main_ppo(?:_\w+)?|fully_async_main|main_dapo|main_spin|main_sppo|main_gspo)(?:\.py)?"
    r"|(?:verl|recipe)[./](?!.*(?:sft|merge|eval|preprocess|generation))[\w./]*\bmain_\w+(?:\.py)?"
)
_NO_TRAINER = re.compile("sft|merge|eval|preprocess|generat|infer")  # programs beside the trainers
# The config that each program of NeMo-RL's examples/ takes where none is given.
NEMO_CONFIGS: Mapping[str, str] = {
    "run_grpo": "grpo_math_1B.yaml",
    "run_grpo_math": "grpo_math_1B.yaml",
    "run_grpo_rm": "grpo_rm_1B.yaml",
    "run_grpo_sliding_puzzle": "grpo_sliding_puzzle.yaml",
    "run_vlm_grpo": "vlm_grpo_3B.yaml",
    "run_ppo": "ppo_math_1B.yaml",
    "run_sft": "sft.yaml",
    "run_dpo": "dpo.yaml",
    "run_rm": "rm.yaml",
    "run_distillation": "distillation_math.yaml",
}
NEMO_KEYS = ("policy", "cluster", "grpo")
SLIME_FLAGS = (
    "--actor-num-nodes",
    "--actor-num-gpus-per-node",
    "--rollout-num-gpus",
    "--rollout-num-gpus-per-engine",
    "--rollout-batch-size",
)

# --- configs


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
        key in policy for key in ("generation", "model_name", "automodel_cfg", "dtensor_cfg", "megatron_cfg")
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


def is_skyrl(values: Mapping[Any, Any]) -> bool:
    """Return True for keys of SkyRL."""
    trainer, generator = values.get("trainer"), values.get("generator")
    engines = ("inference_engine", "num_inference_engines")
    return (isinstance(trainer, Mapping) and "placement" in trainer) or (
        isinstance(generator, Mapping) and any(key in generator for key in engines)
    )


def is_trl(values: Mapping[Any, Any]) -> bool:
    """Return True for arguments of TRL's GRPO and RLOO."""
    keys = ("num_generations", "max_completion_length", "reward_funcs")
    is_trainer = "model_name_or_path" in values and any(key in values for key in keys)
    return is_trainer or any(key in values for key in ("use_vllm", "vllm_mode"))


# --- commands


def starts_skyrl(start: Start) -> bool:
    """Return True for SkyRL's own programs, and for others with keys that only it has."""
    return OWN_SKYRL.fullmatch(start.program) is not None or is_skyrl(start.arguments.values)


def starts_verl(start: Start) -> bool:
    """Return True for verl's own programs, and for programs of projects built on it, which have its keys."""
    if OWN_VERL.fullmatch(start.program) is not None:
        return True
    is_python = start.program.endswith(".py") or start.is_module
    name = re.split(r"[./]", start.program.removesuffix(".py"))[-1]
    return is_python and "actor_rollout_ref" in start.arguments.values and not _NO_TRAINER.search(name)


def starts_nemo(start: Start) -> bool:
    """Return True for NeMo-RL's programs; other projects have programs of the same names, with configs of their own."""
    if "accelerate" in start.before:
        return False
    source = _config(start)
    if source is None:  # a config that is not here is a finding, where the rest of the command is NeMo-RL's
        is_own = "--config" in start.arguments.options and "torchrun" not in start.before
        has_keys = any(key in start.arguments.values for key in NEMO_KEYS)
        return has_keys or (is_own and Path(start.program).stem in NEMO_CONFIGS)
    if is_chain(source.values):
        source = read_chain(source, Findings())
    return source is None or is_nemo(source.values)


def starts_areal(start: Start) -> bool:
    """Return True for AReaL's launchers, and for programs whose config is one of AReaL's."""
    if start.program.startswith("areal"):
        return True
    source = _config(start)
    return source is not None and is_areal(source.values)


def names_trl(start: Start) -> bool:
    """Return True for programs whose config is one of TRL's."""
    source = _config(start)
    return source is not None and is_trl(source.values)


def _config(start: Start) -> Source | None:
    """The YAML that `--config` names, where it is here."""
    option = start.arguments.options.get("--config")
    name = start.arguments.values.get("--config") if option is None else option.known
    file = find_file(name, start.command) if isinstance(name, str) and name else None
    is_yaml = file is not None and file.suffix in (".yaml", ".yml")
    return read_config(file, start.command, Findings()) if file is not None and is_yaml else None


def starts_prime(start: Start) -> bool:
    """Return True for programs that are given a TOML file, or have a path of prime-rl; `rl` alone may be anything."""
    words = start.arguments.options.values()
    return "prime_rl" in start.program or any((word.known or ".toml").endswith(".toml") for word in words)


def starts_slime(start: Start) -> bool:
    return any(flag in start.arguments.values for flag in SLIME_FLAGS)


def starts_miles(start: Start) -> bool:
    """Return True for slime's flags where a flag, a variable or a path says miles."""
    values, command = start.arguments.values, start.command
    if not starts_slime(start):
        return False
    if "--eval-num-gpus" in values or any(name.startswith("MILES_") for name in command.variables):
        return True
    texts = [str(command.position[0]), start.program, *(value for value in values.values() if isinstance(value, str))]
    return any(re.search(r"(?<![A-Za-z])miles(?![A-Za-z])", text) for text in texts)
