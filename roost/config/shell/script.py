"""Read a script from a file: the commands it would start, with the environment and arguments of the caller."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from roost.config.findings import Findings, Where
from roost.config.shell.interpreter import Interpreter
from roost.config.shell.slurm import batch_variables
from roost.config.shell.state import Reading, Value, initial_state
from roost.config.source import read_text

COMMAND_LINE = "command line"
MAX_SCRIPT_BYTES = 1 << 18


def read_script(
    file: Path,
    arguments: Sequence[str],
    findings: Findings,
    environ: Mapping[str, str] = os.environ,
    job_commands: Sequence[str] = (),
) -> Reading | None:
    """Read the commands that a script would start; None, with findings, if the file cannot be read.

    `job_commands` are the variables that hold the command of a batch script, such as COMMAND of NeMo-RL.
    """
    text = _text_of(file, findings)
    if text is None:
        return None
    if "\r\n" in text:
        line = text[: text.index("\r\n")].count("\n") + 1
        findings.warn(
            "RST-C053",
            Where(str(file), line),
            "has Windows line endings, with which bash does not run it",
            "bash takes the carriage return for a part of the last word of each line",
            f"convert it with dos2unix, or sed -i 's/\\r$//' {file}",
        )
        text = text.replace("\r\n", "\n")
    given = tuple(Value((word,) if word else (), (COMMAND_LINE, None, None)) for word in arguments)
    state = initial_state(environ, given, str(file))
    state.add_slurm_variables(batch_variables(text, str(file)), environ)
    return Interpreter(environ, _read_quietly, job_commands).read(text, str(file), state)


def _text_of(file: Path, findings: Findings) -> str | None:
    return read_text(file, findings, "a script", "give the script that starts the job", MAX_SCRIPT_BYTES)


def _read_quietly(file: Path) -> str | None:
    """The text of a script that another one names; None if it does not exist."""
    try:
        return _text_of(file, Findings()) if file.is_file() else None
    except (OSError, ValueError):
        return None
