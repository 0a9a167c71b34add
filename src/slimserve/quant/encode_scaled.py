"""Encoders of the formats whose scales are separate tensors: FP8, NVFP4 and symmetric int4 of safetensors files."""

from __future__ import annotations

from enum import Enum

import torch

from slimserve.errors import RefusalError
from slimserve.quant.decode_scaled import SCALE_BLOCK, expand_blocks
from slimserve.quant.encode_grid import fit_group_scale
from slimserve.quant.fit import Weights, fit_scale, nearest_codes, to_half
from slimserve.quant.formats import E2M1_G16, F8_E4M3, INT4
from slimserve.quant.tensor import PackedTensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_GROUP = 16
INT4_GROUP = 128
_ROWS_AT_ONCE = 1 << 17
_INT4_OFFSETS = (0.0, -0.35, 0.35, -0.7, 0.7, 1.1)


class Fp8Scale(Enum):
    """What shares one FP8 scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


def _matrix(values: torch.Tensor, name: str, multiple: int) -> torch.Tensor:
    if values.dim() < 2 or values.shape[-1] % multiple:
        raise RefusalError(f"tensor {name!r} {list(values.shape)}: a matrix with K a multiple of {multiple} is needed")
    if not bool(torch.isfinite(values).all()):
        raise RefusalError(f"tensor {name!r} holds values that are not finite and cannot be quantized")
    return values.to(torch.float32)


def _block_peaks(values: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each 128 x 128 block: [..., N, K] -> [..., ceil(N/128), ceil(K/128)]."""
    rows, columns = values.shape[-2], values.shape[-1]
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % SCALE_BLOCK, 0, -rows % SCALE_BLOCK))
    shape = (*values.shape[:-2], padded.shape[-2] // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    return padded.reshape(shape).amax(dim=(-3, -1))


def encode_fp8(values: torch.Tensor, scale_of: Fp8Scale, name: str = "") -> PackedTensor:
    """Quantize [..., N, K] to E4M3 with scale = amax / 448 per channel, tensor (matrix) or 128 x 128 block.

    A part that is all zero gets scale one, so that no scale looks unset.
    """
    x = _matrix(values, name, 1)
    if scale_of is Fp8Scale.CHANNEL:
        peak = x.abs().amax(dim=-1, keepdim=True)
    elif scale_of is Fp8Scale.TENSOR:
        peak = x.abs().amax(dim=(-2, -1))
    else:
        peak = _block_peaks(x)
    scale = torch.where(peak > 0, peak / E4M3_MAX, 1.0)
    if scale_of is Fp8Scale.BLOCK:
        wide = expand_blocks(scale, x.shape[-2], x.shape[-1])
    elif scale_of is Fp8Scale.TENSOR:
        wide = scale[..., None, None]
        scale = scale.reshape(1) if scale.dim() == 0 else scale[..., None]
    else:
        wide = scale
    data = (x / wide).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return PackedTensor(F8_E4M3, tuple(values.shape), data, name, {"weight_scale": scale})


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes, neighbours in one byte, the even one low: [..., 2b] -> uint8 [..., b]."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _importance(importance: torch.Tensor | None, rows: int, group: int) -> Weights:
    """Importances of one row's groups, repeated for `rows` rows: [K] -> [rows * K / group, group]."""
    return None if importance is None else importance.to(torch.float32).reshape(-1, group).repeat(rows, 1)


def encode_nvfp4(values: torch.Tensor, name: str = "", importance: torch.Tensor | None = None) -> PackedTensor:
    """Quantize [N, K] to E2M1 with E4M3 scales per 16 and one global multiplier amax / (448 * 6)."""
    x = _matrix(values, name, NVFP4_GROUP)
    peak = x.abs().amax()
    factor = torch.where(peak > 0, peak / (E4M3_MAX * E2M1_MAX), 1.0).reshape(1)
    rows = x.reshape(-1, x.shape[-1])
    data = torch.empty((rows.shape[0], x.shape[-1] // 2), dtype=torch.uint8)
    scales = torch.empty((rows.shape[0], x.shape[-1] // NVFP4_GROUP), dtype=torch.uint8)
    step = max(1, _ROWS_AT_ONCE // x.shape[-1])
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step] / factor
        w = _importance(importance, piece.shape[0], NVFP4_GROUP)
        scale, codes = fit_group_scale(piece.reshape(-1, NVFP4_GROUP), w)
        data[start : start + step] = pack_pairs(codes.reshape(piece.shape))
        scales[start : start + step] = scale.reshape(piece.shape[0], -1).to(torch.uint8)
    lead = values.shape[:-1]
    parts = {"weight_scale": scales.view(torch.float8_e4m3fn).reshape(*lead, -1), "global_scale": factor}
    return PackedTensor(E2M1_G16, tuple(values.shape), data.reshape(*lead, -1), name, parts)


def encode_int4(values: torch.Tensor, name: str = "", importance: torch.Tensor | None = None) -> PackedTensor:
    """Quantize [N, K] to symmetric int4 with one fp16 scale per 128; a zero group gets scale one."""
    x = _matrix(values, name, INT4_GROUP)
    rows = x.reshape(-1, x.shape[-1])
    data = torch.empty((rows.shape[0], x.shape[-1] // 2), dtype=torch.uint8)
    scales = torch.empty((rows.shape[0], x.shape[-1] // INT4_GROUP), dtype=torch.float16)
    step = max(1, _ROWS_AT_ONCE // x.shape[-1])
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step]
        groups = piece.reshape(-1, INT4_GROUP)
        w = _importance(importance, piece.shape[0], INT4_GROUP)
        scale = to_half(fit_scale(groups, w, -8, 7, _INT4_OFFSETS, positive=True)).clamp(min=2.0**-24)
        scale = torch.where(groups.abs().amax(dim=1, keepdim=True) > 0, scale, 1.0)
        codes = nearest_codes(groups, scale, -8, 7) + 8
        data[start : start + step] = pack_pairs(codes.reshape(piece.shape))
        scales[start : start + step] = scale.reshape(piece.shape[0], -1).half()
    lead = values.shape[:-1]
    return PackedTensor(INT4, tuple(values.shape), data.reshape(*lead, -1), name, {"weight_scale": scales})
