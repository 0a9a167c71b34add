"""The kernels of this build in order of preference, per device type."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slimserve.ops.cpu import registry as cpu_registry
from slimserve.ops.reference import registry as reference_registry
from slimserve.ops.resolver import Case, Choice, KernelEntry, Op, resolve

_references_alone = False


@contextmanager
def references_only() -> Iterator[None]:
    """Every kernel that is chosen inside is the torch reference: for parity runs, which load and run a model in it."""
    global _references_alone
    _references_alone = True
    _forget()
    try:
        yield
    finally:
        _references_alone = False
        _forget()


def _forget() -> None:
    entries.cache_clear()
    pick.cache_clear()
    find.cache_clear()


@functools.cache
def entries(device_type: str) -> tuple[KernelEntry, ...]:
    """Every kernel that may serve on a device type, preferred first; the torch references stand last."""
    found: tuple[KernelEntry, ...] = ()
    if _references_alone:
        return reference_registry.entries()
    if device_type == "cpu":
        found = cpu_registry.entries()
    elif device_type == "cuda":
        from slimserve.ops.triton import registry as triton_registry

        found = triton_registry.entries()
    return found + reference_registry.entries()


@functools.cache
def architecture(device: torch.device) -> str:
    """The device architecture as kernels name it: "cpu", "sm_90", "gfx942"."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    name: str = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.split(":")[0] or f"sm_{properties.major}{properties.minor}"


@functools.cache
def pick(op: Op, device: torch.device, dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None) -> Choice:
    """The kernel of an operation without a prepared weight; resolved once per device and dtypes."""
    case = Case(op, device, architecture(device), dtype=dtype, kv_dtype=kv_dtype)
    return resolve(case, entries(device.type))


@functools.cache
def find(
    op: Op, device: torch.device, dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None
) -> KernelEntry | None:
    """The kernel that serves several operations in one call, or None where they are called one by one."""
    case = Case(op, device, architecture(device), dtype=dtype, kv_dtype=kv_dtype)
    serving = (entry for entry in entries(device.type) if entry.op is op and entry.refuses(case) is None)
    return next(serving, None)
