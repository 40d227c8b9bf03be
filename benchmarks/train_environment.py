"""The virtual environment of TRL, separate from Roost's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

# Within the folder of the other peer, which git ignores.
FOLDER = Path(__file__).parent / ".peer" / "trl"
TORCH = "torch==2.13.0"  # first, so that nothing else chooses a build of it
PEER = "trl==1.16.0"


def interpreter() -> Path:
    return FOLDER / "bin" / "python"


def find(named: Path | None) -> Path | None:
    """TRL's interpreter: the given one, else that of `set_up`, else None."""
    if named is not None:
        return named.absolute()  # not resolved: an environment's interpreter is a link out of it
    return interpreter() if interpreter().exists() else None


def set_up(progress: Console) -> None:
    """Create the environment, or complete it."""
    progress.print("setting up TRL's environment")
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(interpreter()), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, TORCH], check=True)
    subprocess.run([*install, TORCH, PEER, "jinja2"], check=True)
