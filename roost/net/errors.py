"""HTTP errors in OpenAI's format."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("roost.engine")

TRIED = frozenset({"str", "int", "float", "bool"})  # pydantic adds these to the path of a field with several types
MOST_SHOWN = 10  # lines, for a list with a mistake in every entry
TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


class Refused(Exception):
    """A request that cannot be served, with the HTTP status; the message says what to change."""

    def __init__(self, message: str, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


def error_body(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """Body of an error response.

    >>> error_body("n is 0", 400, "n")
    {'error': {'message': 'n is 0', 'type': 'BadRequestError', 'param': 'n', 'code': 400}}
    """
    kind = TYPES.get(status) or HTTPStatus(status).phrase.title().replace(" ", "")
    message = message.encode(errors="backslashreplace").decode()  # it may quote lone surrogates from the request
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def error_response(message: str, status: int, field: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, status, field), status)


@contextmanager
def refusing() -> Iterator[None]:
    """Context that raises a ValueError as Refused, for mistakes of the client."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


def status_of(error: Exception) -> int:
    """HTTP status for an error: its own `status`, or 500."""
    return int(getattr(error, "status", 500))


def answer_errors(app: FastAPI, failure: type[Exception] | None = None) -> None:
    """Install handlers that turn exceptions of routes into error responses; a `failure` is logged in one line."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return error_response(str(error), error.status, error.field)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        findings = error.errors()
        return error_response(error_summary(findings), 400, _field(findings[0]))

    @app.exception_handler(HTTPException)
    async def no_such_route(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(str(error.detail), error.status_code)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s: %s", request.method, request.url.path, error)
        return error_response(str(error), status_of(error))

    if failure is not None:
        app.add_exception_handler(failure, failed)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        # The web server logs these itself, with their traceback.
        return error_response(f"{type(error).__name__}: {error}", 500)


def error_summary(findings: Sequence[Mapping[str, Any]]) -> str:
    """Describe validation errors of a request body, one line per field.

    >>> error_summary([{"loc": ("body", "n"), "msg": "Input should be a valid integer"}])
    'n: Input should be a valid integer'
    """
    lines = list(dict.fromkeys(": ".join(filter(None, (_field(one), _reason(one)))) for one in findings))
    left_out = len(lines) - MOST_SHOWN
    return "\n".join(lines[:MOST_SHOWN] + ([f"and {left_out} more"] if left_out > 0 else []))


def _field(finding: Mapping[str, Any]) -> str | None:
    """Path of a field in the body, without the types that pydantic tried."""
    path = [str(step) for step in finding["loc"][1:]]
    return ".".join(step for step in path if step not in TRIED and (step.isidentifier() or step.isdigit())) or None


def _reason(finding: Mapping[str, Any]) -> str:
    own = finding.get("ctx", {}).get("error")
    return str(own or finding["msg"])


MOST_BYTES = 256 * 2**20  # weights never travel in a body, and prompts of a million tokens fit


class SizeLimited:
    """ASGI middleware that refuses bodies that are too large, by their announced and their actual size."""

    def __init__(self, app: ASGIApp, most_bytes: int = MOST_BYTES) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                raise HTTPException(413, self._too_large)
            return message

        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._most_bytes:
            await error_response(self._too_large, 413)(scope, receive, send)
        else:
            await self._app(scope, counted, send)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._most_bytes} bytes"
