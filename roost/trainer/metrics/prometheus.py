"""Prometheus endpoint with the newest value of every metric of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server


class PrometheusEndpoint:
    """Serves `/metrics` until it is closed; port 0 picks any free port.

    >>> endpoint = PrometheusEndpoint("first")
    >>> endpoint.url.startswith("http://127.0.0.1:")
    True
    >>> endpoint.close()
    """

    def __init__(self, run_name: str, host: str = "127.0.0.1", port: int = 0) -> None:
        # A separate registry, so that several runs in one process do not collide.
        self._registry = CollectorRegistry()
        self._run_name = run_name
        self._host = host
        self._gauges: dict[str, Gauge] = {}
        self._taken: set[str] = set()
        self._server, self._thread = start_http_server(port, host, self._registry)

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}/metrics"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            self._gauge(name).labels(run=self._run_name).set(math.nan if value is None else float(value))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            exported = free_name(name, self._taken)
            self._taken.add(exported)
            self._gauges[name] = Gauge(exported, f"{name} of the newest step", ["run"], registry=self._registry)
        return self._gauges[name]


def free_name(name: str, taken: set[str]) -> str:
    """Return a unique name that Prometheus allows.

    >>> free_name("reward/mean", set()), free_name("busy/llm-judge", {"roost_busy_llm_judge"})
    ('roost_reward_mean', 'roost_busy_llm_judge_2')
    """
    plain = "roost_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_")
    free, number = plain, 2
    while free in taken:
        free, number = f"{plain}_{number}", number + 1
    return free
