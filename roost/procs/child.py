"""Start child processes that end with their parent."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roost.procs import server_keeper
from roost.procs.logs import last_lines
from roost.procs.server_keeper import Link

START_LIMIT = 60.0  # seconds for the process to be there, not for what it serves to be ready
LINES_TOLD = 15


def start_kept(name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> tuple[Link, int]:
    """Start a program whose prints go to the log; its keeper, and the number of its process.

    Closing the link, or losing it, ends the program. OSError where it cannot be started.
    """
    link = _keeper(name, log)
    link.tell(argv=list(command), env=dict(env), log=str(log), owner=os.getpid())
    deadline = time.monotonic() + START_LIMIT
    heard: list[dict[str, Any]] = []
    while not heard and not link.is_closed and time.monotonic() < deadline:
        heard = link.heard(wait=max(0.0, deadline - time.monotonic()))
    if heard and "started" in heard[0]:
        return link, heard[0]["started"]
    link.close()
    why = heard[0]["failed"] if heard else last_lines(log, LINES_TOLD)
    raise OSError(f"{name} could not be started with {command[0]}: {why}")


def left_keepers(name: str, folder: Path) -> list[int]:
    """Keepers that another process left, by their name and log folder; each ends together with its server.

    Names repeat: every run has a rollout-0, and several runs may share a machine.
    """
    command = _command(name, folder)
    found = []
    import psutil  # not above: a plain install, which only plans, has none

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == command:
                found.append(process.pid)
    return found


def _command(name: str, folder: Path) -> list[str]:
    # -P: the folder of the program is no place to import from; name and folder identify it in a list of processes
    return [sys.executable, "-P", server_keeper.__file__, name, str(folder)]


def _keeper(name: str, log: Path) -> Link:
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as printed:
        launcher = subprocess.Popen(
            _command(name, log.parent),
            stdin=theirs.fileno(),
            stdout=printed,
            stderr=printed,
            start_new_session=True,  # an interrupt from the terminal is for the owner
        )
    try:
        launcher.wait(START_LIMIT)  # it goes as soon as the keeper is there
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
        ours.close()
        raise OSError(f"{name}: no process could be started within {START_LIMIT:g} s") from None
    return Link(ours)


RANKS = {
    # torchrun and everything that speaks its language
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    # Slurm's place of a task; its job's variables stay
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    # Roost's workers
    *("GROUP_NAME", "WORKER_NAME", "CLUSTER_NODE_RANK", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE"),
    *("NODE_GROUP_LABEL", "LOCAL_HARDWARE_RANKS", "ACCELERATOR_TYPE", "ROOST_NODE_RANK", "RLINF_NODE_RANK"),
}
# Settings of a learner that are wrong for a server: sleeping, for one, does not work with expandable segments.
LEARNING = {
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "NCCL_ASYNC_ERROR_HANDLING"),
}
LAUNCHERS = (
    *("TORCHELASTIC_", "PET_", "ACCELERATE_", "FSDP_", "MEGATRON_LM_", "TORCH_NCCL_"),
    *("OMPI_", "PMI_", "PMIX_", "MV2_", "RAY_"),
)
RAYS_DEBUGGER = "ray."  # Ray sends breakpoints to itself, which a server need not have


def child_env(outer: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """What a server gets: everything of the user, the mask of visible devices included, and what it is given itself.

    OMP_NUM_THREADS stays: Ray writes the cores that a worker was given there, and a server is to stay within them.

    >>> child_env({"HOME": "/home/ann", "CUDA_VISIBLE_DEVICES": "3", "RANK": "5", "RAY_JOB_ID": "01"}, {"SEED": "1"})
    {'HOME': '/home/ann', 'CUDA_VISIBLE_DEVICES': '3', 'SEED': '1'}
    """
    kept = {name: value for name, value in outer.items() if not _is_the_owners(name, value)}
    return {**kept, **added}


def _is_the_owners(name: str, value: str) -> bool:
    if name == "PYTHONBREAKPOINT":
        return value.startswith(RAYS_DEBUGGER)
    return name in RANKS or name in LEARNING or name.startswith(LAUNCHERS)
