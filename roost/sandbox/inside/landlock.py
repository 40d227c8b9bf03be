"""Restrict file access with Landlock, the kernel's sandbox for files, ports and signals."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

from roost.sandbox.inside.kernel import Kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_QUERY_VERSION = 1
_RULE_PATH_BENEATH = 1

# Rights, in the kernel's order.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = (1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in range(13, 16))

_READ = _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # rights that a single file can have


class Handled(NamedTuple):  # importing dataclasses takes 10 ms
    """Rights that a version of Landlock can forbid. Handled rights are forbidden unless a rule grants them."""

    files: int
    ports: int
    scopes: int

    def packed(self, version: int) -> bytes:
        """Encode as the kernel of that version expects."""
        words = (self.files, self.ports, self.scopes)[: 1 + (version >= 4) + (version >= 6)]
        return struct.pack(f"={len(words)}Q", *words)


def handled_by(version: int) -> Handled:
    """Access rights that a version of Landlock can restrict.

    >>> handled_by(1).files == (1 << 13) - 1, handled_by(6).scopes
    (True, 3)
    """
    rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    return Handled((1 << rights) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0)


def version_of(kernel: Kernel) -> int:
    """Landlock version of the kernel; 0 if there is none."""
    try:
        return kernel.call(_CREATE_RULESET, None, 0, _QUERY_VERSION)
    except OSError:
        return 0


def restrict(kernel: Kernel, readable: Iterable[str], owned: str, devices: Iterable[str]) -> int:
    """Restrict this process to these files; return the Landlock version in force, or 0."""
    version = version_of(kernel)
    if not version:
        return 0
    handled = handled_by(version)
    description = handled.packed(version)
    rules = kernel.call(_CREATE_RULESET, description, len(description), 0)
    try:
        grants = [*((path, _READ) for path in readable), (owned, _OWN)]
        grants += [(path, _READ_FILE | _WRITE_FILE) for path in devices]
        for path, rights in grants:
            _grant(kernel, rules, path, rights & handled.files)
        kernel.call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)
    return version


def _grant(kernel: Kernel, rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # some library folders do not exist on this system, or are not accessible
    try:
        if not os.path.isdir(path):  # noqa: PTH112 (pathlib takes long to import)
            rights &= _FILE_RIGHTS
        kernel.call(_ADD_RULE, rules, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)
