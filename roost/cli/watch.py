"""`roost watch`: the report of a run as a page that follows it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from roost.cli.console import open_console
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.live_page import LivePage


def watch_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/first.", metavar="RUN")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on loopback; 0: any free one.")] = 0,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve the report of a run on loopback until Ctrl-C; the page loads again every few seconds while the run goes on.

    From another machine: ssh -L PORT:127.0.0.1:PORT HOST.
    """
    notes = open_console(stderr=True)
    try:
        page = LivePage(RunFolder.open(run), port)
    except FileNotFoundError as error:
        notes.print(f"error: {error}", soft_wrap=True)
        raise typer.Exit(2) from None
    except OSError as error:
        notes.print(f"error: port {port} cannot be used: {error.strerror}; leave --port out", soft_wrap=True)
        raise typer.Exit(1) from None
    with page, contextlib.suppress(KeyboardInterrupt):
        print(page.url, flush=True)
        if opens:
            import webbrowser

            webbrowser.open(page.url)
        page.serve()
