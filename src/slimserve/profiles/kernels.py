"""Which kernel serves which tensors of a profile, and what refused them before: known without loading a weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from slimserve.errors import RefusalError
from slimserve.hardware import DeviceKind
from slimserve.models.contract import CacheKind, Role
from slimserve.ops.heads import PER_HEAD
from slimserve.ops.numerics import Activations, NumericsConfig
from slimserve.ops.registry import architecture, entries
from slimserve.ops.resolver import Case, Op, describe, resolve
from slimserve.plan.description import Weight
from slimserve.profiles.resolve import ResolvedProfile

_SEQUENCE_OPS = {
    CacheKind.ATTENTION: (Op.WRITE_PAGES, Op.PAGED_ATTENTION),
    CacheKind.WINDOW: (Op.WRITE_PAGES, Op.PAGED_ATTENTION),
    CacheKind.LATENT: (Op.WRITE_LATENTS, Op.LATENT_ATTENTION),
    CacheKind.INDEXER: (Op.UPDATE_POOLS, Op.SELECT_POOLS),
    CacheKind.RECURRENT: (Op.CAUSAL_CONV, Op.DELTA_RULE),
}
_BY_HEAD = ".kv_b.weight"
"""Latent attention takes this matrix apart by head when it is loaded."""
_ABSENT_GPU = "sm_90"
"""The architecture to ask for where no GPU is here to be asked for its own."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What one kernel serves: an operation, tensors by family and format (how many, bytes), and why it is this one."""

    operation: str
    family: str
    format: str
    count: int
    num_bytes: int
    kernel: str
    why: str


def kernel_uses(profile: ResolvedProfile) -> list[KernelUse]:
    """Every matrix family of the profile's model and every operation on its caches, by their kernels.

    From headers or the catalog alone. Tensors whose formats are recorded as totals only are refused by name; so is
    a device whose kernels need a package that is not installed.
    """
    config = profile.planned_config()
    device = torch.device("cpu" if profile.device is DeviceKind.CPU else "cuda")
    here = device.type == "cpu" or torch.cuda.is_available()
    name = architecture(device) if here else _ABSENT_GPU
    numerics, kv_dtype = config.numerics, config.cache.dtype.torch
    try:
        table = (*entries(device.type), PER_HEAD)
    except ImportError as error:
        raise RefusalError(f"the kernels of a GPU need a package that is not installed: {error.name}") from error

    def row(case: Case) -> tuple[str, str]:
        try:
            found = describe(resolve(case, table))
        except RefusalError as error:
            return "none", str(error)
        return found.kernel, found.refused or "the first choice for it"

    uses: dict[tuple[str, str, str, str, str], KernelUse] = {}
    for weight in _matrices(profile.description.weights):
        op, exact = _operation(weight, device.type)
        case = Case(
            op, device, name, weight_format=weight.format, dtype=torch.float32 if exact else numerics.activation_dtype,
            shape=weight.shape, numerics=NumericsConfig(torch.float32, Activations.FLOAT) if exact else numerics,
        )  # fmt: skip
        kernel, why = row(case)
        key = (op.value, weight.family, weight.format, kernel, why)
        known = uses.get(key)
        uses[key] = KernelUse(
            op.value, weight.family, weight.format, (known.count if known else 0) + 1,
            (known.num_bytes if known else 0) + weight.num_bytes, kernel, why,
        )  # fmt: skip
    found = list(uses.values())
    ops = [Op.RMS_NORM, Op.ROPE]
    ops += [op for spec in profile.description.caches(kv_dtype) for op in _SEQUENCE_OPS[spec.kind]]
    for op in dict.fromkeys(ops):
        paged = op not in (Op.RMS_NORM, Op.ROPE)
        case = Case(op, device, name, dtype=numerics.activation_dtype, kv_dtype=kv_dtype if paged else None)
        kernel, why = row(case)
        found.append(KernelUse(op.value, "", config.cache.dtype.value if paged else "", 0, 0, kernel, why))
    return found


def _matrices(weights: Iterable[Weight]) -> Iterable[Weight]:
    return (weight for weight in weights if weight.shape and weight.format)


def _operation(weight: Weight, device: str) -> tuple[Op, bool]:
    """The operation that multiplies with a weight (or reads its rows), and whether it does so in float32."""
    if weight.experts:
        return Op.EXPERTS, False
    if weight.family == Role.EMBEDDING.value and device == "cpu":
        return Op.EMBEDDING, False
    if len(weight.shape) == 3 or weight.name.endswith(_BY_HEAD):
        return Op.HEAD_LINEAR, False
    return Op.LINEAR, weight.family == Role.ROUTER.value


def kernel_lines(profile: ResolvedProfile) -> list[str]:
    """The same for people."""
    uses = kernel_uses(profile)
    absent = profile.device is not DeviceKind.CPU and not torch.cuda.is_available()
    lines = [f"  kernels on {profile.device.value}" + (f", as for {_ABSENT_GPU}: no GPU is here" if absent else "")]
    for use in uses:
        subject = " ".join(part for part in (use.family, use.format) if part)
        number = f"{use.count} tensor{'' if use.count == 1 else 's'}, {use.num_bytes / 2**20:,.1f} MiB"
        tensors = number if use.count else ""
        lines.append(f"    {use.operation:17s} {subject:19s} {use.kernel:24s} {tensors:26s} {use.why}")
    if not any(use.count for use in uses):
        lines.append("    the record holds sizes, not tensors: kernels are known once a file is named (--model)")
    return lines
