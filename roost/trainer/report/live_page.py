"""The report of a run served on loopback, rendered again when the run has a new step."""

from __future__ import annotations

import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

from roost.procs.files import holder_of
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.page import run_to_html
from roost.trainer.report.page_data import page_data

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
