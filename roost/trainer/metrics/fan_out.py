"""All sinks of a run as one, of which none can stop the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from roost.config.errors import did_you_mean
from roost.procs.files import is_disk_full
from roost.trainer.metrics.sink import MetricSink
from roost.trainer.metrics.step_file import StepFile
from roost.trainer.run_folder import RunFolder

Tell: TypeAlias = Callable[[str], None]
FILE = "metrics.jsonl"
SINKS = ("tensorboard", "wandb", "trackio", "prometheus")


@dataclass(frozen=True, slots=True)
class MetricSettings:
    """Where metrics go beside the file in the folder of the run."""

    sinks: tuple[str, ...] = ()  # of SINKS
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 0  # any that is free

    def __post_init__(self) -> None:
        for name in self.sinks:
            if name not in SINKS:
                hint = did_you_mean(name, SINKS) or f"there are {', '.join(SINKS)}"
                raise ValueError(f"metrics cannot go to {name!r}; {hint}")


class FanOut:
    """Hands metrics to all sinks. One that fails is told about once and left out from then on: numbers that nobody
    sees are no reason to lose a run.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], tell: Tell) -> None:
        self._sinks = dict(sinks)
        self._tell = tell

    @property
    def names(self) -> tuple[str, ...]:
        """The sinks that still work."""
        return tuple(self._sinks)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Hand on the result of an evaluation, as evaluation/...; it has a file of its own beside that of steps."""
        self.write(step, {f"evaluation/{name}": value for name, value in values.items()}, besides=FILE)

    def write(self, step: int, values: Mapping[str, float], besides: str = "") -> None:
        for name, sink in list(self._sinks.items()):
            if name == besides:
                continue
            try:
                sink.write(step, values)
            except Exception as error:  # whatever a tracker raises
                if is_disk_full(error):
                    raise  # the run's own files are next
                del self._sinks[name]
                self._tell(f"metrics no longer go to {name}, which failed in step {step}: {error!r}")

    def close(self) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._tell(f"metrics of {name} may be incomplete, it failed as it was closed: {error!r}")
        self._sinks.clear()


def open_metrics(
    run: RunFolder, settings: MetricSettings = MetricSettings(), tell: Tell = print, first_step: int = 0
) -> FanOut:
    """The file of the run and every sink that is asked for and can be opened; `first_step` steps are done already."""
    sinks: dict[str, MetricSink] = {FILE: StepFile(run)}
    for name in settings.sinks:
        try:
            sinks[name] = _opened(name, run, settings, tell, first_step)
        except ImportError as error:
            package = (error.name or name).split(".")[0].replace("_", "-")
            tell(f"metrics do not go to {name}: {package} is missing; pip install {package}")
        except Exception as error:  # whatever a tracker raises
            tell(f"metrics do not go to {name}, which cannot be opened: {error!r}")
    return FanOut(sinks, tell)


def _opened(name: str, run: RunFolder, settings: MetricSettings, tell: Tell, first_step: int) -> MetricSink:
    if name == "prometheus":
        from roost.trainer.metrics.prometheus import PrometheusEndpoint

        endpoint = PrometheusEndpoint(run.name, settings.prometheus_host, settings.prometheus_port)
        tell(f"metrics for Prometheus: {endpoint.url}")
        return endpoint
    from roost.trainer.metrics.trackers import TensorBoard, Trackio, Wandb

    trackers: dict[str, type[TensorBoard | Wandb | Trackio]] = {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "trackio": Trackio,
    }
    return trackers[name](run, first_step)
