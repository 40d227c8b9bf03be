"""HTTP errors in the form that OpenAI's clients understand."""

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

TRIED = frozenset({"str", "int", "float", "bool"})  # types of a field that may have several
MOST_SHOWN = 10  # of a list with a mistake in every entry
TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}


class Refused(Exception):
    """A request that cannot be served: the status says whose fault it is, the message what to change."""

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
    message = message.encode(errors="backslashreplace").decode()  # it may quote halves of characters that a client sent
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def error_response(message: str, status: int, field: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, status, field), status)


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError inside is the client's mistake."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


def status_of(error: Exception) -> int:
    """The status an error is answered with: its own `status`, or 500."""
    return int(getattr(error, "status", 500))


def answer_errors(app: FastAPI, failure: type[Exception] | None = None) -> None:
    """Answer what routes raise; a `failure` of the service is logged in one line."""

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
        # The web server logs these itself, with where they come from.
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
    """The path of a field as the client wrote it, without the part of the request and the types that were tried."""
    path = [str(step) for step in finding["loc"][1:]]
    return ".".join(step for step in path if step not in TRIED and (step.isidentifier() or step.isdigit())) or None


def _reason(finding: Mapping[str, Any]) -> str:
    own = finding.get("ctx", {}).get("error")
    return str(own or finding["msg"])


MOST_BYTES = 256 * 2**20  # weights never travel in a body, and prompts of a million tokens fit


class SizeLimited:
    """Refuses bodies that are too large, before and while they come."""

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
