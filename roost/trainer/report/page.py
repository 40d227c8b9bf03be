"""The report of a run as one self-contained HTML file; text from models is never executed."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from roost.procs.files import holder_of
from roost.trainer.records.run_folder import Record, RunFolder, number_of, write_whole
from roost.trainer.report.page_data import page_data, phase_colours, phases_of, times_of
from roost.view.grid_model import COLOURS
from roost.view.html import one_file_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_BARS = 120


def write_plots(run: RunFolder) -> tuple[Path, Path]:
    """Write reward.png and timing.png and return their paths; needs matplotlib."""
    # Not pyplot, which keeps state between calls and may need a display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, evaluations = run.steps(), run.evaluations()
    for path, draw in ((run.reward_plot, _draw_reward), (run.timing_plot, _draw_timing)):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, steps, evaluations)
        axes.set_title(run.name.replace("$", r"\$"), loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        # Skip an empty legend.
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right upper", frameon=False, fontsize=9, reverse=draw is _draw_timing)
        figure.savefig(path, dpi=120)
    return run.reward_plot, run.timing_plot


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Weighted mean over `reach` values on either side, nearer ones counting more; NaN is ignored.

    >>> smoothed([1.0, 0.0, math.nan, 1.0, 1.0], 1)
    [0.6666666666666666, 0.3333333333333333, 0.5, 1.0, 1.0]
    """
    numbers = np.asarray(values, np.float64)
    is_known = np.isfinite(numbers)
    weights = reach + 1 - np.abs(np.arange(-reach, reach + 1))
    inside = slice(reach, reach + len(numbers))
    totals = np.convolve(np.where(is_known, numbers, 0.0), weights)[inside]
    weight = np.convolve(is_known.astype(np.float64), weights)[inside]
    return [total / many if many else math.nan for total, many in zip(totals.tolist(), weight.tolist(), strict=True)]


def _draw_reward(axes: Axes, steps: Sequence[Record], evaluations: Sequence[Record]) -> None:
    numbers, rewards = [record["step"] for record in steps], _column(steps, "reward/mean")
    axes.set_ylabel("reward")
    reach = math.ceil(len(steps) / 25)
    if numbers:
        axes.plot(
            numbers, rewards, color=COLOURS[0], alpha=0.35, linewidth=1, marker=".", markersize=3, label="each step"
        )
        axes.plot(numbers, smoothed(rewards, reach), color=COLOURS[0], linewidth=2, label="smoothed")
    if evaluations:
        evaluated = [record["step"] for record in evaluations]
        axes.plot(
            evaluated, _column(evaluations, "reward/mean"), "D", color=COLOURS[5], markersize=6, label="evaluation"
        )


def _draw_timing(axes: Axes, steps: Sequence[Record], evaluations: Sequence[Record]) -> None:
    axes.set_ylabel("seconds of a step")
    width = max(1, math.ceil(len(steps) / MOST_BARS))
    parts = [steps[start : start + width] for start in range(0, len(steps), width)]
    centers = [part[0]["step"] + (part[-1]["step"] - part[0]["step"]) / 2 for part in parts]
    bottom = [0.0] * len(parts)
    colours = phase_colours(steps)
    for phase in phases_of(steps):
        heights = [sum(times_of(part, phase)) / len(part) for part in parts]
        axes.bar(centers, heights, width=width * 0.85, bottom=bottom, color=colours[phase], label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]


def _column(records: Sequence[Record], key: str) -> list[float]:
    numbers = [number_of(record, key) for record in records]
    return [math.nan if number is None else number for number in numbers]


# Order matters: later styles override, and the last script starts the page.
STYLES = ("page", "charts", "timeline", "rollouts")
SCRIPTS = (
    "elements", "numbers", "tip", "chart_frame", "line_chart", "stacked_chart", "header", "charts", "times", "busy",
    "timeline_drawing", "timeline", "rollouts", "page",
)  # fmt: skip


def write_report(run: RunFolder) -> Path:
    """Write the report of a run so far and return its path."""
    write_whole(run.report_file, [run_to_html(page_data(run)).encode()])
    return run.report_file


def run_to_html(data: dict[str, Any]) -> str:
    """Render the page from `page_data`."""
    return one_file_page(page_file, "run.html", STYLES, SCRIPTS, f"{data['name']}: Roost run", data)


def page_file(name: str) -> str:
    """Template, style or script of a page."""
    return (files("roost.trainer.report") / "page" / name).read_text(encoding="utf-8")


LOOPBACK = "127.0.0.1"
RELOAD_S = 5
FILES = {
    "config.yaml": "text/plain",
    "plan.json": "application/json",
    "trace.json": "application/json",
    "metrics.jsonl": "text/plain",
    "evaluations.jsonl": "text/plain",
    "samples.jsonl": "text/plain",
    "learnt.jsonl": "text/plain",
    "tokens.jsonl": "text/plain",
    "reward.png": "image/png",
    "timing.png": "image/png",
}


class LivePage:
    """Serves the report of a run at `url` until it is closed.

    The path of `url` is random: other users of the machine can reach the port, but not read the run.
    """

    def __init__(self, run: RunFolder, port: int = 0) -> None:
        self._run = run
        self._base = f"/{secrets.token_urlsafe()}/"
        self._lock = threading.Lock()
        self._rendered: tuple[object, bytes] = (None, b"")
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}{self._base}"

    def serve(self) -> None:
        """Answer requests until `close` or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.server_close()

    def __enter__(self) -> LivePage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        # A page of another site that has its name point to loopback must not read the run.
        host = (request.headers.get("Host") or "").partition(":")[0]
        path = unquote(urlsplit(request.path).path)
        base, name = path[: len(self._base)], path[len(self._base) :]
        if host not in (LOOPBACK, "localhost"):
            request.send_error(HTTPStatus.FORBIDDEN, "this page is served to this machine only")
        elif not secrets.compare_digest(base.encode(), self._base.encode()):
            request.send_error(HTTPStatus.NOT_FOUND, explain="the address is the one that roost watch printed")
        elif name in ("", "report.html"):
            _send(request, self._page(), "text/html; charset=utf-8", is_live=holder_of(self._run.path) is not None)
        elif name in FILES and (self._run.path / name).is_file():
            _send(request, (self._run.path / name).read_bytes(), FILES[name])
        else:
            request.send_error(HTTPStatus.NOT_FOUND)

    def _page(self) -> bytes:
        """The page, rendered again only if a file of the run has changed."""
        with self._lock:
            files = (self._run.metrics.path, self._run.evaluation_lines.path, self._run.sample_lines.path)
            seen = tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
            if seen != self._rendered[0]:
                self._rendered = (seen, run_to_html(page_data(self._run)).encode())
            return self._rendered[1]


def _send(request: BaseHTTPRequestHandler, body: bytes, kind: str, is_live: bool = False) -> None:
    request.send_response(HTTPStatus.OK)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("X-Content-Type-Options", "nosniff")
    request.send_header("Cache-Control", "no-store")
    request.send_header("Referrer-Policy", "no-referrer")  # the address is a secret
    if is_live:
        request.send_header("Refresh", str(RELOAD_S))
    request.end_headers()
    request.wfile.write(body)
