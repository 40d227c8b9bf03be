"""Root causes and relevant lines of Ray's errors."""

from __future__ import annotations

import re

from ray.exceptions import ActorUnschedulableError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

# The called process is dead: it exited, or Ray killed it because the machine ran out of memory.
# A worker that is restarted on a node that was lost cannot be scheduled.
PROCESS_LOST = (RayActorError, ActorUnschedulableError, WorkerCrashedError, OutOfMemoryError)


def cause_of(error: RayTaskError) -> Exception:
    """The exception raised by an actor's method; Ray's own error if that could not be unpickled here."""
    return error.cause if isinstance(error.cause, Exception) else error


def lines_of(text: object) -> list[str]:
    """Non-empty lines of an error or its text, stripped."""
    return [line.strip() for line in str(text).splitlines() if line.strip()]


def first_line(text: object, otherwise: str) -> str:
    """First non-empty line of an error; in most of Ray's errors the rest is ids.

    >>> first_line("\\n  The actor died.\\n\\tactor_id: 5f", "no answer")
    'The actor died.'
    >>> first_line("", "no answer")
    'no answer'
    """
    return next(iter(lines_of(text)), otherwise)


def raised_line(error: Exception) -> str:
    """Last line of a traceback in an error, which names the exception; otherwise the first line.

    >>> raised_line(RuntimeError("The actor died in its constructor:\\n  File x, line 1\\nOSError: disk full"))
    'OSError: disk full'
    >>> raised_line(RuntimeError("The actor died:\\n  File x, line 1\\ntorch.OutOfMemoryError: CUDA out of memory"))
    'torch.OutOfMemoryError: CUDA out of memory'
    >>> raised_line(RuntimeError("The actor died in its constructor:\\n  File x, line 1\\nAssertionError"))
    'AssertionError'
    """
    raised = [line for line in lines_of(error) if re.match(r"[\w.]*(Error|Exception)(: |$)", line)]
    return raised[-1] if raised else first_line(error, type(error).__name__)
