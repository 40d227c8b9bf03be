"""Metric sinks of a run, and their fan-out."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from roost.config.findings import did_you_mean
from roost.procs.files import is_disk_full
from roost.trainer.records.run_folder import RunFolder, write_whole


class PrometheusEndpoint:
    """Serves `/metrics` until it is closed; port 0 picks any free port.

    >>> endpoint = PrometheusEndpoint("first")
    >>> endpoint.url.startswith("http://127.0.0.1:")
    True
    >>> endpoint.close()
    """

    def __init__(self, run_name: str, host: str = "127.0.0.1", port: int = 0, scrape_file: Path | None = None) -> None:
        # A separate registry, so that several runs in one process do not collide.
        self._registry = CollectorRegistry()
        self._run_name = run_name
        self._host = host
        self._gauges: dict[str, Gauge] = {}
        self._used: set[str] = set()
        self._server, self._thread = start_http_server(port, host, self._registry)
        self._scrape_file = scrape_file
        if scrape_file is not None:
            target = self.url.removeprefix("http://").removesuffix("/metrics")
            write_whole(scrape_file, [json.dumps([{"targets": [target], "labels": {"job": "roost"}}]).encode()])

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}/metrics"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            self._gauge(name).labels(run=self._run_name).set(math.nan if value is None else float(value))

    def close(self) -> None:
        if self._scrape_file is not None:
            self._scrape_file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            exported = free_name(name, self._used)
            self._used.add(exported)
            self._gauges[name] = Gauge(exported, f"{name} of the newest step", ["run"], registry=self._registry)
        return self._gauges[name]


def free_name(name: str, used: set[str]) -> str:
    """Return a unique name that Prometheus allows.

    >>> free_name("reward/mean", set()), free_name("busy/llm-judge", {"roost_busy_llm_judge"})
    ('roost_reward_mean', 'roost_busy_llm_judge_2')
    """
    plain = "roost_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_")
    free, number = plain, 2
    while free in used:
        free, number = f"{plain}_{number}", number + 1
    return free


class MetricSink(Protocol):
    """A file, a tracker or a Prometheus endpoint."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Flush and close."""


class StepFile:
    """Writes one line per step, with its end time."""

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.add_step({"step": step, "time": self._clock(), **values})

    def close(self) -> None:
        pass


PROJECT = "roost"


class TensorBoard:
    """Event files in the run folder; view them with `tensorboard --logdir runs`."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        writers = import_module("torch.utils.tensorboard")
        # Hides records of an earlier attempt for steps that are repeated.
        self._writer = writers.SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run, kept offline in the run folder unless WANDB_MODE says otherwise."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        mode = os.environ.get("WANDB_MODE", "offline")
        # Keep wandb from taking over the terminal, which already shows the run.
        settings = {"console": "off", "silent": True}
        self._run = import_module("wandb").init(
            project=PROJECT, name=run.name, dir=str(run.path), mode=mode, settings=settings
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run, stored on this machine."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        self._run = import_module("trackio").init(project=PROJECT, name=run.name, resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


Tell: TypeAlias = Callable[[str], None]
FILE = "metrics.jsonl"
SINKS = ("tensorboard", "wandb", "trackio", "prometheus")


@dataclass(frozen=True, slots=True)
class MetricSettings:
    """Metric sinks besides the file in the run folder."""

    sinks: tuple[str, ...] = ()  # of SINKS
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 0  # 0: any free port

    def __post_init__(self) -> None:
        for name in self.sinks:
            if name not in SINKS:
                hint = did_you_mean(name, SINKS) or f"there are {', '.join(SINKS)}"
                raise ValueError(f"metrics cannot go to {name!r}; {hint}")


class FanOut:
    """Writes metrics to all sinks. A sink that fails is reported once and dropped: metrics must not end a run."""

    def __init__(self, sinks: Mapping[str, MetricSink], tell: Tell) -> None:
        self._sinks = dict(sinks)
        self._tell = tell

    @property
    def names(self) -> tuple[str, ...]:
        """Sinks that still work."""
        return tuple(self._sinks)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Write an evaluation as evaluation/..., except to the metrics file: evaluations have their own."""
        self.write(step, {f"evaluation/{name}": value for name, value in values.items()}, left_out=FILE)

    def write(self, step: int, values: Mapping[str, float], left_out: str = "") -> None:
        """Write metrics to all sinks but the one named `left_out`."""
        for name, sink in list(self._sinks.items()):
            if name == left_out:
                continue
            try:
                sink.write(step, values)
            except Exception as error:  # anything a tracker raises
                if is_disk_full(error):
                    raise  # the run's own files would fail next
                del self._sinks[name]
                self._tell(f"metrics no longer go to {name}, which failed in step {step}: {error!r}")

    def close(self) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._tell(f"metrics of {name} may be incomplete; closing it failed: {error!r}")
        self._sinks.clear()


def open_metrics(
    run: RunFolder, settings: MetricSettings = MetricSettings(), tell: Tell = print, first_step: int = 0
) -> FanOut:
    """Open the metrics file and every requested sink that works; `first_step` steps are already done."""
    sinks: dict[str, MetricSink] = {FILE: StepFile(run)}
    for name in settings.sinks:
        try:
            sinks[name] = _opened(name, run, settings, tell, first_step)
        except ImportError as error:
            package = (error.name or name).split(".")[0].replace("_", "-")
            tell(f"metrics do not go to {name}: {package} is missing; pip install {package}")
        except Exception as error:  # anything a tracker raises
            tell(f"metrics do not go to {name}, which cannot be opened: {error!r}")
    return FanOut(sinks, tell)


def _opened(name: str, run: RunFolder, settings: MetricSettings, tell: Tell, first_step: int) -> MetricSink:
    if name == "prometheus":
        endpoint = PrometheusEndpoint(run.name, settings.prometheus_host, settings.prometheus_port, run.scrape_file)
        tell(f"metrics for Prometheus: {endpoint.url}")
        return endpoint

    trackers: dict[str, type[TensorBoard | Wandb | Trackio]] = {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "trackio": Trackio,
    }
    return trackers[name](run, first_step)
