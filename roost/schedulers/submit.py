"""Hand a job file to its scheduler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from roost.schedulers.job_files import Scheduler

INSTALL = {
    "sbatch": "run this on a login node of the cluster, or install the client (Debian: apt-get install slurm-client)",
    "kubectl": "install kubectl (kubernetes.io/docs/tasks/tools) and point it at a cluster with the KubeRay operator",
    "sky": "pip install 'skypilot[kubernetes]' (or [aws], [gcp], ...), then: sky check",
    "dstack": "pip install dstack, then configure a project: dstack project add",
    "ssh": "install the OpenSSH client (Debian: apt-get install openssh-client)",
}


class CannotSubmit(RuntimeError):
    """The scheduler's tool is missing or failed."""


def submit_command(scheduler: Scheduler, file: Path, name: str, secrets: Sequence[str] = ()) -> list[str]:
    """The command that submits a job file.

    >>> submit_command(Scheduler.SLURM, Path("job.sbatch"), "math")
    ['sbatch', 'job.sbatch']
    >>> submit_command(Scheduler.SKYPILOT, Path("job.sky.yaml"), "math", ["HF_TOKEN"])[:4]
    ['sky', 'jobs', 'launch', '--yes']
    """
    secret_words = [word for secret in secrets for word in ("--secret", secret)]
    return {
        Scheduler.SLURM: ["sbatch", str(file)],
        Scheduler.KUBERAY: ["kubectl", "apply", "-f", str(file)],
        Scheduler.SKYPILOT: ["sky", "jobs", "launch", "--yes", "--name", name, *secret_words, str(file)],
        Scheduler.DSTACK: ["dstack", "apply", "-y", "-d", "-f", str(file)],
        Scheduler.SSH: ["bash", str(file)],
    }[scheduler]


def submit(scheduler: Scheduler, file: Path, name: str, secrets: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the scheduler's own command on a job file; return its exit code. Raise CannotSubmit if it is missing."""
    command = submit_command(scheduler, file, name, secrets)
    tool = "ssh" if scheduler is Scheduler.SSH else command[0]
    if shutil.which(tool, path=environ.get("PATH")) is None:
        raise CannotSubmit(f"{tool} is not installed here: {INSTALL[tool]}; the file is {file}")
    return subprocess.run(command, env=dict(environ), check=False).returncode
