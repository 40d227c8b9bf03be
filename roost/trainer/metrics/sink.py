"""What takes the numbers of a run, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MetricSink(Protocol):
    """A file, a tracker or a scraper's endpoint."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take what was measured in a step."""

    def close(self) -> None:
        """Write out what is left, and end."""
