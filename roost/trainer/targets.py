"""Objects that a config names by `_target_`: a scenario is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roost.rollout.scenario import Scenario, Split
from roost.spec.errors import Findings, Where

NEEDED = ("size", "task", "play")


def make_scenario(task: Mapping[str, Any], tokenizer: Any, where: Where, findings: Findings) -> Scenario | None:
    """The scenario of a run: its class is called with the config's other keys and `tokenizer`."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        # What is nested in it is the scenario's to make: an agent for each episode, environments perhaps elsewhere.
        made = instantiate(dict(task), _partial_=True, _convert_="all", _recursive_=False)(tokenizer=tokenizer)
    except InstantiationException as error:
        why = " ".join(str(error.__cause__ or error).split())
        fix = "name a class in a file of this folder, or of one in PYTHONPATH, as module.Class"
        findings.error(where, f"{task['_target_']} cannot be made", why, fix)
        return None
    except Exception as error:  # whatever a user's class raises
        fix = "give it the keys that its constructor has; it must also take tokenizer"
        findings.error(
            where, f"{task['_target_']} cannot be made from these keys", f"{type(error).__name__}: {error}", fix
        )
        return None
    missing = [name for name in NEEDED if not callable(getattr(made, name, None))]
    if missing:
        findings.error(
            where,
            f"{task['_target_']} is no scenario",
            f"it has no {', '.join(missing)}",
            "see roost.rollout.scenario.Scenario",
        )
        return None
    _check_agent(made, task, where, findings)
    wrong = _wrong_size(made)
    if wrong:
        fix = "give a whole number, 1 or more"
        findings.error(where, f"{task['_target_']} has no tasks to learn from", f"size(Split.TRAIN) {wrong}", fix)
        return None
    scenario: Scenario = made
    return scenario


def _check_agent(made: Any, task: Mapping[str, Any], where: Where, findings: Findings) -> None:
    """Agents are made for each episode: what is wrong with their keys is better known before."""
    path = getattr(made, "agent_path", ())
    agent: Any = task
    for key in path:
        agent = agent.get(key) if isinstance(agent, Mapping) else None
    if path and isinstance(agent, Mapping):
        from roost.rollout.agents.check import check_agent

        check_agent(agent, replace(where, path=(*where.path, *path)), findings)


def load_scenario(task: Mapping[str, Any], model: str) -> Scenario:
    """The scenario of a run, in a process that has only the names; what is wrong with it was found before launch."""
    from transformers import AutoTokenizer

    findings = Findings()
    made = make_scenario(task, AutoTokenizer.from_pretrained(model), Where(), findings)
    findings.raise_errors()
    if made is None:
        raise RuntimeError("a scenario without findings must have been made; please report it")
    return made


def _wrong_size(scenario: Scenario) -> str:
    """What is wrong with the number of tasks, if anything."""
    try:
        size: Any = scenario.size(Split.TRAIN)
    except Exception as error:  # whatever a user's class raises
        return f"raises {type(error).__name__}: {error}"
    return "" if isinstance(size, int) and size >= 1 else f"is {size!r}"
