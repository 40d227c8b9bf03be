"""Agents from their configs: one for each episode."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from roost.rollout.agents.agent import Agent
from roost.rollout.agents.appworld_agent import AppworldAdapter
from roost.rollout.agents.recording import Recorder
from roost.rollout.check_target import own_keys
from roost.rollout.located import located
from roost.rollout.scenario import Task

RECORDER = "recorder"


def make_agent(config: Mapping[str, Any], task: Task, recorder: Recorder) -> Agent:
    """The agent of an episode: its class is called with the config's other keys and `task`.

    One that takes `recorder` gets it; one of the AppWorld contract also gets `llm`, when it begins.
    """
    make = located(config["_target_"])
    keys = own_keys(config)
    if is_appworld_agent(make):
        return AppworldAdapter(make, keys, task)
    given = {RECORDER: recorder} if RECORDER in parameters_of(make) else {}
    agent: Agent = make(task=task, **given, **keys)
    return agent


def is_appworld_agent(make: Any) -> bool:
    return callable(getattr(make, "next_code_block", None)) and not is_agent(make)


def is_agent(make: Any) -> bool:
    return callable(getattr(make, "play", None))


def parameters_of(make: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(make).parameters
