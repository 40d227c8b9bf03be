"""Options that several commands take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from roost.cluster.hardware.registry import BUILT_IN, HardwareRegistry, installed_registry
from roost.spec.errors import Findings, Where
from roost.spec.job import Layout, Notation

GpusPerNode = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node", min=0, metavar="N", help="Accelerators on each node, where the config does not say."
    ),
]
InventoryFile = Annotated[
    Path | None,
    typer.Option(
        "--inventory", metavar="FILE", help="Machines to plan on (YAML or JSON), instead of those the config describes."
    ),
]
NotationChoice = Annotated[
    Notation | None,
    typer.Option("--notation", help="The notation of the config; recognised from its keys where left out."),
]
LayoutChoice = Annotated[
    Layout | None,
    typer.Option(
        "--layout",
        help="RLinf configs: place ranks as written, or cut them by the models' parallel sizes. "
        "What the config implies where left out.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Take a written worker size that contradicts the engine's parallel sizes as an error."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON (docs/plan-schema.md).")]


def hardware_registry(findings: Findings) -> HardwareRegistry:
    """The hardware Roost knows and what the user has added; an addition that cannot be loaded is a finding."""
    try:
        return installed_registry(os.environ)
    except ValueError as error:
        findings.error(Where("hardware registry"), str(error))
        return BUILT_IN
