"""Objects that a config names by `_target_`: a scenario is one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from roost.config.errors import Findings, Where
from roost.procs.user_code import call
from roost.rollout.check_target import check_target
from roost.rollout.parts import SCENARIO
from roost.rollout.scenario import Scenario, Split
from roost.trainer.tokenizers import load_tokenizer


def make_scenario(task: Mapping[str, Any], tokenizer: Any, where: Where, findings: Findings) -> Scenario | None:
    """The scenario of a run: its class is called with the config's other keys and `tokenizer`."""
    from hydra.utils import instantiate

    if not check_target(task, where, SCENARIO, findings):
        return None
    try:
        # What is nested in it is the scenario's to make: an agent for each episode, environments perhaps elsewhere.
        make = instantiate(dict(task), _partial_=True, _convert_="all", _recursive_=False)
        made = call(partial(make, tokenizer=tokenizer))
    except Exception as error:  # whatever a user's class raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "correct the keys that it names"
        findings.error(where, f"{task['_target_']} cannot be made from these keys", why, fix)
        return None
    if not check_target(made, where, SCENARIO, findings):  # a function may give anything
        return None
    wrong = _wrong_size(made)
    if wrong:
        fix = "give a whole number, 1 or more"
        findings.error(where, f"{task['_target_']} has no tasks to learn from", f"size(Split.TRAIN) {wrong}", fix)
        return None
    scenario: Scenario = made
    return scenario


def load_scenario(task: Mapping[str, Any], model: str, tokenizer_class: str = "") -> Scenario:
    """The scenario of a run, in a process that has only the names; what is wrong with it was found before launch."""
    findings = Findings()
    made = make_scenario(task, load_tokenizer(model, tokenizer_class), Where(), findings)
    findings.raise_errors()
    if made is None:
        raise RuntimeError("a scenario without findings must have been made; please report it")
    return made


def _wrong_size(scenario: Scenario) -> str:
    """What is wrong with the number of tasks, if anything."""
    try:
        size: Any = call(scenario.size, Split.TRAIN)
    except Exception as error:  # whatever a user's class raises
        return f"raises {type(error).__name__}: {error}"
    return "" if isinstance(size, int) and size >= 1 else f"is {size!r}"
