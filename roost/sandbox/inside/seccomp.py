"""Seccomp filter of a sandbox: the system calls that its interpreter may make, as a BPF program."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

MACHINES = ("x86_64", "aarch64")

# name, number on x86_64, number on aarch64 ("-": it has none)
_ALLOWED = """
read 0 63                write 1 64              readv 19 65               writev 20 66
pread64 17 67            pwrite64 18 68          preadv 295 69             pwritev 296 70
preadv2 327 286          pwritev2 328 287        close 3 57                close_range 436 436
lseek 8 62               stat 4 -                fstat 5 80                lstat 6 -
newfstatat 262 79        statx 332 291           access 21 -               faccessat 269 48
faccessat2 439 439       readlink 89 -           readlinkat 267 78         getdents 78 -
getdents64 217 61        getcwd 79 17            chdir 80 49               fchdir 81 50
mkdir 83 -               mkdirat 258 34          rmdir 84 -                unlink 87 -
unlinkat 263 35          rename 82 -             renameat 264 38           renameat2 316 276
link 86 -                linkat 265 37           symlink 88 -              symlinkat 266 36
ftruncate 77 46          fsync 74 82             fdatasync 75 83
flock 73 32              dup 32 23               dup2 33 -                 dup3 292 24
pipe 22 -                pipe2 293 59            umask 95 166              statfs 137 43
fstatfs 138 44           copy_file_range 326 285 sendfile 40 71            fadvise64 221 223
poll 7 -                 ppoll 271 73            select 23 -               pselect6 270 72
epoll_create 213 -       epoll_create1 291 20    epoll_ctl 233 21          epoll_wait 232 -
epoll_pwait 281 22       epoll_pwait2 441 441    eventfd 284 -             eventfd2 290 19
mmap 9 222               munmap 11 215           mprotect 10 226           mremap 25 216
brk 12 214               madvise 28 233          mincore 27 232            msync 26 227
membarrier 324 283       exit 60 93              exit_group 231 94         getpid 39 172
getppid 110 173          gettid 186 178          getuid 102 174            geteuid 107 175
getgid 104 176           getegid 108 177         getresuid 118 148         getresgid 120 150
getgroups 115 158        getpgrp 111 -           getpgid 121 155           getsid 124 156
uname 63 160             sysinfo 99 179          getrusage 98 165          times 100 153
getrlimit 97 163         setrlimit 160 164       getpriority 140 141       sched_yield 24 124
sched_getaffinity 204 123  sched_getparam 143 121  sched_getscheduler 145 120
sched_get_priority_max 146 125  sched_get_priority_min 147 126
getcpu 309 168           set_tid_address 218 96  set_robust_list 273 99    rseq 334 293
futex 202 98             futex_waitv 449 449     wait4 61 260              waitid 247 95
rt_sigaction 13 134      rt_sigprocmask 14 135   rt_sigreturn 15 139       rt_sigpending 127 136
rt_sigtimedwait 128 137  rt_sigsuspend 130 133   sigaltstack 131 132       alarm 37 -
setitimer 38 103         getitimer 36 102        pause 34 -                restart_syscall 219 128
nanosleep 35 101         clock_nanosleep 230 115 clock_gettime 228 113     clock_getres 229 114
gettimeofday 96 169      time 201 -              getrandom 318 278         recvfrom 45 207
shutdown 48 210          getsockname 51 204      getpeername 52 205        getsockopt 55 209
"""

# Allowed for some arguments only.
_CHECKED = """
open 2 -                 openat 257 56           fcntl 72 25               ioctl 16 29
clone 56 220             prctl 157 167           prlimit64 302 261         kill 62 129
tgkill 234 131           socketpair 53 199       sendto 44 206
"""

# Report success without doing anything: copying a file sets its mode, owner and times, which Landlock does not guard.
_IGNORED = """
chmod 90 -               fchmod 91 52            fchmodat 268 53           fchmodat2 452 452
chown 92 -               lchown 94 -             fchown 93 55              fchownat 260 54
utime 132 -              utimes 235 -            futimesat 261 -           utimensat 280 88
"""

# Refused with ENOTSUP, as by a file system without extended attributes and preallocation. fallocate could exceed the
# limit of a file's size at once; the C library then writes zeros instead.
_UNSUPPORTED = """
setxattr 188 5           lsetxattr 189 6         fsetxattr 190 7           getxattr 191 8
lgetxattr 192 9          fgetxattr 193 10        listxattr 194 11          llistxattr 195 12
flistxattr 196 13        removexattr 197 14      lremovexattr 198 15       fremovexattr 199 16
fallocate 285 47
"""


class Calls(NamedTuple):
    """System call numbers of one machine type."""

    allowed: tuple[int, ...]
    checked: Mapping[str, int]
    ignored: tuple[int, ...]
    unsupported: tuple[int, ...]


def calls_of(machine: str) -> Calls:
    """System calls by category for a machine type, as named by `os.uname`.

    >>> calls_of("x86_64").checked["clone"], calls_of("aarch64").checked["clone"]
    (56, 220)
    """
    if machine not in MACHINES:
        raise ValueError(f"system calls are known for {' and '.join(MACHINES)}, not for {machine}")
    column = MACHINES.index(machine)

    def numbers(table: str) -> dict[str, int]:
        words = table.split()
        columns = words[1 + column :: 3]
        return {name: int(number) for name, number in zip(words[::3], columns, strict=True) if number != "-"}

    return Calls(
        tuple(numbers(_ALLOWED).values()),
        MappingProxyType(numbers(_CHECKED)),
        tuple(numbers(_IGNORED).values()),
        tuple(numbers(_UNSUPPORTED).values()),
    )


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's AUDIT_ARCH numbers

KILL = 0x80000000
ALLOW = 0x7FFF0000
ERROR = 0x00050000  # plus the errno; with errno 0 the call returns success without being executed
EPERM, ENOSYS, ENOTTY, ENOTSUP = 1, 38, 25, 95

# From this number on, calls have the same numbers on all machines. Libraries fall back if such a call is missing.
FIRST_NEW_CALL = 424

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`

_THREAD = 0x10000  # CLONE_THREAD
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID, -NET and -TIME
_TRUNCATE, _ACCESS_MODE = 0o1000, 0o3  # of the four access modes, 0 reads and 3 neither reads nor writes
_REFUSED_FCNTLS = (8, 10, 15, 1024)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE: they send signals to others
_ALLOWED_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, sizes, FIONREAD, FIONBIO, FIOCLEX
_ALLOWED_PRCTLS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_UNIX, _STREAM, _KIND_OF_SOCKET = 1, 1, 0xF

Instruction = tuple[int, int, int, int]


def filter_program(machine: str, pid: int) -> bytes:
    """The filter for process `pid`: listed calls are allowed, all others refused.

    >>> len(filter_program("x86_64", 7)) % 8
    0
    """
    calls = calls_of(machine)
    program = [*_load(_ARCHITECTURE), *_unless(ARCHITECTURES[machine], KILL), *_load(_NUMBER)]
    program += _answer(calls.allowed, ALLOW)
    for name, body in _checks(pid).items():
        if name in calls.checked:
            program += [(_EQUAL, 0, len(body), calls.checked[name]), *body]
    program += _answer(calls.ignored, ERROR)
    program += _answer(calls.unsupported, ERROR | ENOTSUP)
    program += [(_AT_LEAST, 0, 1, FIRST_NEW_CALL), _return(ERROR | ENOSYS), _return(ERROR | EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _checks(pid: int) -> dict[str, list[Instruction]]:
    """Argument checks by system call; each ends with a verdict."""
    refused, allowed = _return(ERROR | EPERM), _return(ALLOW)
    only_self = [*_load_argument(0), *_unless(pid, ERROR | EPERM), allowed]
    return {
        "open": _check_open(argument=1),
        "openat": _check_open(argument=2),
        "fcntl": [*_load_argument(1), *_answer(_REFUSED_FCNTLS, ERROR | EPERM), allowed],
        "ioctl": [*_load_argument(1), *_answer(_ALLOWED_IOCTLS, ALLOW), _return(ERROR | ENOTTY)],
        "clone": [*_load_argument(0), (_AND, 0, 0, _THREAD | _NEW_NAMESPACES), *_answer([_THREAD], ALLOW), refused],
        "prctl": [*_load_argument(0), *_answer(_ALLOWED_PRCTLS, ALLOW), refused],
        "prlimit64": [*_load_argument(0), *_answer([0, pid], ALLOW), refused],
        "kill": only_self,
        "tgkill": only_self,
        "socketpair": [
            *_load_argument(0),
            *_unless(_UNIX, ERROR | EPERM),
            *_load_argument(1),
            (_AND, 0, 0, _KIND_OF_SOCKET),
            *_answer([_STREAM], ALLOW),
            refused,
        ],
        "sendto": [  # to an address: never
            *_load_argument(4),
            *_unless(0, ERROR | EPERM),
            *_load(_ARGUMENTS + 8 * 4 + 4),
            *_answer([0], ALLOW),
            refused,
        ],
    }


def _check_open(argument: int) -> list[Instruction]:
    """Refuse to truncate a file that is not opened for writing: Landlock before version 3 allows it."""
    masked = [*_load_argument(argument), (_AND, 0, 0, _TRUNCATE | _ACCESS_MODE)]
    return [*masked, *_answer([_TRUNCATE, _TRUNCATE | _ACCESS_MODE], ERROR | EPERM), _return(ALLOW)]


def _load(offset: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, offset)]


def _load_argument(index: int) -> list[Instruction]:
    """Load the lower half of an argument, which holds a whole int; both machine types are little-endian."""
    return _load(_ARGUMENTS + 8 * index)


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _unless(value: int, action: int) -> list[Instruction]:
    return [(_EQUAL, 1, 0, value), _return(action)]


def _answer(values: Iterable[int], action: int) -> list[Instruction]:
    return [step for value in values for step in ((_EQUAL, 0, 1, value), _return(action))]
