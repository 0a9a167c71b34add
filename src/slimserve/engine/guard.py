"""A child process that never outlives its parent. Standard library only: installed before anything is imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 0.5


def install(parent_pid: int, lifeline: int = 0) -> None:
    """Tie this process to `parent_pid`: it is killed, or exits with 1, as soon as that process is gone.

    Three ways, because each alone has a hole. Linux sends SIGKILL when the parent's thread that started us ends
    (holds also while a long C call keeps the interpreter lock); `lifeline` is a pipe whose other end only the
    parent holds, so reading it ends when the parent dies; and the parent's process id is looked at twice a second.

    Stop signals are the parent's to obey: a service manager sends them to every process of the service at once, and
    requests are to finish before the engine goes.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave_it_to_the_parent)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
    threading.Thread(target=_watch_lifeline, args=(lifeline,), name="parent-lifeline", daemon=True).start()
    threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _leave_it_to_the_parent(_number: int, _frame: FrameType | None) -> None:
    """Does nothing; unlike SIG_IGN it is not passed on to programs that this process starts."""


def _watch_lifeline(lifeline: int) -> None:
    try:
        while os.read(lifeline, 64):
            pass
    finally:
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_SECONDS)
    os._exit(1)
