"""The phases of a training step, and which components work in each."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from roost.config.job import Role, family


class Phase(StrEnum):
    """A phase of a training step; sequential in synchronous modes."""

    GENERATE = "generate"  # engines generate rollouts, with environments, agents and rewards
    INFER = "infer"  # log-probs and values of finished rollouts
    LEARN = "learn"  # gradients and optimizer steps
    SYNC = "sync"  # new weights are sent to the engines


class State(StrEnum):
    """State of a component on its device in a phase."""

    RUNS = "runs"
    STAYS = "stays"  # idle, but everything stays in device memory
    SLEEPS = "sleeps"  # an engine that has freed its memory and can wake up
    OFFLOADED = "offloaded"  # a learner or scorer whose state is in host memory
    STOPPED = "stopped"  # an engine that must be started again
    UNUSED = "unused"  # no phase ever uses it


def trains_policy(name: str, role: Role) -> bool:
    """Return True if a learner trains the policy; a critic has its own weights."""
    return role is Role.LEARNER and name != "critic"


def takes_policy(name: str, role: Role) -> bool:
    """Return True if an engine generates with the policy; a judge has its own weights."""
    return role is Role.ENGINE and family(name) in ("rollout", "student_infer")


def works_in(name: str, role: Role, phase: Phase, names: Collection[str]) -> bool:
    """Return True if a component works in a phase; `names` are all components of the job.

    >>> works_in("actor", Role.LEARNER, Phase.INFER, ["actor", "rollout"])
    True
    >>> works_in("actor", Role.LEARNER, Phase.INFER, ["actor", "rollout", "inference"])
    False
    """
    if phase is Phase.GENERATE:
        return role in (Role.ENGINE, Role.HELPER)
    if phase is Phase.LEARN:
        return role is Role.LEARNER
    if phase is Phase.SYNC:
        return trains_policy(name, role) or takes_policy(name, role)
    # Without an inference component, the learner computes log-probs and the critic computes values.
    has_own = f"{name}_inference" in names or (name == "actor" and "inference" in names)
    return role is Role.SCORER or (role is Role.LEARNER and not has_own)
