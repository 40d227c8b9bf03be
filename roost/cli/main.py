"""`roost`: the entry point of the command line."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import roost
from roost.view.plain import PlainFormatter, plain_line, print_exception

HELP = """Place, launch and run reinforcement-learning post-training jobs on any mix of machines.

A config says which machines there are and which component runs where, in the notation of RLinf (cluster:), \
ROLL (device_mapping) or ml-loop (learning_gpus, inference_gpus). Configs and scripts of verl, \
slime, OpenRLHF, NeMo-RL and others are planned too, and `roost train` trains those of verl and TRL."""

# In the order of the help. A command is the function NAME_command of the module NAME, or of the one in MODULES.
COMMANDS = (
    "plan",
    "check",
    "diff",
    "convert",
    "doctor",
    "download",
    "eval",
    "explain",
    "explain-finding",
    "inventory",
    "launch",
    "logs",
    "report",
    "scale",
    "schema",
    "sft",
    "status",
    "stop",
    "train",
    "try",
    "watch",
    "up",
)
MODULES = {
    "sft": "train",
    "try": "try_",
    "convert": "diff",
    **dict.fromkeys(("status", "logs", "scale", "stop", "watch", "report", "download"), "runs"),
}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"roost {roost.__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Global options."""


def build_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Build the app with these commands; import only their modules."""
    app = typer.Typer(
        name="roost", help=HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(_main)
    for name in names:
        word = name.replace("-", "_")
        module = MODULES.get(word, word)
        app.command(name)(getattr(importlib.import_module(f"roost.cli.{module}"), f"{word}_command"))
    return app


def needed_commands(arguments: Sequence[str]) -> Sequence[str]:
    """Return the command being called, none for the version, or all if help or an error has to list them.

    >>> needed_commands(["plan", "job.yaml"]), needed_commands(["--help"]) == COMMANDS
    (['plan'], True)
    """
    if list(arguments) == ["--version"]:
        return []
    return list(arguments[:1]) if arguments and arguments[0] in COMMANDS else COMMANDS


CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE, errno.EBADF)


def run() -> None:
    """Run the command line; replace characters that the terminal cannot show, and report failed writes in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.excepthook = print_exception
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())
    gc.disable()  # imports create many objects that are never freed
    app = build_app(needed_commands(sys.argv[1:]))
    gc.freeze()
    gc.enable()
    try:
        app()
    except OSError as error:
        if error.errno is None:  # raised by Roost with a message, such as a ConnectionError
            sys.exit(f"error: {plain_line(str(error))}")
        if error.errno not in CANNOT_WRITE:
            raise
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        # At exit Python would try to flush the rest of the output, and fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
