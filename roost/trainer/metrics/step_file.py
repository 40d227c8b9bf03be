"""The file of a run that holds what was measured in each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from roost.trainer.run_folder import RunFolder


class StepFile:
    """Writes a line for each step, with the time at which it ended."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.add_step({"step": step, "time": self._clock(), **values})

    def close(self) -> None:
        pass
