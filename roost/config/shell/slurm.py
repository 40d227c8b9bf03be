"""Variables that Slurm gives a batch script, from its `#SBATCH` lines and the options of `sbatch`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from roost.config.findings import Position
from roost.config.shell.state import Value

_LETTERS = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus"}
_VARIABLES: Mapping[str, Sequence[str]] = {
    "--nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus": ("SLURM_GPUS",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "on node": ("SLURM_GPUS_ON_NODE",),
}
_GPUS = re.compile(r"(?:gres[:/])?gpu(?::[A-Za-z][\w.-]*)?[:=](\d+)")  # gpu:8, gpu:h100:8


def batch_variables(text: str, file: str | None, options: Sequence[str] = ()) -> dict[str, Value]:
    """Variables by name, each at its `#SBATCH` line; options of `sbatch` override these lines."""
    found: dict[str, tuple[str, Position]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            place = (file, number, 1) if file is not None else (None, None, None)
            found |= {name: (value, place) for name, value in _read(_words(line))}
    found |= {name: (value, (None, None, None)) for name, value in _read(options)}
    tasks, nodes = found.get("--ntasks-per-node"), found.get("--nodes")
    if tasks and nodes and tasks[0] and nodes[0] and "--ntasks" not in found:
        found["--ntasks"] = (str(int(tasks[0]) * int(nodes[0])), tasks[1])
    known = ((key, Value((value,), place)) for key, (value, place) in found.items() if value)
    return {name: value for key, value in known for name in _VARIABLES[key]}


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:  # a quote that is not closed
        return []


def _read(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options that count something, by their long names; a value that is no number is empty."""
    for at, word in enumerate(words):
        match = re.fullmatch(r"(--[a-z-]+)=(.*)|(-[NncG])=?(.+)", word)
        following = words[at + 1] if at + 1 < len(words) else ""
        name, value = (match[1] or match[3], match[2] or match[4] or "") if match else (word, following)
        name = _LETTERS.get(name, name)
        gpus = _GPUS.fullmatch(value) if name == "--gres" else re.fullmatch(r"(?:[\w.-]+:)?(\d+)", value)
        if name in ("--gres", "--gpus-per-node"):
            yield "on node", gpus[1] if gpus else ""
        if name in _VARIABLES:
            is_number = bool(gpus) if name.startswith("--gpus") else value.isdigit()
            yield name, value if is_number else ""
