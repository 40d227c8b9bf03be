"""`roost explain-finding`: what the code of a finding means."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from roost.cli.options import open_console
from roost.config.finding_codes import finding_kinds, spelled_code
from roost.config.findings import did_you_mean


def explain_finding_command(
    code: Annotated[
        str | None,
        typer.Argument(help="A code such as RST-P007; p007 is enough (default: list all codes).", metavar="CODE"),
    ] = None,
) -> None:
    """Explain a finding by the code in its message: what it means, the usual fix, and an example.

    For instance: roost explain-finding RST-P007
    """
    kinds = finding_kinds()
    console = open_console()
    if code is None:
        for kind in kinds.values():
            console.print(Text.assemble((kind.code, "bold"), f"  {kind.title}"), soft_wrap=True)
        return
    found = kinds.get(spelled_code(code))
    if found is None:
        hint = did_you_mean(spelled_code(code), kinds) or "roost explain-finding lists all codes"
        raise typer.BadParameter(f"there is no finding {code}; {hint}", param_hint="CODE")
    console.print(Text.assemble((found.code, "bold"), f" ({found.area}): {found.title}"), soft_wrap=True)
    console.print(Text(f"\n{found.explanation}"), soft_wrap=True)
    if found.example:
        console.print(Text(f"\nExample\n\n{found.example}"), soft_wrap=True)
