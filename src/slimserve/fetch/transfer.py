"""A plain URL into a file, with resume: drops, stalls and restarts cost only the missing bytes."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO

from slimserve.fetch.place import USER_AGENT, PlaceError, explain
from slimserve.fetch.progress import Task
from slimserve.fetch.settings import FetchSettings

_CHUNK = 1 << 18
_NETWORK = (urllib.error.URLError, ConnectionError, TimeoutError, ssl.SSLError)
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


class _RestartError(Exception):
    """What is held does not continue into what the server sends: begin again at byte 0."""


class _RetryError(Exception):
    """A passing trouble of a server that did answer."""


class _Partial:
    """The bytes held so far and which version of which URL they belong to."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self._record = path.with_name(path.name + ".json")
        self.validator = ""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            self.validator = str(record["validator"]) if record["url"] == url else ""
            same = record["url"] == url
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same:
            self.restart()

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def restart(self, validator: str = "") -> None:
        self.path.unlink(missing_ok=True)
        self.validator = validator
        self._record.write_text(json.dumps({"url": self.url, "validator": validator}), encoding="utf-8")


def download_url(url: str, path: Path, num_bytes: int, task: Task, settings: FetchSettings) -> bool:
    """Bring `num_bytes` bytes of `url` to `path`, continuing what an earlier call left there.

    Returns whether part of the bytes came from an earlier transfer. Raises PlaceError when the server does not
    answer, refuses, holds another length, or makes no progress in `settings.attempts` tries.
    """
    partial = _Partial(path, url)
    if partial.num_bytes > num_bytes:
        partial.restart()
    resumed = partial.num_bytes > 0
    failures, reached = 0, False
    while partial.num_bytes < num_bytes:
        before = partial.num_bytes
        try:
            _one_attempt(partial, num_bytes, task, settings)
        except _RestartError:
            partial.restart()
            resumed = False
            failures += 1
            reason = "its bytes do not continue the partial file"
        except _RetryError as error:
            reached = True
            failures += 1
            reason = str(error)
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and not isinstance(error, _NETWORK):
                raise
            if not reached and partial.num_bytes == before and isinstance(error, urllib.error.URLError):
                raise PlaceError(f"cannot be reached ({explain(error)})") from error
            failures = 1 if partial.num_bytes > before else failures + 1
            reason = explain(error)
        else:
            continue
        reached = True
        if failures >= settings.attempts:
            raise PlaceError(f"gave {partial.num_bytes:,} of {num_bytes:,} bytes ({reason})")
        time.sleep(min(settings.backoff * 2 ** (failures - 1), 8.0))
    return resumed


def _one_attempt(partial: _Partial, num_bytes: int, task: Task, settings: FetchSettings) -> None:
    """One request; returns when the file is whole, raises otherwise."""
    start = partial.num_bytes
    headers = {"User-Agent": USER_AGENT}
    if start:
        headers["Range"] = f"bytes={start}-"
        if partial.validator:
            headers["If-Range"] = partial.validator
    timeout = settings.stall_timeout
    try:
        response = urllib.request.urlopen(urllib.request.Request(partial.url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise _RestartError from error
        if error.code in _RETRIED:
            raise _RetryError(explain(error)) from error
        raise PlaceError(f"answers {explain(error)}") from error
    except ValueError as error:
        raise PlaceError(f"is not a usable URL ({error})") from error
    with response:
        if not _accept(response, partial, start, num_bytes):
            start = 0
        with partial.path.open("ab") as out:
            _copy(response, out, start, num_bytes, task)


def _accept(response: HTTPResponse, partial: _Partial, start: int, num_bytes: int) -> bool:
    """Whether the response continues at `start`; False where it begins anew (the partial is emptied)."""
    if start and response.status == 206:
        where = response.headers.get("Content-Range", "")
        if not where.startswith(f"bytes {start}-") or not where.endswith((f"/{num_bytes}", "/*")):
            raise _RestartError
        return True
    length = response.headers.get("Content-Length")
    if length is not None and length.isdigit() and int(length) != num_bytes:
        raise PlaceError(f"holds {int(length):,} bytes instead of {num_bytes:,}")
    etag = response.headers.get("ETag", "")
    strong = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
    partial.restart(strong)
    return False


def _copy(response: Any, out: BinaryIO, start: int, num_bytes: int, task: Task) -> None:
    done = start
    while done < num_bytes:
        chunk = response.read1(min(_CHUNK, num_bytes - done))
        if not chunk:
            raise ConnectionError("the server closed the connection early")
        out.write(chunk)
        done += len(chunk)
        task.set(done)
    out.flush()
    os.fsync(out.fileno())
