"""Rewards as a config names them: a mapping from names to `_target_`, `tags`, `weight` and the reward's own keys."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from roost.config.errors import Findings, Where, did_you_mean, shown
from roost.procs.user_code import call
from roost.rollout.located import NotLocated, located
from roost.rollout.rewards.function import OFFERED, Function, named_arguments
from roost.rollout.rewards.reward import Reward
from roost.rollout.rewards.routing import SCENARIO, Route, Routing

ROUTE_KEYS = ("tags", "weight")
NEEDED = ("score", "close")
EXAMPLE = "write a name, and under it _target_: roost.rollout.rewards.exact.ExactAnswer"


@dataclass(frozen=True, slots=True)
class ConfiguredRewards:
    """The rewards of a run: how answers find them, those made here, and the configs of those made elsewhere."""

    routing: Routing = field(default_factory=Routing)
    local: Mapping[str, Reward] = field(default_factory=dict)
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def make_rewards(config: Any, where: Where, findings: Findings, elsewhere: Collection[str] = ()) -> ConfiguredRewards:
    """Make the rewards of a config; of those with a placement of their own the keys are looked at only.

    >>> made = make_rewards(
    ...     {"exact": {"_target_": "roost.rollout.rewards.exact.ExactAnswer", "tags": "math", "find": "boxed"}},
    ...     Where(path=("train", "rewards")),
    ...     Findings(),
    ... )
    >>> made.routing.routes
    (Route(name='exact', tags=frozenset({'math'}), weight=1.0),)
    """
    if not isinstance(config, Mapping):
        findings.error(where, "is not a mapping of rewards", f"it is {shown(config)}", EXAMPLE)
        return ConfiguredRewards()
    routes: list[Route] = []
    own: Route | None = None
    local: dict[str, Reward] = {}
    for name, keys in config.items():
        here = where.under(str(name))
        if not isinstance(keys, Mapping):
            findings.error(here, "is no reward", f"it is {shown(keys)}", EXAMPLE)
            continue
        route = _route(str(name), keys, here, findings)
        if name == SCENARIO and "_target_" not in keys:
            own = route
            _check_scenario(keys, here, findings)
            continue
        routes.append(route)
        make = _checked_call(keys, here, findings)
        if make is not None and name not in elsewhere:
            made = _made(str(keys["_target_"]), make, here, findings)
            if made is not None:
                local[str(name)] = made
    sent = {route.name: config[route.name] for route in routes if route.name in elsewhere}
    return ConfiguredRewards(Routing(tuple(routes), own), local, sent)


def make_reward(name: str, keys: Mapping[str, Any]) -> Reward:
    """One reward of a config, as in a process of its own; ConfigError where it cannot be made."""
    findings = Findings()
    made = make_rewards({name: keys}, Where(path=("rewards",)), findings)
    findings.raise_errors()
    return made.local[name]


# How answers find a reward ------------------------------------------------------------------------------------------


def _route(name: str, keys: Mapping[str, Any], where: Where, findings: Findings) -> Route:
    return Route(name, _tags(keys.get("tags"), where, findings), _weight(keys.get("weight", 1.0), where, findings))


def _tags(written: Any, where: Where, findings: Findings) -> frozenset[str]:
    tags = [written] if isinstance(written, str) else [] if written is None else written
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) and tag for tag in tags):
        fix = "write a tag, or a list of tags; leave tags out for all tasks"
        findings.error(where.under("tags"), "are no tags", f"they are {shown(written)}", fix)
        return frozenset()
    if written is not None and not tags:
        fix = "leave tags out for all tasks, or the reward"
        findings.error(where.under("tags"), "is an empty list", "it would score no task", fix)
    return frozenset(tags)


def _weight(written: Any, where: Where, findings: Findings) -> float:
    if isinstance(written, bool) or not isinstance(written, int | float) or not math.isfinite(written):
        fix = "write a number; one below 0 is a penalty"
        findings.error(where.under("weight"), "is no weight", f"it is {shown(written)}", fix)
        return 1.0
    return float(written)


def _check_scenario(keys: Mapping[str, Any], where: Where, findings: Findings) -> None:
    for key in keys:
        if key not in ROUTE_KEYS:
            why = f"the scenario's own reward has {', '.join(ROUTE_KEYS)}"
            fix = did_you_mean(key, (*ROUTE_KEYS, "_target_")) or "remove it"
            findings.error(where.under(str(key)), "is not a key here", why, fix)


# What a reward is made of -------------------------------------------------------------------------------------------


def _checked_call(keys: Mapping[str, Any], where: Where, findings: Findings) -> Callable[[], Any] | None:
    """What makes the reward, once `_target_` and the keys are known to be right."""
    written = keys.get("_target_")
    if not isinstance(written, str) or not written:
        why = f"it is {shown(written)}" if "_target_" in keys else ""
        findings.error(where.under("_target_"), "names no class or function", why, EXAMPLE)
        return None
    own = {str(key): value for key, value in keys.items() if key not in ("_target_", *ROUTE_KEYS)}
    try:
        target = located(written)
    except NotLocated as error:
        fix = did_you_mean(error.part, error.known)
        fix = fix or "name a class or function in a file of this folder, or of one in PYTHONPATH, as module.Name"
        findings.error(where.under("_target_"), f"{written} cannot be found", error.why, fix)
        return None
    if not callable(target):
        fix = "name a class, or a function"
        findings.error(where.under("_target_"), f"{written} is no reward", f"it is {shown(target)}", fix)
        return None
    if not _keys_fit(written, target, own, where, findings):
        return None
    if hasattr(target, "check_config"):
        before = findings.num_errors
        target.check_config(own, where, findings)
        if findings.num_errors > before:
            return None
    return (lambda: target(**own)) if isinstance(target, type) else (lambda: Function(target, own))


def _keys_fit(written: str, target: Any, own: Mapping[str, Any], where: Where, findings: Findings) -> bool:
    """Whether a class, or a function beside what it is offered, takes these keys."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some classes written in C tell nothing; making one will
        return True
    is_function = not isinstance(target, type)
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [] if any(one.kind is one.VAR_KEYWORD for one in parameters) else [key for key in own if key not in names]
    for key in unknown:
        takes = [name for name in names if not (is_function and name in OFFERED)]
        why = f"it has {', '.join(takes)}" if takes else "it has none"
        fix = did_you_mean(key, [*takes, *ROUTE_KEYS]) or "remove it"
        findings.error(where.under(key), f"is not a key of {written}", why, fix)
    if unknown:
        return False
    try:
        if is_function:
            named_arguments(target, dict(own))
        else:
            inspect.signature(target).bind(**own)
    except TypeError as error:
        findings.error(where, f"{written} cannot be called with these keys", str(error), "add the keys that it needs")
        return False
    return True


def _made(written: str, make: Callable[[], Any], where: Where, findings: Findings) -> Reward | None:
    try:
        made = call(make)
    except Exception as error:  # whatever a user's class raises
        fix = "correct the value that it names"
        findings.error(where, f"{written} cannot be made from these keys", f"{type(error).__name__}: {error}", fix)
        return None
    missing = [name for name in NEEDED if not inspect.iscoroutinefunction(getattr(made, name, None))]
    if missing:
        why = f"it has no asynchronous {', '.join(missing)}"
        findings.error(where, f"{written} is no reward", why, "see roost.rollout.rewards.reward.Reward")
        return None
    reward: Reward = made
    return reward
