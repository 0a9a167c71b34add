"""Rows of packed tensors as packed tensors: views or gathers of the same bytes."""

from __future__ import annotations

import torch

from slimserve.quant.tensor import PackedTensor

_BLOCK_ROWS = 128


def to_device(packed: PackedTensor, device: torch.device) -> PackedTensor:
    """The same tensor with its bytes on `device`."""
    scales = {name: scale.to(device) for name, scale in packed.scales.items()}
    return PackedTensor(packed.format, packed.shape, packed.data.to(device), packed.name, scales)


def slice_rows(packed: PackedTensor, start: int, stop: int) -> PackedTensor:
    """Rows [start, stop) of packed [N, K]; start must be a multiple of 128 where scales cover 128-row blocks."""
    scales: dict[str, torch.Tensor] = {}
    for name, scale in packed.scales.items():
        if scale.numel() == 1:
            scales[name] = scale
        elif scale.shape[0] == packed.shape[0]:
            scales[name] = scale[start:stop]
        else:
            scales[name] = scale[start // _BLOCK_ROWS : -(-stop // _BLOCK_ROWS)]
    return PackedTensor(packed.format, (stop - start, *packed.shape[1:]), packed.data[start:stop], packed.name, scales)


def gather_rows(packed: PackedTensor, rows: torch.Tensor) -> PackedTensor:
    """The rows `rows` [T] of packed [N, K]."""
    scales: dict[str, torch.Tensor] = {}
    for name, scale in packed.scales.items():
        if scale.numel() == 1:
            scales[name] = scale
        elif scale.shape[0] == packed.shape[0]:
            scales[name] = scale[rows]
        else:
            raise ValueError(f"{packed.name}: rows of {packed.format.name} with block scales cannot be gathered")
    return PackedTensor(packed.format, (rows.shape[0], *packed.shape[1:]), packed.data[rows], packed.name, scales)
