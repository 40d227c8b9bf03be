"""Convert a plan to another notation; the result is planned again and compared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from roost.config.findings import Findings, Where
from roost.config.job import ModelUse, Notation
from roost.placement.convert.to_loop import to_loop
from roost.placement.convert.to_rlinf import to_rlinf
from roost.placement.convert.to_roll import to_roll
from roost.placement.diff import diff_plans
from roost.placement.plan import Plan
from roost.placement.planner import try_plan

_WRITERS = {Notation.RLINF: to_rlinf, Notation.ROLL: to_roll, Notation.LOOP: to_loop}
_ABOUT_PLACES = ("machines", "component", "process", "environment")
_LOSSES = ("settings", "sizes", "role", "residency")
# The same switch under two names.
_ASYNC = ("async_rollouts", "async_generation_ratio")


def convert_plan(plan: Plan, notation: Notation, findings: Findings) -> dict[str, Any] | None:
    """A config in the notation that places every process alike.

    A placement that cannot be said there is an error; a setting that is lost on the way is a warning that names it.
    """
    errors = findings.num_errors
    config = _WRITERS[notation](plan, findings)
    if findings.num_errors > errors:
        return None
    again = Findings()
    # ml-loop does not describe its machine; the other notations do, and must do it right.
    result = try_plan(config, again, plan.inventory if notation is Notation.LOOP else None, notation=notation)
    if result is None:
        for finding in again.errors:
            what = f"{notation.value} cannot say this plan: {finding.where.key_path} {finding.what}"
            findings.error("RST-N044", Where(), what, finding.why, finding.fix)
        return None
    for change in diff_plans(plan, result):
        if change.subject in _ABOUT_PLACES:
            what = f"{notation.value} cannot say this placement: {change}"
            findings.error("RST-N045", Where(), what, fix="keep the notation it is written in")
        elif change.subject in _LOSSES and not _is_said_otherwise(change.component, plan, result):
            what = f"{notation.value} does not say this: {change}"
            findings.warn("RST-N046", Where(), what, fix="set it again where the job is trained")
    for part in plan.components:
        lost = _lost_settings(part.model, result[part.name].model)
        if lost:
            what = f"{notation.value} does not say {', '.join(lost)} of {part.name}"
            findings.warn("RST-N046", Where(path=(part.name,)), what, fix="set it again where the job is trained")
    return config if findings.num_errors == errors else None


def _lost_settings(written: ModelUse, result: ModelUse) -> list[str]:
    """Settings of a component's model that the plan has and the converted config does not."""
    unset = ModelUse()
    names = [part.name for part in fields(ModelUse) if part.name not in ("config", "tokens", "sequence")]
    return [
        name for name in names
        if getattr(written, name) not in (getattr(unset, name), getattr(result, name))
    ]  # fmt: skip


def _is_said_otherwise(key: str | None, plan: Plan, result: Plan) -> bool:
    """Return True if a setting is another notation's name for something that the plan has."""
    if key not in _ASYNC:
        return result.settings.get(key or "") is None and not plan.settings.get(key or "") and key in plan.settings
    values = [bool(one.settings.get(_ASYNC[0]) or one.settings.get(_ASYNC[1])) for one in (plan, result)]
    return values[0] == values[1]
