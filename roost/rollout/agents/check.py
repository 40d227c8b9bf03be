"""What is wrong with the config of an agent, found before anything is launched."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roost.rollout.agents.making import RECORDER, agent_keys, is_agent, is_appworld_agent, parameters_of
from roost.rollout.located import NotLocated, located
from roost.spec.errors import Findings, Where, did_you_mean, shown

TARGET = "_target_"
EXAMPLE = "roost.rollout.agents.react.ReactCoder"


def check_agent(config: Mapping[str, Any], where: Where, findings: Findings) -> None:
    """Find a class that is not there or is no agent, and keys that it does not take or misses."""
    target = config.get(TARGET)
    if not isinstance(target, str) or not target:
        hint = did_you_mean(TARGET, [str(key) for key in config if key != TARGET])
        near = hint.removeprefix("did you mean ").removesuffix("?")
        why = f"there is {near}" if near else "" if target is None else f"_target_ is {shown(target)}"
        findings.error(where, "the agent has no class", why, f"write _target_: {EXAMPLE}, or a class of your own")
        return
    try:
        make = located(target)
    except NotLocated as error:
        fix = did_you_mean(error.part, error.known)
        fix = fix or "name a class in a file of this folder, or of one in PYTHONPATH, as module.Class"
        findings.error(_at(where, TARGET), f"{target} is not found", error.why, fix)
        return
    if not callable(make) or not (is_agent(make) or is_appworld_agent(make)):
        why = "it has neither play nor next_code_block"
        fix = "see roost.rollout.agents.agent.Agent, and roost.rollout.agents.appworld_agent.AppworldAgent"
        findings.error(_at(where, TARGET), f"{target} is no agent", why, fix)
        return
    _check_keys(target, make, agent_keys(config), where, findings)


def _check_keys(target: str, make: Any, keys: Mapping[str, Any], where: Where, findings: Findings) -> None:
    given = {"task", "llm"} if is_appworld_agent(make) else {"task"}
    optional = {RECORDER} if is_agent(make) else set()
    parameters = parameters_of(make)
    named = {
        name: each for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in sorted(given - set(named)):
        if not takes_any:
            fix = f"add {name} to the parameters of its constructor"
            findings.error(_at(where, TARGET), f"{target} does not take {name}", "every agent is made with it", fix)
    own = {name: each for name, each in named.items() if name not in given | optional}
    for name, parameter in own.items():
        if parameter.default is inspect.Parameter.empty and name not in keys:
            findings.error(where, f"{name} is missing", f"{target} has no default for it", f"add {name}: ...")
    for key in keys:
        if key in given | (optional & set(named)):
            fix = "leave it out"
            findings.error(_at(where, key), f"{key} cannot be set", "each episode's agent is made with its own", fix)
        elif key not in own and not takes_any:
            takes = f"it takes {', '.join(own)}" if own else "it takes no keys"
            fix = did_you_mean(key, own) or "leave it out"
            findings.error(_at(where, key), f"{key} is not a key of {target}", takes, fix)


def _at(where: Where, key: str) -> Where:
    return replace(where, path=(*where.path, key))
