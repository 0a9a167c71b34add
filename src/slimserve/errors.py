"""Errors that a user may see: one sentence, with the value at fault and what to do."""

import re

# Control characters but for line feed and tab (some are commands to a terminal), and those that turn text around.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with its control characters escaped, for people's eyes: parts of it may come from files or strangers."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class SlimServeError(Exception):
    """Base of every error that SlimServe raises on purpose; `exit_code` is the process's answer."""

    exit_code = 1


class RunError(SlimServeError):
    """Something failed while running (exit code 1)."""


class UsageError(SlimServeError):
    """A command, flag, record or argument is wrong (exit code 2)."""

    exit_code = 2


class RefusalError(SlimServeError):
    """The request cannot be served here: it does not fit or is not supported (exit code 3)."""

    exit_code = 3


class FormatError(SlimServeError):
    """A file is corrupt, truncated, foreign or of an unsupported type; names offset or tensor."""


class RequestError(SlimServeError):
    """A request is invalid; `param` names the field and `status` is the HTTP status for it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
