"""The release that the engines of a fleet have, and where its weights can still be had."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from roost.engines.delivery import Connect, Delivery
from roost.engines.member import Member
from roost.engines.protocol import InFlight
from roost.engines.weights.release import Release


class CurrentRelease:
    """Engines that come back are brought to it. None is the weights that the servers were started with."""

    def __init__(self, folder: Path, connect: Connect, report: Callable[[str], None]) -> None:
        self.release: Release | None = None
        self._folder, self._connect, self._report = folder, connect, report
        self._written = folder / "nothing"  # where the release is on disk, if it had to be written
        self._deliveries = 0
        self._sender_holds_it = False

    @property
    def version(self) -> int:
        return self.release.version if self.release is not None else 0

    def is_on(self, member: Member) -> bool:
        return member.version == self.version

    def hold(self, release: Release, folder: Path) -> None:
        """Make this the current release; `folder` is where it is on disk, if anywhere."""
        if folder != self._written:
            shutil.rmtree(self._written, ignore_errors=True)
        self.release, self._written = release, folder
        self._sender_holds_it = release.sender is not None

    def learner_goes_on(self) -> None:
        """From here on the learner's own weights are no longer those of the release."""
        self._sender_holds_it = False

    @property
    def is_available(self) -> bool:
        """Whether an engine can still be brought to it."""
        release = self.release
        return release is None or bool(
            release.checkpoint or release.adapter or self._written.exists() or self._sender_holds_it
        )

    def delivery(self, release: Release, in_flight: InFlight) -> Delivery:
        """A delivery with a folder of its own: a version that is tried again may have other weights."""
        self._deliveries += 1
        folder = self._folder / f"version-{release.version}-{self._deliveries}"
        return Delivery(release, folder, self._connect, in_flight, self._report)

    def delivery_again(self) -> Delivery | None:
        """For an engine that comes back, from where the release is on disk; None for the weights of the start."""
        if self.release is None:
            return None
        return Delivery(self.release, self._written, self._connect, InFlight.DROP, self._report)
