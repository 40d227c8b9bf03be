"""`roost schema`: JSON Schema for editors."""

from __future__ import annotations

import json

import typer

from roost.cli.options import NotationChoice
from roost.config.job import TRAINED
from roost.config.schema import config_schema


def schema_command(notation: NotationChoice = None) -> None:
    """Print the JSON Schema of configs, for editors.

    Save it and point your editor at it, for instance with this first line in a config:
    # yaml-language-server: $schema=roost.schema.json
    """
    if notation is not None and not notation.is_trained:
        known = ", ".join(each.value for each in TRAINED)
        reason = f"there is no schema for {notation.program} jobs; there is one for {known}"
        raise typer.BadParameter(reason, param_hint="--notation")
    print(json.dumps(config_schema(notation), indent=2))
