"""`roost`: the entry point of the command line."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import Annotated

import typer

import roost
from roost.cli.check import check_command
from roost.cli.convert import convert_command
from roost.cli.diff import diff_command
from roost.cli.explain import explain_command
from roost.cli.inventory import inventory_command
from roost.cli.plan import plan_command
from roost.cli.report import report_command
from roost.cli.schema import schema_command
from roost.cli.train import train_command
from roost.view.plain import PlainFormatter, plain_line, print_exception

app = typer.Typer(
    name="roost",
    help="Place, launch and run reinforcement-learning post-training jobs on any mix of machines.\n\n"
    "A config says which machines there are and which component runs where, in the notation of RLinf (cluster:), "
    "ROLL (device_mapping) or ml-loop (learning_gpus, inference_gpus).",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("plan")(plan_command)
app.command("check")(check_command)
app.command("diff")(diff_command)
app.command("convert")(convert_command)
app.command("explain")(explain_command)
app.command("inventory")(inventory_command)
app.command("report")(report_command)
app.command("schema")(schema_command)
app.command("train")(train_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"roost {roost.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options that stand before a command."""


CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE, errno.EBADF)


def run() -> None:
    """Run the command line on any terminal: what it cannot show is replaced, and a full disk is said to be one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.excepthook = print_exception
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())
    try:
        app()
    except OSError as error:
        is_output = error.errno in CANNOT_WRITE
        reason = f"the output cannot be written: {error.strerror}" if is_output else plain_line(str(error))
        print(f"error: {reason}", file=sys.stderr)
        # Python would try to write the rest of the output once more when it ends, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
