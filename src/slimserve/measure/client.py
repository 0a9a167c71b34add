"""A plain client of any OpenAI-compatible completions endpoint, with the clock beside every token."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slimserve.errors import RunError, UsageError


class ServerError(RunError):
    """The server answered with an error; `status` is its HTTP status (0: it did not answer)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Reply:
    """One completion as seen from outside. Times in seconds from sending the request.

    `arrivals`: (time, tokens) of every piece. Token counts are the server's own usage; None where it gave none.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    started: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @property
    def first_token_seconds(self) -> float | None:
        """Time to the first piece; None without streaming."""
        return self.arrivals[0][0] if self.arrivals else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: `url` up to and including /v1 (or before it), the model's name, an optional key."""

    url: str
    model: str = ""
    api_key: str = ""
    timeout: float = 600.0

    def _path(self, path: str) -> tuple[urllib.parse.SplitResult, str]:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{self.url!r} is no server address; give one like http://127.0.0.1:8000/v1")
        return parts, parts.path.rstrip("/").removesuffix("/v1") + path

    def _open(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        parts, full = self._path(path)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, full, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerError(f"{self.url} does not answer ({error}); check that the server runs") from error
        if response.status >= 400:
            text = response.read(4096).decode("utf-8", "replace")
            connection.close()
            raise ServerError(f"{self.url}{path} answered {response.status}: {_message(text)}", response.status)
        return response

    def get(self, path: str) -> str:
        """The text of a GET."""
        with self._open("GET", path, None) as response:
            return response.read().decode("utf-8", "replace")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer to a POST."""
        with self._open("POST", path, body) as response:
            try:
                answer = json.loads(response.read())
            except ValueError as error:
                raise ServerError(f"{self.url}{path} answered with something that is not JSON") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}{path} answered with something that is not an object")
        return answer

    def named(self) -> Endpoint:
        """The same endpoint with the server's first model where none was named."""
        if self.model:
            return self
        try:
            models = json.loads(self.get("/v1/models"))["data"]
            return Endpoint(self.url, str(models[0]["id"]), self.api_key, self.timeout)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models names no model; give one with --model-name") from error

    def complete(self, body: Mapping[str, Any]) -> Reply:
        """One completion without streaming."""
        started = time.perf_counter()
        answer = self.post("/v1/completions", {"model": self.model, **body})
        seconds = time.perf_counter() - started
        choice = (answer.get("choices") or [{}])[0]
        reply = Reply(
            text=str(choice.get("text") or ""),
            token_ids=list(choice.get("token_ids") or []),
            finish_reason=choice.get("finish_reason"),
            started=started,
            seconds=seconds,
        )
        _take_usage(reply, answer.get("usage"))
        return reply

    def stream(self, body: Mapping[str, Any]) -> Reply:
        """One completion as a stream; every piece is timed as it arrives."""
        started = time.perf_counter()
        wanted = {"model": self.model, **body, "stream": True, "stream_options": {"include_usage": True}}
        reply = Reply(started=started)
        with self._open("POST", "/v1/completions", wanted) as response:
            for event in _events(response):
                now = time.perf_counter() - started
                if "error" in event:
                    raise ServerError(f"{self.url} broke off its reply: {_message(json.dumps(event))}")
                _take_usage(reply, event.get("usage"))
                for choice in event.get("choices") or []:
                    _take_piece(reply, choice, now)
        reply.seconds = time.perf_counter() - started
        return reply


def _take_piece(reply: Reply, choice: Mapping[str, Any], now: float) -> None:
    text, ids = str(choice.get("text") or ""), list(choice.get("token_ids") or [])
    reply.text += text
    reply.token_ids += ids
    if choice.get("finish_reason"):
        reply.finish_reason = choice["finish_reason"]
    if text or ids:
        reply.arrivals.append((now, len(ids) or 1))


def _take_usage(reply: Reply, usage: Any) -> None:
    if not isinstance(usage, Mapping):
        return
    reply.prompt_tokens = usage.get("prompt_tokens")
    reply.output_tokens = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details")
    if isinstance(details, Mapping):
        reply.cached_tokens = details.get("cached_tokens")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events that hold JSON objects, until [DONE] or the end."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ServerError(f"the stream holds something that is not JSON: {data[:80]!r}") from error
        if isinstance(event, dict):
            yield event


def _message(text: str) -> str:
    try:
        error = json.loads(text).get("error")
        words = error.get("message") if isinstance(error, dict) else error
        return " ".join(str(words or text).split())[:300]
    except (ValueError, AttributeError):
        return " ".join(text.split())[:300]
