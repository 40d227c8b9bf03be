"""`python -m roost` is the command `roost`."""

from __future__ import annotations

from roost.cli.main import run

if __name__ == "__main__":
    run()
