"""A release of the policy: a version, and every way its weights can be had."""

from __future__ import annotations

from dataclasses import dataclass

from roost.engines.weights.probe import Probe
from roost.engines.weights.source import WeightSource


@dataclass(frozen=True)
class Release:
    """A policy version with what engines need to get to it.

    `live` is the learner's own weights, `checkpoint` a folder that engines can be started on, `adapter` the folder of a
    LoRA adapter, for engines that hold the base model. The probe says what an engine on this version must answer.
    """

    version: int
    live: WeightSource | None = None
    checkpoint: str | None = None
    adapter: str | None = None
    probe: Probe | None = None

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a policy version is 0 or more, not {self.version}")
        if self.live is None and self.checkpoint is None and self.adapter is None:
            raise ValueError(
                f"version {self.version} comes with no weights: give a live source, a checkpoint or an adapter"
            )
