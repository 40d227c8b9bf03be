"""The filter of system calls: a small program that the kernel runs before each of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from roost.sandbox.inside.system_calls import calls_of

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the kernel's audit numbers them

KILL = 0x80000000
ALLOW = 0x7FFF0000
ERROR = 0x00050000  # with the error's number added; 0 is a call that succeeds without being made
EPERM, ENOSYS, ENOTTY, ENOTSUP = 1, 38, 25, 95

# From here on every machine has the same numbers. Libraries try these calls and do without where there are none.
FIRST_NEW_CALL = 424

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # where they lie in what the filter is shown

_THREAD = 0x10000  # CLONE_THREAD
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID, -NET and -TIME
_TRUNCATE, _ACCESS_MODE = 0o1000, 0o3  # of the four modes, 0 reads and 3 does neither
_OWNERS_AND_SIGNALS = (8, 10, 15, 1024)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE: signals to others
_TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, sizes, FIONREAD, FIONBIO, FIOCLEX
_NAMES = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_UNIX, _STREAM, _KIND_OF_SOCKET = 1, 1, 0xF

Instruction = tuple[int, int, int, int]


def filter_program(machine: str, pid: int) -> bytes:
    """The filter for the process `pid`: what is listed is allowed, all else refused.

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
        "fcntl": [*_load_argument(1), *_answer(_OWNERS_AND_SIGNALS, ERROR | EPERM), allowed],
        "ioctl": [*_load_argument(1), *_answer(_TERMINAL_QUESTIONS, ALLOW), _return(ERROR | ENOTTY)],
        "clone": [*_load_argument(0), (_AND, 0, 0, _THREAD | _NEW_NAMESPACES), *_answer([_THREAD], ALLOW), refused],
        "prctl": [*_load_argument(0), *_answer(_NAMES, ALLOW), refused],
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
    """Opening a file can empty it without writing to it; before its third version Landlock lets that pass."""
    empties = [*_load_argument(argument), (_AND, 0, 0, _TRUNCATE | _ACCESS_MODE)]
    return [*empties, *_answer([_TRUNCATE, _TRUNCATE | _ACCESS_MODE], ERROR | EPERM), _return(ALLOW)]


def _load(offset: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, offset)]


def _load_argument(index: int) -> list[Instruction]:
    """Its lower half, which is all of an int; both kinds of machines are little-endian."""
    return _load(_ARGUMENTS + 8 * index)


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _unless(value: int, action: int) -> list[Instruction]:
    return [(_EQUAL, 1, 0, value), _return(action)]


def _answer(values: Iterable[int], action: int) -> list[Instruction]:
    return [step for value in values for step in ((_EQUAL, 0, 1, value), _return(action))]
