"""What servers of every kind tell in the same words: why a completion ended, which version made it, what they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roost.engines.errors import EngineError
from roost.engines.generation import Finish, VersionSpan, joined_spans
from roost.engines.version_ledger import version_number


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
