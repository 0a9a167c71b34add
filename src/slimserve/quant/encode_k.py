"""Encoders of the K types: 256-element super-blocks whose sub-blocks have small integer scales.

Each takes x float32 [n, 256] and importances of the same shape or None, and returns uint8 [n, block_bytes]. The
sub-blocks are fitted alone, their scales are rounded to the super-block's unit, then neighbouring roundings and
the unit itself are corrected against the whole error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimserve.quant.encode_blocks import half_bytes
from slimserve.quant.fit import Weights, fit_scale, fit_scale_offset, nearest_codes, safe_inverse, to_half, weighted_sum

_OFFSETS = (0.0, -0.35, 0.35, -0.7, 0.7, 1.1)
_STEPS = (0.0, -0.35, 0.35, -0.7, 0.7, -1.1, 1.1, -2.0, 2.0, -3.0, 3.0, -4.0, 5.0, 8.0)
_ROUNDS = 2


def _split(x: torch.Tensor, w: Weights, size: int) -> tuple[torch.Tensor, Weights]:
    """[n, 256] -> [n, 256 / size, size]."""
    return x.reshape(-1, 256 // size, size), None if w is None else w.reshape(-1, 256 // size, size)


def _squares(error: torch.Tensor, w: Weights) -> torch.Tensor:
    return weighted_sum(error * error, w)


def _total(values: torch.Tensor, w: Weights) -> torch.Tensor:
    """Weighted sum over a super-block: [n, subs, size] -> [n, 1, 1]."""
    return weighted_sum(values, w).sum(dim=1, keepdim=True)


@dataclass(slots=True)
class _Symmetric:
    """d [n, 1, 1], integer scales [n, subs, 1] and codes [n, subs, size], all float32."""

    d: torch.Tensor
    scale: torch.Tensor
    codes: torch.Tensor


def _fit_symmetric(x: torch.Tensor, w: Weights, low: int, high: int, scale_low: int, scale_high: int) -> _Symmetric:
    """value = d * scale * code, scale in scale_low..scale_high, code in low..high."""
    flat_w = None if w is None else w.reshape(-1, w.shape[-1])
    ideal = fit_scale(x.reshape(-1, x.shape[-1]), flat_w, low, high, _OFFSETS).reshape(*x.shape[:2], 1)
    peak = ideal.gather(1, ideal.abs().argmax(dim=1, keepdim=True))
    d = to_half(peak / scale_low)
    scale = nearest_codes(ideal, d, scale_low, scale_high)
    for _ in range(_ROUNDS):
        scale = _best_scale(x, w, d, scale, (low, high), (scale_low, scale_high))
        product = scale * nearest_codes(x, d * scale, low, high)
        refit = _total(x * product, w) * safe_inverse(_total(product * product, w))
        d = torch.where(refit == 0, d, to_half(refit))
    scale = _best_scale(x, w, d, scale, (low, high), (scale_low, scale_high))
    return _Symmetric(d, scale, nearest_codes(x, d * scale, low, high))


def _best_scale(
    x: torch.Tensor, w: Weights, d: torch.Tensor, scale: torch.Tensor, codes: tuple[int, int], scales: tuple[int, int]
) -> torch.Tensor:
    """The best of each integer scale and its two neighbours."""
    best_error, best = torch.full_like(scale, torch.inf), scale
    for step in (0, -1, 1):
        trial = (scale + step).clamp(*scales)
        unit = d * trial
        error = _squares(x - unit * nearest_codes(x, unit, *codes), w)
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, trial, best)
    return best


@dataclass(slots=True)
class _Offset:
    """d, dmin [n, 1, 1], integer scales and minimums [n, subs, 1] and codes [n, subs, size], all float32."""

    d: torch.Tensor
    dmin: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    codes: torch.Tensor


def _fit_offset(x: torch.Tensor, w: Weights, high: int, scale_high: int) -> _Offset:
    """value = d * scale * code - dmin * minimum, scale and minimum in 0..scale_high, code in 0..high."""
    flat_w = None if w is None else w.reshape(-1, w.shape[-1])
    ideal, offset = fit_scale_offset(x.reshape(-1, x.shape[-1]), flat_w, high, _STEPS, positive=True)
    ideal, offset = ideal.reshape(*x.shape[:2], 1), offset.reshape(*x.shape[:2], 1)
    d = to_half(ideal.amax(dim=1, keepdim=True) / scale_high)
    dmin = to_half(offset.amax(dim=1, keepdim=True) / scale_high)
    scale, minimum = nearest_codes(ideal, d, 0, scale_high), nearest_codes(offset, dmin, 0, scale_high)
    for _ in range(_ROUNDS):
        scale, minimum = _best_pair(x, w, (d, dmin), (scale, minimum), high, scale_high)
        d, dmin = _refit_units(x, w, (d, dmin), (scale, minimum), high)
    scale, minimum = _best_pair(x, w, (d, dmin), (scale, minimum), high, scale_high)
    codes = nearest_codes(x + dmin * minimum, d * scale, 0, high)
    return _Offset(d, dmin, scale, minimum, codes)


Pair = tuple[torch.Tensor, torch.Tensor]


def _best_pair(x: torch.Tensor, w: Weights, units: Pair, start: Pair, high: int, scale_high: int) -> Pair:
    """The best of each integer scale and minimum and their neighbours."""
    best_error = torch.full_like(start[0], torch.inf)
    scale, minimum = start
    for minimum_step in (0, -1, 1):
        trial_minimum = (start[1] + minimum_step).clamp(0, scale_high)
        shifted = x + units[1] * trial_minimum
        for scale_step in (0, -1, 1):
            trial = (start[0] + scale_step).clamp(0, scale_high)
            unit = units[0] * trial
            error = _squares(shifted - unit * nearest_codes(shifted, unit, 0, high), w)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            scale, minimum = torch.where(better, trial, scale), torch.where(better, trial_minimum, minimum)
    return scale, minimum


def _refit_units(x: torch.Tensor, w: Weights, units: Pair, integers: Pair, high: int) -> Pair:
    """Least squares for d and dmin over the super-block, given everything else; kept where it is not solvable."""
    scale, minimum = integers
    product = scale * nearest_codes(x + units[1] * minimum, units[0] * scale, 0, high)
    wide = minimum.expand_as(x)
    aa, bb = _total(product * product, w), _total(wide * wide, w)
    ab, xa, xb = _total(product * wide, w), _total(x * product, w), _total(x * wide, w)
    inverse = safe_inverse(aa * bb - ab * ab)
    d, dmin = to_half((xa * bb - xb * ab) * inverse), to_half((xa * ab - xb * aa) * inverse)
    alone = to_half(xa * safe_inverse(aa))
    no_minimum = bb == 0
    d, dmin = torch.where(no_minimum, alone, d), torch.where(no_minimum, units[1], dmin)
    usable = (d > 0) & (dmin >= 0)
    return torch.where(usable, d, units[0]), torch.where(usable, dmin, units[1])


def _flat(values: torch.Tensor) -> torch.Tensor:
    """[n, s, 1] -> uint8 [n, s] of non-negative integers."""
    return values.reshape(values.shape[0], -1).to(torch.uint8)


def _units(*units: torch.Tensor) -> torch.Tensor:
    return half_bytes(torch.cat([unit.reshape(-1, 1) for unit in units], dim=1))


def _pack_planes(codes: torch.Tensor) -> torch.Tensor:
    """Two-bit codes [n, 256] -> 64 bytes: element 128 h + 32 s + b in bit pair s of byte 32 h + b."""
    planes = codes.to(torch.uint8).reshape(-1, 2, 4, 32)
    return (planes[:, :, 0] | planes[:, :, 1] << 2 | planes[:, :, 2] << 4 | planes[:, :, 3] << 6).reshape(-1, 64)


def _pack_nibble_groups(codes: torch.Tensor) -> torch.Tensor:
    """Four-bit codes [n, 256] -> 128 bytes: groups of 32 bytes hold sub-block 2g low and 2g + 1 high."""
    pairs = codes.to(torch.uint8).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _pack_bit_planes(bits: torch.Tensor) -> torch.Tensor:
    """Single bits [n, 256] -> 32 bytes: element 32 j + b in bit j of byte b."""
    planes = bits.to(torch.uint8).reshape(-1, 8, 32)
    out = planes[:, 0].clone()
    for plane in range(1, 8):
        out |= planes[:, plane] << plane
    return out


def _pack_scale_mins(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Eight six-bit pairs -> 12 bytes, the inverse of `decode.k_scale_mins`."""
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    second = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    third = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    return torch.cat((first, second, third), dim=1)


