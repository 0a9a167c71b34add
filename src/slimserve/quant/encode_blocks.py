"""Encoders of the 32-element block types: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.

Each takes x float32 [n, 32] and importances of the same shape or None, and returns uint8 [n, block_bytes].
"""

from __future__ import annotations

import torch

from slimserve.quant.fit import Weights, fit_scale, fit_scale_offset, nearest_codes, to_half

_OFFSETS = (0.0, -0.35, 0.35, -0.7, 0.7, 1.1, 1.5)
"""Corrections of the largest code; found by trying: more of them lower the error by less than 0.1 %."""

_STEPS = (0.0, -0.35, 0.35, -0.7, 0.7, -1.1, 1.1, -2.0, 2.0, -3.0, 3.0, -4.0, 5.0, 8.0)
"""Codes more or fewer for the range; the large ones matter where one value towers over its block."""


def half_bytes(values: torch.Tensor) -> torch.Tensor:
    """float32 [n, c] as little-endian fp16 bytes [n, 2c]."""
    return values.clamp(-65504.0, 65504.0).to(torch.float16).contiguous().view(torch.uint8)


def pack_halves(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes, the first half of the last dimension in low nibbles: [..., 2b] -> uint8 [..., b]."""
    half = codes.shape[-1] // 2
    low, high = codes[..., :half].to(torch.uint8), codes[..., half:].to(torch.uint8)
    return low | (high << 4)


def _pack_fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """Bit 4 of 32 codes as a little-endian u32: [n, 32] -> uint8 [n, 4]."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32)
    bits = (codes.to(torch.int32) >> 4).reshape(-1, 4, 8)
    return (bits * weights).sum(dim=-1).to(torch.uint8)


def encode_q4_0(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """d, then codes q + 8."""
    d = to_half(fit_scale(x, w, -8, 7, _OFFSETS))
    return torch.cat((half_bytes(d), pack_halves(nearest_codes(x, d, -8, 7) + 8)), dim=1)


def encode_q5_0(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """d, the fifth bits, then low bits of q + 16."""
    d = to_half(fit_scale(x, w, -16, 15, _OFFSETS))
    codes = nearest_codes(x, d, -16, 15) + 16
    return torch.cat((half_bytes(d), _pack_fifth_bits(codes), pack_halves(codes.to(torch.uint8) & 15)), dim=1)


def _with_offset(x: torch.Tensor, w: Weights, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(d, m bytes [n, 4], codes [n, 32]) for value d * q + m."""
    scale, offset = fit_scale_offset(x, w, high, _STEPS, positive=False)
    d, m = to_half(scale), to_half(-offset)
    return torch.cat((half_bytes(d), half_bytes(m)), dim=1), nearest_codes(x - m, d, 0, high)


def encode_q4_1(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """d, m, then codes."""
    head, codes = _with_offset(x, w, 15)
    return torch.cat((head, pack_halves(codes)), dim=1)


def encode_q5_1(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """d, m, the fifth bits, then low bits."""
    head, codes = _with_offset(x, w, 31)
    return torch.cat((head, _pack_fifth_bits(codes), pack_halves(codes.to(torch.uint8) & 15)), dim=1)


def encode_q8_0(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """d = amax / 127, then int8 codes; importances change nothing worth searching for at eight bits."""
    d = to_half(x.abs().amax(dim=-1, keepdim=True) / 127.0)
    codes = nearest_codes(x, d, -127, 127).to(torch.int8)
    return torch.cat((half_bytes(d), codes.view(torch.uint8)), dim=1)
