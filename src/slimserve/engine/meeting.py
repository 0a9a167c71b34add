"""The folder where a client and its engine process meet, and the end of folders whose owner was killed.

A process id in a folder would say little about its owner: ids are used again, and containers that share a folder for
temporary files count their own. So the owner holds a lock on a file in its folder, which the system takes away with
the process, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import time

COMMANDS, EVENTS, SPEC = "commands", "events", "spec"
_OWNER = "owner"
_PREFIX = "slimserve-"


class MeetingFolder:
    """A folder of mode 0700 for two sockets and the engine's spec; `path` is its place."""

    def __init__(self) -> None:
        """Make it; OSError where none can be made."""
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._owner: int | None = None
        try:
            self._owner = os.open(f"{self.path}/{_OWNER}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Where a file system has no locks, no folder is marked and none is taken for abandoned.
            with contextlib.suppress(OSError):
                _lock(self._owner, patience=1.0)
                # After the lock: whoever reads a mark and gets the lock knows that the owner is gone.
                os.write(self._owner, _mark())
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove it with all that is in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


def remove_abandoned() -> None:
    """Remove this user's meeting folders whose owners have died; what cannot be judged or removed stays."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for path in [entry.path for entry in entries if entry.name.startswith(_PREFIX)]:
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: str) -> None:
    """OSError also where the owner lives (it holds the lock), or where another process removes the folder just now."""
    with contextlib.ExitStack() as stack:
        # From here on everything is named relative to this descriptor: no link leads elsewhere.
        folder = _open(stack, path, os.O_RDONLY | os.O_DIRECTORY)
        if not _is_mine(os.fstat(folder), stat.S_IFDIR):
            return
        owner = _open(stack, _OWNER, os.O_RDWR | os.O_NONBLOCK, dir_fd=folder)
        if not _is_mine(os.fstat(owner), stat.S_IFREG):
            return
        _lock(owner)
        if os.read(owner, 1024) != _mark() or not {COMMANDS, EVENTS, SPEC, _OWNER}.issuperset(os.listdir(folder)):
            return
        for name in (COMMANDS, EVENTS, SPEC, _OWNER):  # the owner's file last: a removal that is cut short is repeated
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        os.rmdir(path)


def _open(stack: contextlib.ExitStack, path: str, flags: int, dir_fd: int | None = None) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=dir_fd)
    stack.callback(os.close, descriptor)
    return descriptor


def _is_mine(found: os.stat_result, kind: int) -> bool:
    """Whether it is of this kind and this user's, and closed to all others, as every meeting folder is."""
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _lock(descriptor: int, patience: float = 0.0) -> None:
    """Take the lock; BlockingIOError if another process still has it after `patience` seconds.

    Whoever looks for abandoned folders holds the lock of a new one for a moment, before it sees that it has no mark.
    """
    import fcntl  # not on every platform that can chat

    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.002)


def _mark() -> bytes:
    """This machine's name: file systems of several machines may keep locks to each."""
    return os.fsencode(socket.gethostname()) + b"\n"
