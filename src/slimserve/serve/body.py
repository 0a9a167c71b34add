"""From bytes to a checked JSON object: size, encoding, nesting and characters, each refused cheaply and by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from slimserve.errors import RequestError
from slimserve.serve import limits
from slimserve.serve.stream import ClientGoneError
from slimserve.serve.threads import off_loop

Checked = TypeVar("Checked")

# Strings are skipped whole, an unclosed one to the end; possessive quantifiers need no backtracking stack. So the
# scan is linear in the body.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_MOST_SHOWN = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class BodyBudget:
    """Memory that the bodies of all requests may take together, until their prompts are tokens."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    def hold(self) -> HeldBody:
        """The share of one request, empty at first."""
        return HeldBody(self)


class HeldBody:
    """What one request takes of the budget; given back once."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Take more; RequestError 429 where it is not there. Nobody waits, so nobody can hold up the others."""
        if self._budget.held_bytes + num_bytes > self._budget.max_bytes:
            raise RequestError(
                f"the requests that are being read fill the {self._budget.max_bytes} bytes for them; try again later",
                code="busy",
                status=429,
            )
        self._budget.held_bytes += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Give everything back; idempotent."""
        self._budget.held_bytes -= self._num_bytes
        self._num_bytes = 0


async def read_body(request: Request, max_bytes: int, held: HeldBody) -> bytearray:
    """The request's body; RequestError 415 where it is compressed, 413 as soon as it is known to be too long, 429 when
    memory is short."""
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("identity", ""):
        raise RequestError(
            f"the body's content encoding is {encoding[:_MOST_SHOWN]!r}; send the body as it is",
            code="unsupported_encoding",
            status=415,
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        _too_large(max_bytes)
    body = bytearray()
    try:
        async for part in request.stream():
            if len(body) + len(part) > max_bytes:
                _too_large(max_bytes)
            held.add(len(part))
            body += part
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return body


def _too_large(max_bytes: int) -> NoReturn:
    raise RequestError(f"the body is larger than {max_bytes} bytes", code="body_too_large", status=413)


async def read_checked(
    request: Request, max_bytes: int, held: HeldBody, check: Callable[[dict[str, Any]], Checked]
) -> Checked:
    """What `check` makes of the request's JSON object; RequestError names the field at fault where there is one."""
    body = await read_body(request, max_bytes, held)
    if len(body) <= limits.INLINE_BODY_BYTES:
        return check(parse_object(body))
    return await off_loop(len(body), lambda: check(parse_object(body)))


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object after checking its nesting; strings hold only whole Unicode characters."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from error
    _check_depth(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        raise RequestError("the body holds a number that cannot be read", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if _SURROGATE_ESCAPE.search(text):
        _check_characters(value)
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; no name may stand in it twice, because one of the two values would be ignored."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        shown = twice[:_MOST_SHOWN].encode("utf-8", "replace").decode("utf-8")
        raise RequestError(f"`{shown}` stands twice in one object of the body", param=shown, code="duplicate_field")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body is not valid JSON: {name} is not a number", code="invalid_json")


def _check_depth(text: str) -> None:
    depth = containers = strings = 0
    field: str | None = None
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token[0] == '"':
            strings += 1
            if strings > limits.MAX_JSON_STRINGS:
                where = f"`{field}`" if field else "the body"
                raise RequestError(f"{where} goes past {limits.MAX_JSON_STRINGS} strings", param=field, code="too_many")
            if depth == 1:
                field = token[1:-1][:_MOST_SHOWN]
        elif token in "[{":
            depth += 1
            containers += 1
            if containers > limits.MAX_JSON_CONTAINERS:
                where = f"`{field}`" if field else "the body"
                raise RequestError(
                    f"{where} goes past {limits.MAX_JSON_CONTAINERS} arrays and objects", param=field, code="too_many"
                )
            if depth > limits.MAX_JSON_DEPTH:
                where = f"`{field}`" if field else "the body"
                raise RequestError(
                    f"{where} is nested deeper than {limits.MAX_JSON_DEPTH} levels", param=field, code="too_deep"
                )
        else:
            depth -= 1


def _check_characters(root: dict[str, Any]) -> None:
    """Refuse lone surrogates, which no tokenizer and no UTF-8 reply can carry."""
    for name in root:
        _check_string(name, name)
    pending: list[tuple[str, Any]] = list(root.items())
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            _check_string(path, value)
        elif isinstance(value, dict):
            for key, item in value.items():
                _check_string(path, key)
                pending.append((f"{path}.{key}", item))
        elif isinstance(value, list):
            pending.extend((f"{path}.{index}", item) for index, item in enumerate(value))


def _check_string(path: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        clean = path.encode("utf-8", "replace").decode("utf-8")
        raise RequestError(
            f"`{clean}` holds half a surrogate pair at character {error.start}",
            param=clean,
            code="invalid_unicode",
        ) from error
