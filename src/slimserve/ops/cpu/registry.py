"""C++ kernels for CPUs as entries of the kernel table; empty where the library is not built."""

from __future__ import annotations

from slimserve.ops.resolver import KernelEntry


def entries() -> tuple[KernelEntry, ...]:
    """Entries of the C++ library, preferred first."""
    return ()
