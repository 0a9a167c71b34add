"""Work that would hold up other requests runs off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_SMALL = 2048
"""Characters or tokens below which a thread costs more than the work."""


async def off_loop(
    size: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call `function` here if its input is small, in a worker thread otherwise."""
    if size <= _SMALL:
        return function(*args, **kwargs)
    return await run_in_threadpool(function, *args, **kwargs)
