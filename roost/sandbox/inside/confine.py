"""Confine the sandboxed process before it receives any code: drop all rights that the code does not need."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

from roost.sandbox.inside import landlock, seccomp
from roost.sandbox.inside.kernel import PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, Kernel

_NEW_USER_NAMESPACE = 0x10000000
_NOBODY = 65534
_LAST_CAPABILITY = 63  # upper bound of all kernels


def confine(request: dict[str, Any]) -> dict[str, Any]:
    """Confine this process as requested; return the isolation in force."""
    os.chdir(request["folder"])
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_FSIZE", request["file_bytes"])
    _limit("RLIMIT_NOFILE", request["open_files"])
    _limit("RLIMIT_CPU", request["cpu_s"], spare=1)  # SIGXCPU, which shows the reason, comes before SIGKILL
    _limit("RLIMIT_MEMLOCK", 0)
    in_force = {"landlock": 0, "seccomp": False, "namespace": False}
    if sys.platform == "linux":
        in_force = _confine_on_linux(request)
    _limit("RLIMIT_AS", request["memory_bytes"])
    return in_force


def _confine_on_linux(request: dict[str, Any]) -> dict[str, Any]:
    kernel = Kernel()
    if os.geteuid() == 0:
        _drop_root(kernel)
    namespace = _enter_namespace(kernel)
    if namespace:  # without one the limit would count all processes of the user, also the trainer's
        _limit("RLIMIT_NPROC", request["processes"])
    kernel.drop_capabilities()
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which would reset it
    if os.getppid() != request["parent"]:
        os._exit(1)  # the parent died before this process was set to die with it
    kernel.prctl(PR_SET_NO_NEW_PRIVS, 1)
    version = landlock.restrict(
        kernel, request["readable"], request["folder"], ["/dev/null", "/dev/zero", "/dev/urandom"]
    )
    return {"landlock": version, "seccomp": _filter(kernel), "namespace": namespace}


def _drop_root(kernel: Kernel) -> None:
    """Change root's real user, because root is exempt from the process limit; files are still read as root."""
    try:
        os.setgroups([])
        os.setresuid(_NOBODY, 0, 0)
    except OSError:
        return  # root of a user namespace, which cannot change its user
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            kernel.prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # the kernel has no more


def _enter_namespace(kernel: Kernel) -> bool:
    try:
        kernel.unshare(_NEW_USER_NAMESPACE)
    except OSError:
        return False
    return True


def _filter(kernel: Kernel) -> bool:
    machine = os.uname().machine
    if machine not in seccomp.ARCHITECTURES or sys.maxsize < 1 << 32:
        return False
    try:
        kernel.filter_calls(seccomp.filter_program(machine, os.getpid()))
    except OSError:
        return False
    return True


def _limit(name: str, most: int, spare: int = 0) -> None:
    """Set a limit, unless the current one is lower."""
    kind: int | None = getattr(resource, name, None)
    if kind is None:
        return
    _, hard = resource.getrlimit(kind)
    allowed = most + spare if hard == resource.RLIM_INFINITY else min(most + spare, hard)
    try:
        resource.setrlimit(kind, (min(most, allowed), allowed))
    except (OSError, ValueError):
        if sys.platform == "linux":  # macOS has limits that cannot be set
            raise
