"""Work that would hold up other requests runs off the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from starlette.concurrency import run_in_threadpool

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_SMALL = 2048
"""Characters or tokens below which a thread costs more than the work."""

_LARGE = 64 * 2**10
"""Above this, work shares two threads: what it holds meanwhile (a hundred bytes and more per character) stays bounded,
and it cannot take all threads from smaller requests."""

_large_pool = ThreadPoolExecutor(2, thread_name_prefix="large-text")


async def off_loop(
    size: int, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Call `function` here if its input is small, in a worker thread otherwise."""
    if size <= _SMALL:
        return function(*args, **kwargs)
    if size > _LARGE:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(_large_pool, call)
    return await run_in_threadpool(function, *args, **kwargs)
