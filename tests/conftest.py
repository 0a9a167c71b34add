"""Test session set-up: without a CUDA device Triton kernels run under Triton's interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Must stand before the first `import triton`: kernels choose their form when they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
