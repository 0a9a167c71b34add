"""How kernels are launched so that a row's bits do not depend on the launch."""

from __future__ import annotations

import functools

import torch
import triton

NO_FUSION = {"enable_fp_fusion": False}
"""Kernels write fused multiply-adds where they want them: the compiler must not fuse one form of a kernel differently
from another, or the decode and prefill forms of the same arithmetic would differ in the last bit."""


def cdiv(value: int, divisor: int) -> int:
    """Ceiling division."""
    return -(-value // divisor)


def next_power(value: int) -> int:
    """The next power of two."""
    return int(triton.next_power_of_2(value))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 under Triton's interpreter, where kernels run on CPU tensors."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run under Triton's interpreter, which multiplies bfloat16 operands as raw bits and knows no
inline assembly: kernels then widen operands first and take the plain form of their bit tricks."""


OVERLAP: bool | None = None
"""Whether kernels that can may begin before the kernels ahead of them end (programmatic dependent launch): None leaves
it to each kernel, which asks for it where it was measured to pay. `measure.kernel_sweep` sets it, to time both."""


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_properties(device).major >= 9


def overlap_options(device: torch.device, pays: bool = False) -> tuple[bool, dict[str, bool]]:
    """Whether a kernel that waits for its inputs itself may be launched early, and its launch options."""
    overlap = (pays if OVERLAP is None else OVERLAP) and _overlaps(device)
    return overlap, {**NO_FUSION, "launch_pdl": True} if overlap else NO_FUSION
