"""Ray's errors: what was raised behind them, and which of their many lines says so."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

# The process that was called is gone: by itself, or killed by Ray because the machine runs out of memory.
PROCESS_LOST = (RayActorError, WorkerCrashedError, OutOfMemoryError)


def cause_of(error: RayTaskError) -> Exception:
    """What an actor's method raised; Ray's own error where that could not be carried here."""
    return error.cause if isinstance(error.cause, Exception) else error


def lines_of(said: object) -> list[str]:
    """The lines of an error, or of its text, that say something."""
    return [line.strip() for line in str(said).splitlines() if line.strip()]


def first_line(said: object, otherwise: str) -> str:
    """What Ray says first, as in most of its errors the rest is ids.

    >>> first_line("\\n  The actor died.\\n\\tactor_id: 5f", "no answer")
    'The actor died.'
    >>> first_line("", "no answer")
    'no answer'
    """
    return next(iter(lines_of(said)), otherwise)


def raised_line(error: Exception) -> str:
    """The last line of a traceback in an error, which says what was raised; else what Ray says first.

    >>> raised_line(RuntimeError("The actor died in its constructor:\\n  File x, line 1\\nOSError: disk full"))
    'OSError: disk full'
    """
    raised = [line for line in lines_of(error) if re.match(r"\w*(Error|Exception): ", line)]
    return raised[-1] if raised else first_line(error, type(error).__name__)
