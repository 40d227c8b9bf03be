"""The virtual environment of the peer, separate from Roost's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

FOLDER = Path(__file__).parent / ".peer"
PEER = "rlinf==0.3.0"
# What its planner imports. Its own list of dependencies is for training and is far longer. torch is pinned because
# the newest release brings gigabytes that planning does not need.
NEEDED = ("torch==2.13.0", "ray==2.60.0", "omegaconf==2.3.1", "numpy==2.4.6")

PeerPython = Annotated[Path | None, typer.Option(exists=True, help="The interpreter that has the peer.")]
SetupPeer = Annotated[bool, typer.Option("--setup-peer", help="Create benchmarks/.peer first.")]


def interpreter() -> Path:
    return FOLDER / "bin" / "python"


def find(named: Path | None) -> Path | None:
    """The peer's interpreter: the given one, else that of `set_up`, else None."""
    if named is not None:
        return named.absolute()  # not resolved: an environment's interpreter is a link out of it
    return interpreter() if interpreter().exists() else None


def print_no_peer(console: Console) -> None:
    console.print("No comparison: there is no peer. Make one with --setup-peer, or name it with --peer-python.\n")


def set_up(progress: Console) -> None:
    """Create the environment, or complete it."""
    progress.print("setting up the peer's environment")
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(interpreter()), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *NEEDED], check=True)
    subprocess.run([*install, "--no-deps", PEER], check=True)
