"""Early ends of an attempt at a run: failures that a retry may help with, signals, and unexpected ones."""

from __future__ import annotations

import signal

from roost.config.findings import counted
from roost.engines.protocol import EngineError, EnginesBehind
from roost.procs.signals import REQUEUE_CODE
from roost.runtime.control_watch import ControlLost
from roost.transport.failure import FailureKind, WorkerFailed


class Broken(Exception):
    """An attempt that failed: `error` is the cause, `steps` the number of steps it completed.

    `had_folder`: the run's folder was created, or cut back to the attempt's first step. `nodes` are the Ray ids of the
    nodes that it ran on, by rank.
    """

    def __init__(
        self, error: WorkerFailed | EngineError | ControlLost, steps: int, was_stopped: bool, had_folder: bool = True
    ) -> None:
        super().__init__(str(error))
        self.error, self.steps, self.was_stopped, self.had_folder = error, steps, was_stopped, had_folder
        self.nodes: tuple[str, ...] = ()

    @property
    def is_retryable(self) -> bool:
        """Return True if a retry can help: a process was lost, or the attempt had completed steps."""
        failures = self.error.failures if isinstance(self.error, WorkerFailed) else ()
        was_lost = any(failure.kind is not FailureKind.RAISED for failure in failures)
        was_lost = was_lost or isinstance(self.error, ControlLost | EnginesBehind)
        return (was_lost or self.steps > 0) and not self.was_stopped


class EndedEarly(RuntimeError):
    """The run ended before its last step, and neither a signal nor an error says why."""

    def __init__(self, done: int, wanted: int, reason: str) -> None:
        super().__init__(
            f"the run ended after step {done} of {wanted}: {reason}. To continue, add --resume to the command"
        )


class EndedAtStart(Exception):
    """A signal ended the run during startup; `done` counts the steps completed before a resume."""

    def __init__(self, number: signal.Signals, done: int) -> None:
        how = "while it was starting" if done else "before its first step"
        back = f"; {counted(done, 'step')} done: to continue, add --resume to the command" if done else ""
        super().__init__(f"{number.name} ended the run {how}; all its processes have ended{back}")
        self.exit_code = REQUEUE_CODE if number == signal.SIGUSR1 else 128 + number


def check_ended(done: int, wanted: int, was_stopped: bool) -> None:
    """Raise EndedEarly if steps are missing although the run was not stopped."""
    if done < wanted and not was_stopped:
        raise EndedEarly(done, wanted, "nothing stopped it; this is a bug in Roost, please report it")
