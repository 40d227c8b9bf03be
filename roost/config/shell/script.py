"""Read a script from a file: the commands it would start, with the environment and arguments of the caller."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from roost.config.findings import Findings
from roost.config.shell.interpreter import Interpreter
from roost.config.shell.reading import Reading
from roost.config.shell.state import initial_state
from roost.config.shell.values import Value
from roost.config.source import read_text

COMMAND_LINE = "command line"
MAX_SCRIPT_BYTES = 1 << 18


def read_script(
    file: Path, arguments: Sequence[str], findings: Findings, environ: Mapping[str, str] = os.environ
) -> Reading | None:
    """Read the commands that a script would start; None, with findings, if the file cannot be read."""
    text = _text_of(file, findings)
    if text is None:
        return None
    given = tuple(Value((word,) if word else (), (COMMAND_LINE, None, None)) for word in arguments)
    state = initial_state(environ, given, str(file))
    return Interpreter(environ, _read_quietly).read(text, str(file), state)


def _text_of(file: Path, findings: Findings) -> str | None:
    text = read_text(file, findings, "a script", "give the script that starts the job", MAX_SCRIPT_BYTES)
    return None if text is None else text.replace("\r\n", "\n")


def _read_quietly(file: Path) -> str | None:
    """The text of a script that another one names; None if it does not exist."""
    try:
        return _text_of(file, Findings()) if file.is_file() else None
    except (OSError, ValueError):
        return None
