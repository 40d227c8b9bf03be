"""A real Slurm on this machine: one controller, and one daemon for each node, on ports of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.limits import HANG_S

TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
CONF = """
ClusterName=roost
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
{nodes}
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def slurm(folder: Path, nodes, partitions):
    """Run a Slurm with these nodes (name, options) and partitions (lines); yields the environment for its commands."""
    if os.getuid() or any(shutil.which(tool) is None for tool in TOOLS):
        pytest.skip("Slurm is not installed here: apt-get install slurm-wlm munge, and run as root")
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    written = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} {options}"
        for name, options in nodes
    ]
    conf = CONF.format(folder=folder, host=host, port=free_port(), nodes="\n".join([*written, *partitions]))
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(
        "".join(f"NodeName={name} Name=gpu File={folder}/gpu[0-7]\n" for name, options in nodes if "gpu:8" in options)
    )
    for number in range(8):
        (folder / f"gpu{number}").touch()  # stands for a device
    (folder / "state").mkdir()
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with contextlib.ExitStack() as ends:
        subprocess.run(["mungekey", "-c", "-k", str(folder / "munge.key")], check=True)
        ends.callback(end, folder / "munge.pid")
        munge = [f"--{name}={folder / file}" for name, file in MUNGE.items()]
        subprocess.run(["munged", "--force", *munge], check=True, timeout=HANG_S)
        ends.callback(end, folder / "slurmctld.pid")
        subprocess.run(["slurmctld"], env=environ, check=True, timeout=HANG_S)
        for name, _ in nodes:
            ends.callback(end, folder / f"slurmd.{name}.pid")
            subprocess.run(["slurmd", "-N", name], env=environ, check=True, timeout=HANG_S)
        wait_until(lambda: idle(environ) == len(nodes), f"{len(nodes)} idle nodes")
        yield environ


MUNGE = {
    "key-file": "munge.key",
    "socket": "munge.socket",
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


def idle(environ):
    words = ["sinfo", "--noheader", "--states=idle", "--Node", "--format=%N"]
    return len(set(subprocess.run(words, env=environ, capture_output=True, text=True, check=False).stdout.split()))


def wait_until(is_done, what):
    deadline = time.monotonic() + HANG_S
    while not is_done():
        assert time.monotonic() < deadline, f"waited {HANG_S} s for {what}"
        time.sleep(0.2)


def end(pid_file):
    """End a daemon by its pid file, and wait until it is gone."""
    try:
        process = int(pid_file.read_text())
        os.kill(process, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return

    def is_gone():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    wait_until(is_gone, f"the end of process {process}")
