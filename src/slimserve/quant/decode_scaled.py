"""Reference decode of the formats whose scales are separate tensors: FP8, NVFP4 and int4 of safetensors files.

All scales are multipliers by the time they are in a PackedTensor; `quant.schemes` builds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slimserve.errors import FormatError
from slimserve.quant.grids import E2M1_DOUBLED
from slimserve.quant.tensor import PackedTensor

SCALE_BLOCK = 128
"""Rows and columns that share one scale in block-scaled FP8."""


def _broadcast(scale: torch.Tensor, rank: int) -> torch.Tensor:
    """A scale per tensor, per leading index or per row, with trailing axes of 1 up to `rank`."""
    wide = scale.to(torch.float32)
    return wide.reshape(*wide.shape, *([1] * (rank - wide.dim()))) if wide.dim() < rank else wide


def pair_codes(data: torch.Tensor) -> torch.Tensor:
    """Four-bit codes of bytes that hold two neighbours, low nibble first: uint8 [..., b] -> uint8 [..., 2b]."""
    return torch.stack((data & 15, data >> 4), dim=-1).reshape(*data.shape[:-1], -1)


def expand_blocks(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales of 128 x 128 blocks, [..., ceil(N/128), ceil(K/128)], to one per element [..., N, K]."""
    wide = scale.to(torch.float32).repeat_interleave(SCALE_BLOCK, dim=-2)[..., :rows, :]
    return wide.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :columns]


def has_block_scale(packed: PackedTensor) -> bool:
    """Whether an FP8 tensor has one scale per 128 x 128 block rather than per row or per tensor."""
    scale = packed.scales.get("weight_scale")
    if scale is None or scale.numel() == 1 or scale.dim() != len(packed.shape):
        return False
    return tuple(scale.shape[-2:]) != (packed.shape[-2], 1) and tuple(scale.shape[-2:]) != (1, 1)


def _fp8(packed: PackedTensor) -> torch.Tensor:
    values = packed.data.to(torch.float32)
    scale = packed.scales.get("weight_scale")
    if scale is None:
        return values
    if has_block_scale(packed):
        return values * expand_blocks(scale, packed.shape[-2], packed.shape[-1])
    return values * _broadcast(scale, values.dim())


def _grouped(packed: PackedTensor, values: torch.Tensor) -> torch.Tensor:
    """Multiply by `weight_scale` [..., groups], each for K / groups neighbours; exact for 4-bit values."""
    scale = packed.scales.get("weight_scale")
    if scale is None:
        raise FormatError(f"tensor {packed.name!r}: {packed.format.name} has no weight_scale")
    groups = scale.shape[-1]
    wide = values.reshape(*values.shape[:-1], groups, -1) * scale.to(torch.float32)[..., None]
    return wide.reshape(packed.shape)


def _times_global(packed: PackedTensor, values: torch.Tensor) -> torch.Tensor:
    scale = packed.scales.get("global_scale")
    return values if scale is None else values * _broadcast(scale, values.dim())


def _e2m1(packed: PackedTensor) -> torch.Tensor:
    levels = 0.5 * torch.tensor(E2M1_DOUBLED, dtype=torch.float32, device=packed.data.device)
    values = _grouped(packed, levels[pair_codes(packed.data).long()])
    return _times_global(packed, values)


def _int4(packed: PackedTensor) -> torch.Tensor:
    return _grouped(packed, pair_codes(packed.data).to(torch.float32) - 8.0)


_DECODERS: dict[str, Callable[[PackedTensor], torch.Tensor]] = {"F8_E4M3": _fp8, "E2M1_G16": _e2m1, "INT4": _int4}


def decode_scaled(packed: PackedTensor, decode_block_data: Callable[[PackedTensor], torch.Tensor]) -> torch.Tensor:
    """Decode a tensor with side scales to float32 of its shape.

    A block format (GGUF NVFP4) may carry a `global_scale` that multiplies what its blocks say. Raises FormatError
    for a format that has no such form.
    """
    decoder = _DECODERS.get(packed.format.name)
    if decoder is not None:
        return decoder(packed)
    if set(packed.scales) == {"global_scale"}:
        return _times_global(packed, decode_block_data(packed))
    names = ", ".join(packed.scales) or "none"
    raise FormatError(f"tensor {packed.name!r}: {packed.format.name} with side scales ({names}) has no decoder")
