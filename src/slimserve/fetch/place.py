"""What a place's transfer may raise, and the look whether a host answers at all."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from http.client import HTTPException

USER_AGENT = "slimserve-fetch"


class PlaceError(Exception):
    """A place did not give the bytes; the sentence says why, and the next place is tried."""


def explain(error: BaseException) -> str:
    """A network error in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return explain(error.reason)
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "the host name does not resolve"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def probe(url: str, timeout: float) -> None:
    """Raise PlaceError unless the host of `url` answers something within `timeout` seconds.

    Any HTTP status counts as an answer. The look runs in a thread because name resolution knows no timeout.
    """
    outcome: list[BaseException] = []

    def look() -> None:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": USER_AGENT})
        try:
            urllib.request.urlopen(request, timeout=timeout).close()
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, HTTPException, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=look, name="fetch-probe", daemon=True)
    thread.start()
    thread.join(timeout + 1.0)
    if thread.is_alive():
        raise PlaceError("does not answer")
    if outcome:
        raise PlaceError(f"cannot be reached ({explain(outcome[0])})")
