"""OpenAI's error object for every way a request can fail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
_OTHER_KIND = frozenset({"string_type", "list_type", "dict_type", "model_type"})
"""Complaints that a value is of another type: of a field's several types these fit least."""
_TYPE_NAMES = re.compile(r"valid dictionary(?: or instance of \w+)?")


def _places(loc: Sequence[int | str], value: Any, *, is_missing: bool) -> Iterator[str]:
    """The steps of a path that lead into `value`; pydantic also puts the names of types into it."""
    for number, part in enumerate(loc):
        is_key = isinstance(value, dict) and part in value
        is_place = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_place:
            value = value[part]
        elif not (is_missing and number == len(loc) - 1):
            continue
        yield str(part)


def error_object(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body `{"error": {...}}` for an HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_request_error(error: RequestError) -> dict[str, Any]:
    """The body for a RequestError."""
    return error_object(str(error), status=error.status, param=error.param, code=error.code or "invalid_value")


def from_validation(error: ValidationError, value: dict[str, Any]) -> RequestError:
    """The first complaint of pydantic about `value`, named by its path; of a field's several types, the nearest fit."""
    found = error.errors(include_url=False)[:_MAX_SHOWN]
    places = [tuple(_places(item["loc"], value, is_missing=item["type"] == "missing")) for item in found]
    inside = [number for number, place in enumerate(places) if place[: len(places[0])] == places[0]]
    nearest = max(inside, key=lambda number: (len(places[number]), found[number]["type"] not in _OTHER_KIND))
    first, place = found[nearest], places[nearest]
    if first["type"] == "unknown_field":
        path = _path((*place, first["ctx"]["name"]))
        return RequestError(f"unknown field `{path}`", param=path, code="unknown_field")
    path = _path(place)
    if first["type"] == "missing":
        return RequestError(f"`{path}` is required", param=path, code="missing_field")
    message = f"`{path}`: {_TYPE_NAMES.sub('valid object', first['msg'])}"
    shown = first.get("input")
    if isinstance(shown, (str, int, float, bool)):
        text = repr(shown[: _MAX_SHOWN + 1] if isinstance(shown, str) else shown)
        message += f" (got {text[:_MAX_SHOWN]}{'...' if len(text) > _MAX_SHOWN else ''})"
    return RequestError(message, param=path or None, code="invalid_value")


def _path(place: Sequence[str]) -> str:
    """A path for people; a client's own names may be as long as its body."""
    return ".".join(part if len(part) <= _MAX_SHOWN else f"{part[:_MAX_SHOWN]}..." for part in place)
