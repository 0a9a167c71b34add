"""Triton kernels as entries of the kernel table."""

from __future__ import annotations

from slimserve.ops.resolver import KernelEntry


def entries() -> tuple[KernelEntry, ...]:
    """Entries of the Triton kernels, preferred first."""
    return ()
