"""How much a sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one sandboxed process.

    >>> Limits(wall_s=2.0).memory_mb
    1024
    >>> Limits(memory_mb=0)
    Traceback (most recent call last):
    ValueError: memory_mb is 0; a sandbox needs more than 0
    """

    wall_s: float = 10.0  # of one execution, the calls it makes included
    cpu_s: int = 60  # in all, over all threads
    memory_mb: int = 1024  # of address space; an interpreter alone takes about 100
    output_chars: int = 10_000  # shown of one execution
    processes: int = 16  # threads, that is: other processes cannot be started
    file_mb: int = 64  # of one file
    folder_mb: int = 256  # of all files, looked at now and then
    open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; a sandbox needs more than 0")
