"""JSON Schema of the three notations, for completion and checks in editors.

It describes what Roost reads; the rest of a config belongs to other programs and may hold anything. What depends on the
machines only `roost check` can check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roost.config.data import KEYS, TEACHER, TEACHER_KEYS
from roost.config.findings import MAX_ACCELERATORS
from roost.config.job import TRAINED, Notation
from roost.config.learning import REJECTION_LEVELS
from roost.config.node_groups import RESERVED_LABELS
from roost.config.source import EXPONENT, MAX_NUMBER
from roost.config.train import SETTINGS, Setting, default_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

_RANKS = {
    "type": ["string", "integer"],
    "minimum": 0,
    "pattern": r"^\s*([aA][lL][lL]|[0-9_]+\s*(-\s*[0-9_]+)?)\s*(:\s*[0-9_]+\s*(-\s*[0-9_]+)?\s*)?(,.*)?$",
    "description": "Segments resources[:processes], separated by commas: all, 0-7, 0-3:0-7, 0-1:0-3,4-7.",
}
_NODE_RANKS = {
    "description": "Node ranks: 0-7, 0,2, all, or a list.",
    "anyOf": [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": ["integer", "string"]}},
    ],
}
_DEVICES = {
    "description": "Devices of the whole cluster in order: list(range(0,8)), [0, 1], list(range(0,4)) + [6], or 0-7.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {"type": "integer", "minimum": 0},
    ],
}


def _whole(minimum: int, description: str) -> Schema:
    return {"type": "integer", "minimum": minimum, "description": description}


def _mapping(properties: Schema, required: tuple[str, ...] = (), is_closed: bool = True) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if is_closed:
        schema["additionalProperties"] = False
    return schema


def _env_configs() -> Schema:
    variable = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }
    entry = _mapping(
        {
            "node_ranks": _NODE_RANKS,
            "env_vars": {
                "type": "array",
                "items": variable,
                "description": "Single pairs: - GLOO_SOCKET_IFNAME: eth0.",
            },
            "python_interpreter_path": {"type": ["string", "null"], "description": "Python interpreter of workers."},
        },
        ("node_ranks",),
    )
    return {
        "type": "array",
        "items": entry,
        "description": "Software of some nodes of the group; nodes must not overlap.",
    }


def _node_groups() -> Schema:
    label = {
        "type": ["string", "integer"],
        "not": {"enum": list(RESERVED_LABELS)},
        "description": "Name of the group in placements.",
    }
    hardware = _mapping(
        {
            "type": {
                "type": "string",
                "description": "Franka, DualFranka, GimArm, DOSW1, Turtle2, or a registered kind.",
            },
            "configs": {"type": "array", "items": {"type": "object", "required": ["node_rank"]}},
        },
        ("type", "configs"),
    )
    group = _mapping(
        {
            "label": label,
            "node_ranks": _NODE_RANKS,
            "env_configs": _env_configs(),
            "hardware": hardware,
            "hardware_type": {"type": "string"},
            "ignore_hardware": {"type": "boolean", "description": "Count the nodes themselves, whatever is on them."},
        },
        ("label", "node_ranks"),
    )
    return {
        "type": "array",
        "items": group,
        "description": "Labelled sets of nodes with the same hardware and software.",
    }


INTERPOLATION = r"\$\{"  # resolved when the config is read
# JSON Schema applies `minimum` to numbers only and `pattern` to text only, so that one type may have both.
_TYPES: Mapping[type, Schema] = {
    int: {"type": ["integer", "string", "null"], "pattern": INTERPOLATION},
    float: {
        "type": ["number", "string", "null"],
        "minimum": 0,
        "pattern": rf"^\s*{EXPONENT.pattern}\s*$|{INTERPOLATION}",
    },
    bool: {"type": ["boolean", "string", "null"], "pattern": INTERPOLATION},
    str: {"type": ["string", "number", "null"]},
    tuple: {
        "type": ["array", "string", "null"],
        "items": {"type": "string"},
        "minItems": 1,
        "pattern": INTERPOLATION,
    },
    Mapping: {"type": ["object", "string", "null"], "pattern": INTERPOLATION},
}
_TARGET = {"properties": {"_target_": {"type": "string"}}, "required": ["_target_"]}


def _setting(setting: Setting) -> Schema:
    """The schema of one setting; null means not given, and so does -1 for a whole number."""
    if setting.choices:
        choices: Schema = {"enum": [*map(str, setting.choices), None]}
        schema: Schema = {"anyOf": [choices, {"type": "string", "pattern": INTERPOLATION}]}
    else:
        schema = dict(_TYPES[setting.type])
    if setting.words:
        schema["pattern"] = "|".join((*(f"^{word}$" for word in setting.words), schema["pattern"]))
    if setting.name == "data":
        schema |= {"properties": {key: {} for key in KEYS}, "additionalProperties": False}
    if setting.name == TEACHER:
        schema |= {"properties": {key: {} for key in TEACHER_KEYS}, "additionalProperties": {"type": "object"}}
    if setting.name == "rollout_rejection":
        schema |= {"properties": {level.value: {} for level in REJECTION_LEVELS}, "additionalProperties": False}
    if setting.type is int:
        schema |= {"minimum": -1, "maximum": setting.maximum or MAX_ACCELERATORS}
        schema |= {"not": {"const": 0}} if setting.minimum else {}
    elif setting.type is float:
        schema["maximum"] = MAX_NUMBER if setting.maximum is None else setting.maximum
    elif setting.name == "task":
        schema |= _TARGET
    default = default_of(setting.name)
    if default is not None:
        schema["default"] = str(default) if setting.choices else default
    return {"description": setting.description, **schema}


def _train() -> Schema:
    settings = _mapping({name: _setting(setting) for name, setting in SETTINGS.items()})
    return {"description": "The training run; without it, a config only places.", **settings}


def _rlinf() -> Schema:
    group = {"description": "A label, several separated by commas, or a list.", "type": ["string", "integer", "array"]}
    entry = _mapping({"node_group": group, "placement": _RANKS}, ("placement",))
    cluster = _mapping(
        {
            "num_nodes": _whole(1, "Number of machines."),
            "num_gpus_per_node": _whole(0, "Accelerators on each machine, to plan without the cluster."),
            "component_placement": {
                "type": "object",
                "description": "Component names, separated by commas, to ranks.",
                "additionalProperties": {"anyOf": [_RANKS, entry]},
            },
            "node_groups": _node_groups(),
            "auto_scheduler": {"type": "boolean"},
            "use_pre_process_policy": {"type": "boolean"},
            "use_wait_before_last_iter_policy": {"type": "boolean"},
            "recreate_nccl_groups": {"type": "boolean"},
            "net_emulation": {},
            "tracer": {},
            "profiling": {},
        },
        ("component_placement",),
    )
    return _mapping({"cluster": cluster, "train": _train()}, ("cluster",), is_closed=False)


def _roll() -> Schema:
    role = _mapping(
        {
            "device_mapping": _DEVICES,
            "num_gpus_per_worker": _whole(1, "Devices of each worker; vLLM takes tensor * pipeline size instead."),
            "world_size": _whole(1, "Number of workers, for a role without accelerators."),
            "strategy_args": {"type": "object"},
            "system_envs": {"type": "object"},
        },
        is_closed=False,
    )
    names = (
        "actor_train",
        "actor_infer",
        "reference",
        "critic",
        "reward",
        "reward_model",
        "student_train",
        "student_infer",
    )
    properties: Schema = dict.fromkeys(names, role)
    properties |= {
        "train": _train(),
        "rewards": {"type": "object", "additionalProperties": role, "description": "One reward role for each name."},
        "num_gpus_per_node": _whole(0, "Accelerators on each machine."),
        "num_nodes": _whole(1, "Number of machines; derived from the devices if omitted."),
        "async_generation_ratio": {"type": "number", "minimum": 0, "description": "0 is synchronous."},
    }
    return _mapping(properties, is_closed=False)


def _loop() -> Schema:
    allocation = _mapping({"learning_gpus": _DEVICES, "inference_gpus": _DEVICES}, ("learning_gpus", "inference_gpus"))
    memory = {
        "type": ["number", "null"],
        "minimum": 0,
        "description": "Memory in GB on each GPU; give both or neither.",
    }
    rl = _mapping(
        {
            "gpu_allocation": allocation,
            "async_rollouts": {"type": "boolean", "description": "Collect rollouts while learning."},
            "inference_requires_memory_gb": memory,
            "learning_requires_memory_gb": memory,
        },
        is_closed=False,
    )
    server = _mapping({"gpus_per_vllm_server": _whole(1, "GPUs of each server.")}, is_closed=False)
    llm = _mapping({"vllm_server": server, "max_gpu_mem_utilization": {"type": ["number", "null"]}}, is_closed=False)
    return _mapping({"rl": rl, "llm": llm, "train": _train()}, is_closed=False)


_SCHEMAS = {Notation.RLINF: _rlinf, Notation.ROLL: _roll, Notation.LOOP: _loop}


def config_schema(notation: Notation | None = None) -> Schema:
    """The schema of one notation, or one that takes any of the three that Roost trains from.

    >>> config_schema(Notation.LOOP)["properties"]["rl"]["properties"]["async_rollouts"]["type"]
    'boolean'
    """
    if notation is not None:
        return {"$schema": DIALECT, "title": f"Roost config in {notation.value} notation", **_SCHEMAS[notation]()}
    rlinf, roll, loop = (_SCHEMAS[one]() for one in TRAINED)
    by_keys = {
        "if": {"required": ["cluster"]},
        "then": rlinf,
        "else": {"if": {"required": ["rl"]}, "then": loop, "else": roll},
    }
    return {"$schema": DIALECT, "title": "Roost config", "type": "object", **by_keys}
