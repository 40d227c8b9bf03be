"""What servers tell, each in its words: why a completion ended, which version made it, what they serve or refuse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roost.engines.errors import ContextFull, EngineError, EngineRefused
from roost.engines.generation import Finish, VersionSpan, joined_spans
from roost.engines.version_ledger import version_number

# A prompt that leaves no room: of the built-in engine; of OpenAI, vLLM and SGLang; of vLLM; of SGLang.
NO_ROOM = re.compile(
    r"which leaves no room for|a context of \d+ has room for|context.length|maximum model length|"
    r"exceeds the maximum allowed length",
    re.IGNORECASE,
)


def refusal(message: str) -> EngineRefused:
    """What a server's refusal is, by its words.

    >>> type(refusal("This model's maximum context length is 64 tokens. However, you requested 80")).__name__
    'ContextFull'
    >>> type(refusal("token id 900 is not in the vocabulary of 512")).__name__
    'EngineRefused'
    """
    return ContextFull(message) if NO_ROOM.search(message) else EngineRefused(message)


def version_spans(told: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    """The versions that made a completion's tokens.

    >>> version_spans([{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}])
    (VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3))
    """
    return joined_spans(tuple(VersionSpan(version_number(s["version"]), s["start"], s["end"]) for s in told))


def finish(reason: str | None) -> Finish:
    """Why a completion ended; what is none of the ends we know is an error."""
    try:
        return Finish(reason or "")
    except ValueError:
        raise EngineError(f"the engine ended a completion with {reason!r}") from None


def served_model(models: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model among those listed: adapters have a parent."""
    return next(model for model in models["data"] if not model.get("parent"))
