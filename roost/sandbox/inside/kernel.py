"""System calls that Python's `os` module lacks."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 22, 38, 24
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3, with two words per set


class Kernel:
    """The C library of this process. Every method raises OSError if the kernel refuses."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)

    def call(self, number: int, *arguments: int | ctypes.c_void_p | bytes | None) -> int:
        """Make a system call by number."""
        words = (ctypes.c_long(word) if isinstance(word, int) else word for word in arguments)
        return self._checked(self._library.syscall(ctypes.c_long(number), *words))

    def prctl(self, option: int, *arguments: int) -> int:
        """Set an attribute of this process."""
        words = [*arguments, 0, 0, 0, 0][:4]
        return self._checked(self._library.prctl(option, *(ctypes.c_ulong(word) for word in words)))

    def unshare(self, flags: int) -> None:
        """Enter new namespaces."""
        self._checked(self._library.unshare(flags))

    def drop_capabilities(self) -> None:
        """Drop all capabilities of this process."""
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        nothing = (ctypes.c_uint32 * 6)()
        self._checked(self._library.capset(header, nothing))

    def filter_calls(self, program: bytes) -> None:
        """Install a seccomp filter; this cannot be undone."""
        code = ctypes.create_string_buffer(program, len(program))
        described = _Program(len(program) // 8, ctypes.addressof(code))
        words = (ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(described), ctypes.c_ulong(0), ctypes.c_ulong(0))
        self._checked(self._library.prctl(PR_SET_SECCOMP, *words))

    @staticmethod
    def _checked(answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return answer


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))
