"""Which notation a config is written in, and reading it into a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roost.spec.errors import Findings
from roost.spec.job import Job, Layout, Notation
from roost.spec.loop import read_loop
from roost.spec.rlinf import read_rlinf
from roost.spec.roll import holds_role, read_roll
from roost.spec.section import Section
from roost.spec.source import Source

_SIGNS = {
    Notation.RLINF: "cluster.component_placement (RLinf)",
    Notation.ROLL: "device_mapping or world_size in a role (ROLL)",
    Notation.LOOP: "rl.gpu_allocation (ml-loop)",
}


def read_job(
    source: Source,
    findings: Findings,
    notation: Notation | None = None,
    layout: Layout | None = None,
    strict: bool = False,
) -> Job | None:
    """Read a config in the notation its keys show, or in the one given.

    Mistakes go to `findings`; the job holds what could be read, and None means that the notation is not clear.
    """
    root = Section.root(source, findings)
    notation = notation or recognise(root)
    if notation is None:
        return None
    if notation is Notation.RLINF:
        job = read_rlinf(root, layout)
    elif notation is Notation.ROLL:
        job = read_roll(root, strict)
    else:
        job = read_loop(root)
    if not job.components and not findings.errors:
        root.findings.error(root.where(), "places no component", fix=f"write at least one: {_SIGNS[notation]}")
    return replace(job, warnings=findings.warnings)


def recognise(root: Section) -> Notation | None:
    """The notation by the keys that only it has; none or several are a finding."""
    values = root.values
    shown_by = {
        Notation.RLINF: "cluster" in values,
        Notation.LOOP: isinstance(values.get("rl"), Mapping) and "gpu_allocation" in values["rl"],
        Notation.ROLL: any(holds_role(value) for value in values.values())
        or any(
            holds_role(inner) for value in values.values() if isinstance(value, Mapping) for inner in value.values()
        ),
    }
    found = [notation for notation, is_shown in shown_by.items() if is_shown]
    if len(found) == 1:
        return found[0]
    if (
        Notation.RLINF in found
        and isinstance(values["cluster"], Mapping)
        and "component_placement" in values["cluster"]
    ):
        return Notation.RLINF
    if not found:
        root.findings.error(
            root.where(),
            "is in none of the notations Roost knows",
            f"none of these keys is there: {'; '.join(_SIGNS.values())}",
            "write one of them, or name the notation with --notation",
        )
    else:
        root.findings.error(
            root.where(),
            f"could be {' or '.join(_SIGNS[notation] for notation in found)}",
            fix="name the notation with --notation rlinf, roll or loop",
        )
    return None
