"""How a container's tensor becomes a parameter: each transform by name, exact on packed rows.

A parameter table names a transform and one integer argument; nothing is requantized here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slimserve.errors import FormatError
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import F32
from slimserve.quant.tensor import PackedTensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformRule:
    """`apply(tensor, argument)` makes the parameter; `source_shape(shape, argument)` is the file's shape."""

    apply: Callable[[PackedTensor, int], PackedTensor]
    source_shape: Callable[[Shape, int], Shape]


def _same(shape: Shape, argument: int) -> Shape:
    return shape


def plain_float32(tensor: PackedTensor, values: torch.Tensor) -> PackedTensor:
    """`values` as a float32 parameter under the name of `tensor`."""
    return PackedTensor(F32, tuple(values.shape), values.contiguous(), tensor.name)


def _keep(tensor: PackedTensor, argument: int) -> PackedTensor:
    return tensor


def _halves_from_neighbours(tensor: PackedTensor, heads: int) -> PackedTensor:
    """Rows [heads, D/2, 2] back to [heads, 2, D/2]: a rotary pair's members leave each other's side."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise FormatError(f"tensor {tensor.name}: {rows} rows are not {heads} heads of an even size")

    def reorder(values: torch.Tensor) -> torch.Tensor:
        rest = values.shape[1:]
        return values.reshape(heads, rows // (2 * heads), 2, *rest).transpose(1, 2).reshape(rows, *rest)

    scales = {}
    for name, scale in tensor.scales.items():
        if scale.numel() > 1 and scale.shape[0] != rows:
            raise FormatError(f"tensor {tensor.name}: rows with block scales cannot be reordered")
        scales[name] = scale if scale.numel() == 1 else reorder(scale)
    return replace(tensor, data=reorder(tensor.data), scales=scales)


def _add_one(tensor: PackedTensor, argument: int) -> PackedTensor:
    return plain_float32(tensor, dequantize(tensor, torch.float32) + 1.0)


def _squeeze(tensor: PackedTensor, axis: int) -> PackedTensor:
    """Drop an axis of extent 1 of a plain tensor (convolution kernels [C, 1, W])."""
    shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, data=tensor.data.squeeze(axis))


def _negative_exp(tensor: PackedTensor, argument: int) -> PackedTensor:
    """-exp(a), as GGUF stores the decay parameter A_log."""
    return plain_float32(tensor, -torch.exp(dequantize(tensor, torch.float32)))


RULES: dict[str, TransformRule] = {
    "none": TransformRule(_keep, _same),
    "halves_from_neighbours": TransformRule(_halves_from_neighbours, _same),
    "add_one": TransformRule(_add_one, _same),
    "squeeze": TransformRule(_squeeze, lambda shape, axis: (*shape[:axis], 1, *shape[axis:])),
    "negative_exp": TransformRule(_negative_exp, _same),
}
"""Transforms of one tensor. The loader does "stack_experts" (argument E: the name's {expert} runs over 0..E-1)."""
