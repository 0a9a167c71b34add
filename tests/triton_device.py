"""Where Triton kernel tests run: on a CUDA device (marked gpu), else on CPU tensors under the interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

ON_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if ON_DEVICE else "cpu"
INTERPRETED = not ON_DEVICE and os.environ.get("TRITON_INTERPRET") == "1"


def triton_marks() -> list[pytest.MarkDecorator]:
    """Marks for a module of kernel tests: gpu on a device, skipped with a reason where nothing can run them."""
    if importlib.util.find_spec("triton") is None:
        return [pytest.mark.skip(reason="triton is not installed (extra `gpu`)")]
    if ON_DEVICE:
        return [pytest.mark.gpu]
    return [] if INTERPRETED else [pytest.mark.skip(reason="no CUDA device and TRITON_INTERPRET is not 1")]
