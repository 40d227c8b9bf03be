"""A plan: every process of a job with its node, devices, environment and interpreter.

A plan is a value: it is printed, compared, saved, and later verified against the machines.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from roost.cluster.inventory import Inventory
from roost.config.findings import ConfigError, Finding, Findings, Severity, Where, shown
from roost.config.job import ModelUse, Notation, Origin, ParallelSizes, ResolvedSetting, Role, Sharding
from roost.config.known_keys.tables import Effect, KeyUse, Known
from roost.config.notations.algorithm import ESTIMATOR, KL_COEF, WHITEN
from roost.config.ranks import spell_ranks
from roost.placement.component_plan import ComponentPlan, PlacementMode, PlacementTable, Process, offsets_of
from roost.placement.memory.phases import Phase
from roost.placement.memory.residency import ClassResidency, Residency, ResidencySettings, find_residency
from roost.placement.memory.traffic import micro_batch_traffic
from roost.placement.routes import EngineRoutes, Reach, Routes, find_routes

SCHEMA = "roost.plan/1"


@dataclass(frozen=True)
class Plan:
    """Placement of every process of a job, with the inventory and warnings.

    >>> import roost
    >>> cluster = {"num_nodes": 1, "num_gpus_per_node": 2, "component_placement": {"actor": "all"}}
    >>> plan = roost.plan({"cluster": cluster})
    >>> plan.mode.value, plan["actor"].world_size
    ('training-only', 2)
    """

    notation: Notation
    file: str | None
    mode: PlacementMode
    inventory: Inventory
    components: tuple[ComponentPlan, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[ResolvedSetting, ...] = ()  # empty for a config that only places
    keys: tuple[KeyUse, ...] = ()  # config keys without effect
    warnings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()

    @cached_property
    def residency(self) -> Residency:
        """Memory residency of every device in every phase."""
        settings = ResidencySettings.of(self.notation, self.settings)
        return find_residency(self.components, self.inventory, settings, {}, Findings())

    @cached_property
    def routes(self) -> Routes:
        """Weight routes from the learner to the engines."""
        engine = next((str(setting.value) for setting in self.training if setting.name == "engine"), None)
        return find_routes(self.components, self.inventory, engine)

    def __getitem__(self, name: str) -> ComponentPlan:
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(f"there is no component {name}; the plan has {', '.join(part.name for part in self.components)}")

    def to_dict(self) -> dict[str, Any]:
        """The plan in the documented schema (docs/plan-schema.md)."""
        return {
            "schema": SCHEMA,
            "notation": self.notation.value,
            "file": self.file,
            "mode": self.mode.value,
            **self.inventory.to_dict(),
            "components": {component.name: _component_to_dict(component) for component in self.components},
            "settings": dict(self.settings),
            "training": {setting.name: _setting_to_dict(setting) for setting in self.training},
            "unused_keys": [_key_to_dict(use) for use in self.keys],
            "residency": [_residency_to_dict(held) for held in self.residency.classes],
            "routes": [_routes_to_dict(engine) for engine in self.routes.engines],
            "warnings": [finding_to_dict(finding) for finding in self.warnings],
            "notes": [finding_to_dict(finding) for finding in self.notes],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan written by `to_dict`. Raise ConfigError if the data is not a plan or has another schema."""
        findings = Findings()
        schema = data.get("schema") if isinstance(data, Mapping) else None
        if schema != SCHEMA:
            findings.error(
                "RST-C034",
                Where(path=("schema",)),
                f"is {shown(schema)}, not {SCHEMA}",
                fix="give a file that roost plan --json wrote",
            )
            findings.raise_errors()
        try:
            machines = {key: data[key] for key in ("nodes", "node_groups")}
            measured = {"bandwidth": data["bandwidth"]} if "bandwidth" in data else {}
            inventory = Inventory.from_dict({**machines, **measured})
            return cls(
                notation=Notation(data["notation"]),
                file=data["file"],
                mode=PlacementMode(data["mode"]),
                inventory=inventory,
                components=tuple(
                    _component_from_dict(name, part, inventory) for name, part in data["components"].items()
                ),
                settings=dict(data["settings"]),
                training=tuple(_setting_from_dict(name, part) for name, part in data.get("training", {}).items()),
                keys=tuple(_key_from_dict(part) for part in data.get("unused_keys", ())),
                warnings=tuple(_finding_from_dict(part) for part in data["warnings"]),
                notes=tuple(_finding_from_dict(part) for part in data.get("notes", ())),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            findings.error(
                "RST-C035", Where(), f"is not a whole plan: {what}", fix="write it again with roost plan --json"
            )
            findings.raise_errors()
            raise

    def to_json(self, indent: int | None = 2) -> str:
        """The plan as JSON text, in the schema of `to_dict`."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by `to_json`. Raise ConfigError if the text is not JSON or not a plan."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            findings = Findings()
            findings.error("RST-C033", Where(), f"is not JSON: {error}", fix="give what roost plan --json wrote")
            raise ConfigError(findings.errors) from None
        return cls.from_dict(data)


def _residency_to_dict(held: ClassResidency) -> dict[str, Any]:
    """One class of devices in all phases. Derived from the rest of the plan, and not read back."""
    return {
        "devices": spell_ranks(held.device_class.devices.tolist(), limit=10**9),
        "components": list(held.device_class.components),
        "memory_gb": held.device_class.memory_gb,
        "decision": held.decision.value,
        "reason": held.reason,
        "inference_fraction": held.sharing.inference_fraction if held.sharing else None,
        "learning_fraction": held.sharing.learning_fraction if held.sharing else None,
        "used_gib": {phase.value: held.used_gib(phase) for phase in Phase},
        "phases": {
            phase.value: {
                share.component: {
                    "state": share.state.value,
                    "device_gib": share.device_gib,
                    "host_gib": share.host_gib,
                }
                for share in shares
            }
            for phase, shares in held.phases.items()
        },
    }


def _routes_to_dict(engine: EngineRoutes) -> dict[str, Any]:
    """Distances of an engine's weight routes. Derived from the rest of the plan, and not read back."""
    reaches = {reach.value: engine.count(reach) for reach in Reach if engine.count(reach)}
    sizes = {"bytes": engine.weight_bytes, "gathered_bytes": engine.gathered_bytes} if engine.weight_bytes else {}
    return {
        "component": engine.component,
        "shards": len(engine.shards),
        "gathered": engine.gathered,
        **sizes,
        **({"from_disk": engine.from_disk} if engine.from_disk else {}),
        **reaches,
    }


def _component_to_dict(component: ComponentPlan) -> dict[str, Any]:
    return {
        "written_name": component.written_name,
        "strategy": component.strategy,
        "world_size": component.world_size,
        "hardware_ranks": component.hardware_ranks.tolist(),
        "node_groups": [
            {"label": label, "counts": kind}
            for label, kind in zip(component.table.labels, component.table.kinds, strict=True)
        ],
        "parallel": {
            "tensor": component.parallel.tensor,
            "pipeline": component.parallel.pipeline,
            "context": component.parallel.context,
            "expert": component.parallel.expert,
            "shard": component.parallel.shard,
            "expert_tensor": component.parallel.expert_tensor,
        },
        "mesh": None if component.sharded_mesh is None else asdict(component.sharded_mesh),
        "env": dict(component.env),
        "role": component.role.value,
        "model": asdict(component.model) | {"offloads": list(component.model.offloads)},
        "traffic": _traffic_to_dict(component),
        "managed_by": component.managed_by,
        "isolate_accelerator": component.table.isolate,
        "processes": [_process_to_dict(process) for process in component.processes()],
    }


def _traffic_to_dict(component: ComponentPlan) -> dict[str, float] | None:
    """Bytes that each rank sends in a micro-batch. Derived from the rest of the plan, and not read back."""
    traffic = micro_batch_traffic(component)
    return None if traffic is None else asdict(traffic)


def _process_to_dict(process: Process) -> dict[str, Any]:
    described = process.placement._asdict()
    described["devices"] = [list(device) for device in process.placement.devices]
    described |= {"env": process.env, "interpreter": process.interpreter}
    if process.hardware:
        described["hardware"] = [dict(item) for item in process.hardware]
    return described


def _setting_to_dict(setting: ResolvedSetting) -> dict[str, Any]:
    return {
        "value": setting.value,
        "origin": setting.origin.value,
        "keys": [_place_to_dict(key) for key in setting.keys],
    }


def _setting_from_dict(name: str, data: Mapping[str, Any]) -> ResolvedSetting:
    keys = tuple(_place_from_dict(key) for key in data["keys"])
    return ResolvedSetting(name, data["value"], Origin(data["origin"]), keys)


def _key_to_dict(use: KeyUse) -> dict[str, Any]:
    known = use.known
    words = {"effect": known.effect.value, "reason": known.reason, "instead": known.instead, "hint": use.hint}
    return {**_place_to_dict(use.where), **words, "is_set": use.is_set}


def _key_from_dict(data: Mapping[str, Any]) -> KeyUse:
    known = Known(Effect(data["effect"]), data["reason"], data["instead"])
    return KeyUse(_place_from_dict(data), known, is_set=data["is_set"], hint=data["hint"])


def _place_to_dict(where: Where) -> dict[str, Any]:
    return {"file": where.file, "line": where.line, "column": where.column, "path": list(where.path)}


def _place_from_dict(data: Mapping[str, Any]) -> Where:
    return Where(data["file"], data["line"], data["column"], tuple(data["path"]))


def finding_to_dict(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity.value,
        "code": finding.code,
        **_place_to_dict(finding.where),
        "what": finding.what,
        "why": finding.why,
        "fix": finding.fix,
    }


def _finding_from_dict(data: Mapping[str, Any]) -> Finding:
    code = data.get("code", "")  # plans of older versions have none
    return Finding(code, _place_from_dict(data), data["what"], data["why"], data["fix"], Severity(data["severity"]))


def read_plan_file(file: Path, findings: Findings) -> Plan | None:
    """Read a plan file written by `roost plan --json`; None if it is something else, such as a config."""
    try:
        with file.open("rb") as stream:
            if b'"schema": "roost.plan/' not in stream.read(64):
                return None
            stream.seek(0)
            data = json.load(stream)
        return Plan.from_dict(data)
    except OSError:
        return None  # reading it as a config reports the error
    except ConfigError as error:
        for finding in error.findings:
            findings.error(finding.code, replace(finding.where, file=str(file)), finding.what, finding.why, finding.fix)
        return None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        findings.error(
            "RST-C033", Where(str(file)), f"is a plan that cannot be read: {reason}", fix="write it again with --json"
        )
        return None


def _component_from_dict(name: str, data: Mapping[str, Any], inventory: Inventory) -> ComponentPlan:
    processes = data["processes"]
    labels = tuple(group["label"] for group in data["node_groups"])
    devices = [device for process in processes for device in process["devices"]]
    columns = np.array(devices, np.int64).reshape(-1, 2)
    nodes = np.array([process["cluster_node_rank"] for process in processes], np.int64)
    used = np.concatenate([nodes, columns[:, 0]])
    if len(used) and not 0 <= used.min() <= used.max() < inventory.num_nodes:
        raise IndexError(f"node {used.max()} of {inventory.num_nodes}")
    lengths = np.array([len(process["devices"]) for process in processes], np.int64)
    table = PlacementTable(
        inventory,
        labels,
        tuple(group["counts"] for group in data["node_groups"]),
        nodes=nodes,
        groups=np.array([labels.index(process["node_group_label"]) for process in processes], np.int64),
        offsets=offsets_of(lengths),
        device_nodes=columns[:, 0],
        device_ranks=columns[:, 1],
        isolate=data["isolate_accelerator"],
    )
    return ComponentPlan(
        name,
        data["written_name"],
        data["strategy"],
        np.array(data["hardware_ranks"], np.int64),
        table,
        ParallelSizes(**data["parallel"]),
        tuple(data["env"].items()),
        Role(data["role"]),
        _model_from_dict(data["model"]),
        data["managed_by"],
    )


def _model_from_dict(data: Mapping[str, Any]) -> ModelUse:
    return ModelUse(**{**data, "sharding": Sharding(data["sharding"]), "offloads": tuple(data["offloads"])})


# Engines of programs that have one kind only.
_ONLY_ENGINE = {Notation.LOOP: "vllm", Notation.SLIME: "sglang", Notation.MILES: "sglang"}
# Other names of backends; DTensor of NeMo-RL is FSDP2.
_SAME_BACKEND = {"huggingface": "hf", "transformers": "hf", "fsdp2": "fsdp", "dtensor": "fsdp"}
_WHITEN_GAE = (Notation.VERL, Notation.OPENRLHF, Notation.SKYRL)  # always; elsewhere it is a switch


def backend(part: ComponentPlan, notation: Notation) -> str | None:
    """Backend of a component's model, by the name that all notations share; None if the job does not name it."""
    if part.role is Role.ENGINE and part.model.strategy is None:
        return _ONLY_ENGINE.get(notation)
    if part.model.strategy is None and part.role is Role.LEARNER:
        return learner_backend(part)
    return backend_word(part.model.strategy)


def learner_backend(part: ComponentPlan, known: Collection[str] = ("fsdp", "megatron")) -> str:
    """Training backend of a component, for a framework that has the `known` ones; FSDP if it has not the job's."""
    if part.model.strategy is None:
        return "megatron" if part.model.sharding is Sharding.OPTIMIZER else "fsdp"
    word = backend_word(part.model.strategy)
    return word if word is not None and word in known else "fsdp"


def backend_word(strategy: str | None) -> str | None:
    """The name that all notations share for a backend; None for None.

    >>> backend_word("megatron_train"), backend_word("fsdp2"), backend_word("hf_infer")
    ('megatron', 'fsdp', 'hf')
    """
    if strategy is None:
        return None
    name = strategy.removesuffix("_train").removesuffix("_infer")
    return _SAME_BACKEND.get(name, name)


def has_devices(part: ComponentPlan) -> bool:
    return len(part.table.device_ranks) > 0


def uses_model(part: ComponentPlan) -> bool:
    """Return True if a component runs a model on accelerators; a helper does if it names one."""
    return part.role is not Role.HELPER or (part.model.path is not None and has_devices(part))


def whitens_gae(plan: Plan) -> bool:
    """Return True if the notation always whitens GAE advantages, and no key says otherwise."""
    is_gae = plan.notation in _WHITEN_GAE and plan.settings.get(ESTIMATOR) == "gae"
    return is_gae and WHITEN not in plan.settings


def whitens(plan: Plan) -> bool:
    """Return True if advantages are whitened, by a key or because the notation always whitens those of GAE."""
    return plan.settings.get(WHITEN) is True or whitens_gae(plan)


def with_reference(plan: Plan) -> list[ComponentPlan]:
    """The components, with a reference beside the actor if the job's learner computes the KL itself."""
    parts = list(plan.components)
    names = {part.name: part for part in parts}
    if KL_COEF not in plan.settings or "reference" in names or "actor" not in names:
        return parts
    actor = names["actor"]
    frozen = replace(actor.model, lora_rank=None, offloads=(), tokens=None, memory_fraction=None)
    return [*parts, replace(actor, name="reference", written_name="reference", role=Role.SCORER, model=frozen)]
