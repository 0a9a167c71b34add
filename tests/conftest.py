"""Test session set-up: without a CUDA device Triton kernels run under Triton's interpreter."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Must stand before the first `import triton`: kernels choose their form when they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

for _name in ("SIGINT", "SIGHUP"):
    # A background job ignores Ctrl-C, and under nohup the hang-up too; so would every process that a test interrupts.
    _signal = getattr(signal, _name, None)
    if _signal is not None and signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.default_int_handler if _name == "SIGINT" else signal.SIG_DFL)


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve CPU tensors with the Triton kernels too, which the interpreter then runs."""
    from slimserve.ops import linear, registry  # noqa: F401 (linear: the module that holds the second reference)
    from slimserve.ops.reference import registry as reference_registry
    from slimserve.ops.triton import registry as triton_registry

    found = triton_registry.entries() + reference_registry.entries()
    monkeypatch.setattr(registry, "entries", lambda device_type: found)
    monkeypatch.setattr(sys.modules["slimserve.ops.linear"], "entries", lambda device_type: found)
    registry.pick.cache_clear()
    yield
    registry.pick.cache_clear()
