"""Test session set-up: without a CUDA device Triton kernels run under Triton's interpreter."""

from __future__ import annotations

import os
import signal

import torch

if not torch.cuda.is_available():
    # Must stand before the first `import triton`: kernels choose their form when they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