def encode_q2_k(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Scales and minimums of four bits per 16 elements, two-bit codes."""
    fit = _fit_offset(*_split(x, w, 16), 3, 15)
    scales = _flat(fit.scale) | _flat(fit.minimum) << 4
    return torch.cat((scales, _pack_planes(fit.codes), _units(fit.d, fit.dmin)), dim=1)


def encode_q3_k(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Signed six-bit scales per 16 elements, three-bit codes whose high bits lie apart."""
    fit = _fit_symmetric(*_split(x, w, 16), -4, 3, -32, 31)
    codes, scale = (fit.codes + 4).to(torch.uint8), _flat(fit.scale + 32)
    low = (scale[:, :8] & 15) | (scale[:, 8:] & 15) << 4
    top = (scale >> 4).reshape(-1, 4, 4)
    high = top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6
    parts = (_pack_bit_planes(codes >> 2), _pack_planes(codes & 3), low, high, _units(fit.d))
    return torch.cat(parts, dim=1)


def encode_q4_k(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Six-bit scales and minimums per 32 elements, four-bit codes."""
    fit = _fit_offset(*_split(x, w, 32), 15, 63)
    scales = _pack_scale_mins(_flat(fit.scale), _flat(fit.minimum))
    return torch.cat((_units(fit.d, fit.dmin), scales, _pack_nibble_groups(fit.codes)), dim=1)


def encode_q5_k(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """As Q4_K with a fifth bit per code, stored apart."""
    fit = _fit_offset(*_split(x, w, 32), 31, 63)
    scales = _pack_scale_mins(_flat(fit.scale), _flat(fit.minimum))
    codes = fit.codes.to(torch.uint8)
    parts = (_units(fit.d, fit.dmin), scales, _pack_bit_planes(codes >> 4), _pack_nibble_groups(codes & 15))
    return torch.cat(parts, dim=1)


def encode_q6_k(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Signed eight-bit scales per 16 elements, six-bit codes whose top two bits lie apart."""
    fit = _fit_symmetric(*_split(x, w, 16), -32, 31, -128, 127)
    codes = (fit.codes + 32).to(torch.uint8).reshape(-1, 2, 4, 32)
    low = codes & 15
    first = torch.cat((low[:, :, 0], low[:, :, 1]), dim=-1) | torch.cat((low[:, :, 2], low[:, :, 3]), dim=-1) << 4
    scale = fit.scale.reshape(-1, 16).to(torch.int8).view(torch.uint8)
    return torch.cat((first.reshape(-1, 128), _pack_planes(codes >> 4), scale, _units(fit.d)), dim=1)
