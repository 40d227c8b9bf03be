"""Facts about a component's model that notations share, and the words each has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roost.config.findings import Findings, Where
from roost.config.job import ModelUse
from roost.placement.component_plan import ComponentPlan

KEEP = "keep the notation it is written in"


def precision(model: ModelUse) -> str:
    """The word for the bytes of a weight that all notations read."""
    return {4: "fp32", 1: "fp8"}.get(model.weight_bytes, "bf16")


def is_dealt(part: ComponentPlan) -> bool:
    """Return True for workers without devices that nothing placed: they are dealt out over the nodes."""
    return part.strategy == "SpreadPlacementStrategy"


def refuse_without(parts: Mapping[str, ComponentPlan], names: Sequence[str], findings: Findings) -> bool:
    """Return False, with a finding, where a component that the program cannot do without has no devices."""
    missing = [name for name in names if name not in parts]
    for name in missing:
        findings.error("RST-N048", Where(path=(name,)), "needs devices, and the plan gives it none", fix=KEEP)
    return not missing


def size_of_all(part: ComponentPlan, program: str, findings: Findings) -> int:
    """The devices of each engine; engines of several sizes are a finding."""
    sizes = np.unique(np.diff(part.table.offsets)).tolist()
    if len(sizes) > 1:
        why = f"its processes hold {', '.join(map(str, sizes))}"
        findings.error("RST-N049", Where(path=(part.name,)), f"{program} has engines of one size", why, KEEP)
    return int(sizes[-1])
