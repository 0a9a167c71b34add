"""Files beside the weights that are read whole: bounded, and never waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from slimserve.errors import FormatError, UsageError


def read_small_file(path: Path, limit: int) -> bytes:
    """The bytes of a file that lies beside the weights (configuration, tokenizer, template), `limit` at most.

    Raises FileNotFoundError where there is none, UsageError when it cannot be read, FormatError when it is longer or
    no regular file: a pipe would be waited for, and a device never ends.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path} cannot be read: it is a folder")
        # Opening a pipe would wait for its writer otherwise.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise FormatError(f"{path} is not a regular file")
            # Some files (of /proc) claim to be empty and are not: what is read counts.
            raw = b"" if found.st_size > limit else file.read(limit + 1)
            if found.st_size > limit or len(raw) > limit:
                size = max(found.st_size, len(raw))
                raise FormatError(f"{path} has {size:,} bytes, more than the {limit:,} that such a file may have")
            return raw
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
