"""Least-squares fits of a scale, or a scale and an offset, to integer codes; the heart of every encoder.

Each function works on many blocks at once, x float32 [B, n]; `w` are importances of the same shape, or None for
equal ones. A fit tries several first guesses of the scale, rounds, and solves for the best scale given the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Weights = torch.Tensor | None


def weighted_sum(values: torch.Tensor, w: Weights) -> torch.Tensor:
    """Sum of w * values over the last dimension, kept."""
    return (values if w is None else values * w).sum(dim=-1, keepdim=True)


def safe_inverse(values: torch.Tensor) -> torch.Tensor:
    """1 / values, and 0 where the value or its inverse is no normal number."""
    inverse = 1.0 / values
    return torch.where(torch.isfinite(inverse), inverse, 0.0)


def to_half(values: torch.Tensor) -> torch.Tensor:
    """What is left of float32 `values` once stored as fp16, clamped to its range; float32."""
    return values.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)


def fit_scale(
    x: torch.Tensor, w: Weights, low: int, high: int, offsets: Sequence[float], *, positive: bool = False
) -> torch.Tensor:
    """The scale d [B, 1] that makes d * q nearest to x for codes q in low..high.

    First guesses map the value of largest magnitude to about `low` and to about `high`. d may be negative, which
    gives the largest value the end with one more code, unless `positive`.
    """
    peak = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    inverse_peak = safe_inverse(peak)
    weighted_x = x if w is None else x * w
    best_gain = torch.zeros_like(peak)
    best_scale = peak.abs() / high if positive else peak / low
    for offset in offsets:
        for end in (low - offset, high + offset):
            q = (x * (inverse_peak * end)).round_().clamp_(low, high)
            product = (weighted_x * q).sum(dim=-1, keepdim=True)
            square = weighted_sum(q * q, w)
            scale = product * safe_inverse(square)
            gain = scale * product
            better = (gain > best_gain) & (scale > 0) if positive else gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best_scale = torch.where(better, scale, best_scale)
    return best_scale


def _solve(
    x_sum: torch.Tensor, xq: torch.Tensor, w_sum: torch.Tensor, q_sum: torch.Tensor, qq: torch.Tensor, positive: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best (scale, offset) for x ~ scale * q - offset and what it gains over zero; `positive` keeps offset >= 0.

    Where all codes are equal, or the offset may not be negative, the better of scale alone and offset alone.
    """
    determinant = w_sum * qq - q_sum * q_sum
    inverse = torch.where(determinant > 1e-5 * w_sum * qq, safe_inverse(determinant), 0.0)
    scale = (w_sum * xq - q_sum * x_sum) * inverse
    offset = (q_sum * xq - qq * x_sum) * inverse
    single = inverse == 0
    if positive:
        single = single | (offset < 0)
    scale_alone = xq * safe_inverse(qq)
    offset_alone = -x_sum * safe_inverse(w_sum)
    if positive:
        offset_alone = offset_alone.clamp(min=0.0)
    by_scale = scale_alone * xq >= -offset_alone * x_sum
    scale = torch.where(single, torch.where(by_scale, scale_alone, 0.0), scale)
    offset = torch.where(single, torch.where(by_scale, 0.0, offset_alone), offset)
    # At the optimum the squared error is sum(w x x) - scale * sum(w x q) + offset * sum(w x).
    return scale, offset, scale * xq - offset * x_sum


def fit_scale_offset(
    x: torch.Tensor, w: Weights, high: int, steps: Sequence[float], *, positive: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and offset [B, 1] that make scale * q - offset nearest to x for codes q in 0..high.

    `positive` keeps offset >= 0, as the K types store it. First guesses spread the range over high + step codes.
    """
    low = x.amin(dim=-1, keepdim=True)
    if positive:
        low = low.clamp(max=0.0)
    spread = safe_inverse(x.amax(dim=-1, keepdim=True) - low)
    shifted = x - low
    weighted_x = x if w is None else x * w
    x_sum = weighted_x.sum(dim=-1, keepdim=True)
    w_sum = torch.full_like(x_sum, x.shape[-1]) if w is None else w.sum(dim=-1, keepdim=True)
    best_scale, best_offset = safe_inverse(spread * high), -low
    best_gain = torch.full_like(low, -torch.inf)
    for step in (*steps, None, None):
        if step is None:  # twice more, from the best fit so far
            q = (x + best_offset).mul_(safe_inverse(best_scale))
        else:
            q = shifted * (spread * (high + step))
        q = q.round_().clamp_(0, high)
        xq = (weighted_x * q).sum(dim=-1, keepdim=True)
        scale, offset, gain = _solve(x_sum, xq, w_sum, weighted_sum(q, w), weighted_sum(q * q, w), positive)
        better = (gain > best_gain) & (scale >= 0)
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
    return best_scale, best_offset


def nearest_codes(x: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Codes in low..high nearest to x / scale (zero where the scale is zero), float32."""
    return (x * safe_inverse(scale)).round_().clamp_(low, high)
