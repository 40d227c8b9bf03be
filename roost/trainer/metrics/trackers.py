"""Trackers of experiments: TensorBoard, wandb and trackio, each where it is installed and asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from roost.trainer.run_folder import RunFolder

PROJECT = "roost"


class TensorBoard:
    """Event files in the folder of the run; look at them with `tensorboard --logdir runs`."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        writers = import_module("torch.utils.tensorboard")
        # What an earlier start of this run wrote of the steps that are done again is not shown.
        self._writer = writers.SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of wandb: kept in the folder of the run, to be sent later, unless WANDB_MODE says otherwise."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        # It would take over the terminal, which shows the run already.
        settings = {"console": "off", "silent": True}
        self._run = import_module("wandb").init(
            project=PROJECT, name=run.name, dir=str(run.path), mode=mode, settings=settings
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, which keeps it on this machine."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        self._run = import_module("trackio").init(project=PROJECT, name=run.name, resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
