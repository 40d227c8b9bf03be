"""The same placements in another notation, planned again and compared before anybody sees them."""

from __future__ import annotations

from typing import Any

from roost.placement.convert.to_loop import to_loop
from roost.placement.convert.to_rlinf import to_rlinf
from roost.placement.convert.to_roll import to_roll
from roost.placement.diff import diff_plans
from roost.placement.plan import Plan
from roost.placement.planner import try_plan
from roost.spec.errors import Findings, Where
from roost.spec.job import Notation

_WRITERS = {Notation.RLINF: to_rlinf, Notation.ROLL: to_roll, Notation.LOOP: to_loop}
_ABOUT_PLACES = ("machines", "component", "process", "environment")


def convert_plan(plan: Plan, notation: Notation, findings: Findings) -> dict[str, Any] | None:
    """A config in the notation that gives the same plan; what cannot be said there is a finding that names it."""
    errors = findings.num_errors
    config = _WRITERS[notation](plan, findings)
    if findings.num_errors > errors:
        return None
    again = Findings()
    made = try_plan(config, again, notation=notation)
    if made is None:
        for finding in again.errors:
            findings.error(Where(path=("converted", *finding.where.path)), finding.what, finding.why, finding.fix)
        return None
    for change in diff_plans(plan, made):
        if change.subject in _ABOUT_PLACES:
            findings.error(
                Where(),
                f"{notation.value} cannot say this placement: {change}",
                fix="keep the notation it is written in",
            )
    return config if findings.num_errors == errors else None
