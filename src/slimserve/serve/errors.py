"""OpenAI's error object for every way a request can fail."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from slimserve.errors import RequestError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_MAX_SHOWN = 80


def error_object(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body `{"error": {...}}` for an HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_request_error(error: RequestError) -> dict[str, Any]:
    """The body for a RequestError."""
    return error_object(str(error), status=error.status, param=error.param, code=error.code or "invalid_value")


def from_validation(error: ValidationError) -> RequestError:
    """The first complaint of pydantic, named by its path."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field `{path}`", param=path, code="unknown_field")
    if first["type"] == "missing":
        return RequestError(f"`{path}` is required", param=path, code="missing_field")
    message = f"`{path}`: {first['msg']}"
    shown = first.get("input")
    if isinstance(shown, (str, int, float, bool)):
        text = repr(shown)
        message += f" (got {text[:_MAX_SHOWN]}{'...' if len(text) > _MAX_SHOWN else ''})"
    return RequestError(message, param=path or None, code="invalid_value")
