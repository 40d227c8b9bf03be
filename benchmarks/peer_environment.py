"""The virtual environment in which the peer runs, apart from Roost's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / ".peer"
PEER = "rlinf==0.3.0"
# What its planner imports. Its own list of dependencies is for training and is far longer. torch is pinned because
# the newest release brings gigabytes that planning does not need.
NEEDED = ("torch==2.13.0", "ray==2.60.0", "omegaconf==2.3.1", "numpy==2.4.6")


def interpreter() -> Path:
    return FOLDER / "bin" / "python"


def find(named: Path | None) -> Path | None:
    """The peer's interpreter: the one named, else the one that `set_up` made, else None."""
    if named is not None:
        return named.absolute()  # not resolved: an environment's interpreter is a link out of it
    return interpreter() if interpreter().exists() else None


def set_up() -> None:
    """Make the environment, or complete it."""
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(interpreter()), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *NEEDED], check=True)
    subprocess.run([*install, "--no-deps", PEER], check=True)
