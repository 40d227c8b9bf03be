"""Derive servers from a plan: the spec of each engine process, and how it shares its devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from roost.config.findings import did_you_mean
from roost.config.job import Role
from roost.engines.command import EngineKind, ServerSpec
from roost.placement.component_plan import ComponentPlan
from roost.placement.memory.residency import ClassResidency, Decision
from roost.placement.plan import Plan
from roost.placement.routes import ServerRoute, WeightRoute, server_routes

DEFAULT_KIND = EngineKind.TORCH
STRICTEST = (Decision.RESTART, Decision.SLEEP, Decision.KEEP)
BACKENDS = {WeightRoute.DEVICE: "ipc", WeightRoute.BROADCAST: "nccl"}  # for engines that must know at start


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Servers of a component in rank order, and what they do when another component needs their devices."""

    component: str
    servers: tuple[ServerSpec, ...]
    decision: Decision  # the strictest of `decisions`
    routes: tuple[ServerRoute, ...] = ()  # weight route to each server; empty if they do not serve the policy
    decisions: tuple[Decision, ...] = ()  # per server: KEEP for those that share no devices

    @property
    def displaced(self) -> tuple[str, ...]:
        """Names of servers that free their devices for others."""
        return tuple(
            server.name
            for server, decision in zip(self.servers, self.decisions, strict=True)
            if decision is not Decision.KEEP
        )

    @property
    def reload_note(self) -> str:
        """Note on the servers that read new weights from disk, with the reasons; empty if none does."""
        routes = zip(self.servers, self.routes, strict=False)
        reading = [(server.name, planned.reason) for server, planned in routes if planned.route is WeightRoute.RELOAD]
        return "; ".join(f"new weights go to {name} by disk: {reason}" for name, reason in reading)

    @property
    def routes_by_name(self) -> dict[str, ServerRoute]:
        return {server.name: route for server, route in zip(self.servers, self.routes, strict=True)}


def plan_engines(plan: Plan, component: str, defaults: ServerSpec, kind: EngineKind | None = None) -> EnginePlan:
    """Derive the servers of a component; `defaults` has what a plan does not specify (dtype, context, extra options).

    The kind of engine is `kind`, else the component's strategy (ROLL), else that of `defaults`. Memory fraction, sleep
    mode and weight transfer follow from the plan's residency and weight routes.
    """
    part = plan[component]
    if part.role is not Role.ENGINE:
        raise ValueError(f"{component} is a {part.role}, not an engine; engines here are {_engines(plan)}")
    residencies = plan.residency.of(component)
    decisions = _decisions(part, residencies)
    decision = _strictest(decisions)
    defaults = replace(defaults, kind=kind or engine_kind(part.model.strategy, defaults.kind))
    routes = server_routes(plan.components, part, defaults.kind, on_gpu=defaults.device != "cpu")
    fractions = _fractions(part, residencies, defaults)
    servers = tuple(
        _server(part, rank, defaults, fractions[rank], decision, routes[rank] if routes else None)
        for rank in range(part.world_size)
    )
    return EnginePlan(component, servers, decision, routes, decisions)


def engine_kind(strategy: str | None, default: EngineKind = DEFAULT_KIND) -> EngineKind:
    """Return the engine kind for a component's strategy.

    >>> engine_kind("vllm"), engine_kind(None)
    (<EngineKind.VLLM: 'vllm'>, <EngineKind.TORCH: 'torch'>)
    """
    if strategy in (None, "hf", "hf_infer", "huggingface"):
        return default
    if strategy in list(EngineKind):
        return EngineKind(strategy)
    known = [kind.value for kind in EngineKind]
    raise ValueError(
        f"{strategy} is not an engine of Roost; {did_you_mean(strategy, known) or f'write one of {known}'}"
    )


def _server(
    part: ComponentPlan,
    rank: int,
    defaults: ServerSpec,
    fraction: float | None,
    decision: Decision,
    route: ServerRoute | None,
) -> ServerSpec:
    device = defaults.device if part.table[rank].visible_accelerators else "cpu"
    backend = BACKENDS.get(route.route) if route is not None and device != "cpu" else None
    return replace(
        defaults,
        model=part.model.path or defaults.model,
        name=f"{part.name}-{rank}",
        device=device,
        tensor=part.parallel.tensor,
        pipeline=part.parallel.pipeline,
        memory_fraction=fraction,
        sleeps=decision is Decision.SLEEP,
        weight_transfer=backend or defaults.weight_transfer,
    )


def _strictest(decisions: Iterable[Decision]) -> Decision:
    found = set(decisions)
    return next((one for one in STRICTEST if one in found), Decision.KEEP)


def _decisions(part: ComponentPlan, residencies: tuple[ClassResidency, ...]) -> tuple[Decision, ...]:
    """Residency decision of each server: the strictest of its devices."""
    return tuple(_strictest(one.decision for one in own) for own in _residencies(part, residencies))


def _fractions(
    part: ComponentPlan, residencies: tuple[ClassResidency, ...], defaults: ServerSpec
) -> tuple[float | None, ...]:
    """Memory fraction of each server: the smallest that the plan has for its devices, else the config's."""
    usual = part.model.memory_fraction or defaults.memory_fraction
    found = []
    for own in _residencies(part, residencies):
        shares = (one.sharing.inference_fraction for one in own if one.sharing is not None)
        found.append(min((share for share in shares if share is not None), default=usual))
    return tuple(found)


def _residencies(part: ComponentPlan, residencies: tuple[ClassResidency, ...]) -> list[set[ClassResidency]]:
    """Residencies of the devices of each server."""
    by_device = {int(device): one for one in residencies for device in one.device_class.devices}
    held: list[set[ClassResidency]] = [set() for _ in range(part.world_size)]
    for device, owner in zip(part.table.device_numbers.tolist(), part.table.owners.tolist(), strict=True):
        if device in by_device:
            held[owner].add(by_device[device])
    return held


def _engines(plan: Plan) -> str:
    return ", ".join(part.name for part in plan.components if part.role is Role.ENGINE) or "none"
