"""Whether an interpreter has SGLang, asked before a server is started."""

from __future__ import annotations

from collections.abc import Mapping

from roost.engines.errors import EngineError
from roost.engines.installed_vllm import answer_of

ASK = "import importlib.util\nprint('found' if importlib.util.find_spec('sglang') else 'missing')"


def ask_for_sglang(python: str, env: Mapping[str, str]) -> None:
    """Raise an EngineError unless the interpreter has SGLang, in the environment that the server will have."""
    printed, error_line = answer_of(python, ASK, env, "SGLang")
    if "found" not in printed.split():
        raise EngineError(f"{python} has no SGLang. {error_line}".rstrip())
