"""What keeps a sandbox apart from the rest of the machine, and whether that is enough."""

from __future__ import annotations

import site
import sys
import sysconfig
from dataclasses import dataclass

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_TIME_ZONES = ("/etc/localtime", "/usr/share/zoneinfo")


class TooWeak(RuntimeError):
    """This machine cannot hold code that nobody trusts."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What is in force in a sandbox; limits of memory, CPU time and files always are."""

    landlock: int  # its version; 0 where there is none
    seccomp: bool
    namespace: bool  # of users, without which the number of threads is bounded by their memory only

    @property
    def gaps(self) -> tuple[str, ...]:
        """What code in the sandbox could reach.

        >>> Isolation(landlock=0, seccomp=True, namespace=True).gaps
        ("the user's files",)
        """
        files = () if self.landlock else ("the user's files",)
        calls = () if self.seccomp else ("the network", "other processes")
        return files + calls

    def check(self) -> None:
        """Refuse what is not enough."""
        if self.gaps:
            raise TooWeak(
                f"a sandbox on this machine would not keep code from {', '.join(self.gaps)}: it needs Linux 5.13 with "
                f"Landlock (found version {self.landlock}) and seccomp (found: {'yes' if self.seccomp else 'no'}) on "
                "x86_64 or aarch64; where the code is trusted, pass allows_weak=True"
            )


def libraries() -> list[str]:
    """Folders of installed packages, which code in a sandbox can import."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*site.getsitepackages(), *user]


def readable() -> list[str]:
    """What code in a sandbox can read: the interpreter's library, packages, shared libraries and time zones."""
    paths = sysconfig.get_paths()
    interpreter = (f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", paths["stdlib"], paths["platstdlib"])
    return list(dict.fromkeys((*interpreter, *libraries(), *_SYSTEM_LIBRARIES, *_TIME_ZONES)))
