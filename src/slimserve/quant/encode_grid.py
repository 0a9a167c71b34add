"""Encoders built on code tables: IQ4_NL, IQ4_XS, IQ2_XXS, the ternary types, MXFP4 and NVFP4.

Each takes x float32 [n, block_size] and importances of the same shape or None, and returns uint8 [n, block_bytes].
"""

from __future__ import annotations

from functools import lru_cache

import torch

from slimserve.quant.encode_blocks import half_bytes, pack_halves
from slimserve.quant.fit import Weights, nearest_codes, safe_inverse, to_half, weighted_sum
from slimserve.quant.grids import E2M1_DOUBLED, IQ4_LEVELS, grid, grid_codes

_IQ4_ENDS = (-127.0, -118.0, -135.0, -110.0, -143.0, 113.0, 106.0, 120.0, 99.0, 127.0)
"""Levels, or nearly so, that the value of largest magnitude is tried on."""

_IQ2_FACTORS = (1.0, 0.92, 1.08, 0.84, 1.17, 0.76, 1.27, 0.69)
_IQ2_LEVELS = (8.0, 25.0, 43.0)
_IQ2_KEPT = 16
"""Table rows per group that stay in the choice once the scale is near; all 256 lower the error by under 0.5 %."""


@lru_cache
def _iq4_table() -> torch.Tensor:
    """Nearest IQ4 level for floor(2 x) in -256..255: all midpoints are multiples of one half."""
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32)
    centres = torch.arange(-256, 256) * 0.5 + 0.25
    return (centres[:, None] - levels).abs().argmin(dim=1)


def _iq4_codes(values: torch.Tensor) -> torch.Tensor:
    index = (values * 2.0).floor_().clamp_(-256, 255).to(torch.int64)
    return _iq4_table()[index + 256]


def fit_iq4(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """The scale [B, 1] that brings x nearest to the sixteen uneven levels."""
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32)
    peak = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    inverse_peak = safe_inverse(peak)
    weighted_x = x if w is None else x * w
    best_gain, best = torch.zeros_like(peak), peak / levels[0]
    for end in _IQ4_ENDS:
        q = levels[_iq4_codes(x * (inverse_peak * end))]
        product = (weighted_x * q).sum(dim=-1, keepdim=True)
        scale = product * safe_inverse(weighted_sum(q * q, w))
        gain = scale * product
        better = gain > best_gain
        best_gain, best = torch.where(better, gain, best_gain), torch.where(better, scale, best)
    return best


def encode_iq4_nl(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """d, then codes of the sixteen uneven levels; d may be negative."""
    d = to_half(fit_iq4(x, w))
    return torch.cat((half_bytes(d), pack_halves(_iq4_codes(x * safe_inverse(d)))), dim=1)


def encode_iq4_xs(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """As IQ4_NL with one signed six-bit scale per 32 of 256 elements."""
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32)
    x = x.reshape(-1, 8, 32)
    w = None if w is None else w.reshape(-1, 8, 32)
    flat_w = None if w is None else w.reshape(-1, 32)
    ideal = fit_iq4(x.reshape(-1, 32), flat_w).reshape(-1, 8, 1)
    d = to_half(ideal.gather(1, ideal.abs().argmax(dim=1, keepdim=True)) / -32.0)
    scale = nearest_codes(ideal, d, -32, 31)
    for last in (False, True):
        best_error, best = torch.full_like(scale, torch.inf), scale
        for step in (0, -1, 1):
            trial = (scale + step).clamp(-32, 31)
            unit = d * trial
            error = x - unit * levels[_iq4_codes(x * safe_inverse(unit))]
            squares = weighted_sum(error * error, w)
            best, best_error = torch.where(squares < best_error, trial, best), torch.minimum(squares, best_error)
        scale = best
        if not last:
            product = scale * levels[_iq4_codes(x * safe_inverse(d * scale))]
            over = weighted_sum(x * product, w).sum(dim=1, keepdim=True)
            refit = over * safe_inverse(weighted_sum(product * product, w).sum(dim=1, keepdim=True))
            d = torch.where(refit == 0, d, to_half(refit))
    codes = _iq4_codes(x * safe_inverse(d * scale))
    stored = (scale + 32).reshape(-1, 8).to(torch.int32)
    high = ((stored >> 4) << torch.arange(0, 16, 2)).sum(dim=1, keepdim=True).to(torch.int16).view(torch.uint8)
    low = ((stored[:, 0::2] & 15) | (stored[:, 1::2] & 15) << 4).to(torch.uint8)
    return torch.cat((half_bytes(d.reshape(-1, 1)), high, low, pack_halves(codes).reshape(-1, 128)), dim=1)


@lru_cache
def _iq2_nearest() -> torch.Tensor:
    """For each of the 3^8 level vectors, the nearest row of the IQ2_XXS table: int64 [6561]."""
    levels = torch.tensor(_IQ2_LEVELS)
    digits = torch.arange(3**8)[:, None] // 3 ** torch.arange(8) % 3
    assert bool((levels[grid_codes("IQ2_XXS").long()] == grid("IQ2_XXS")).all())
    return torch.cdist(levels[digits], grid("IQ2_XXS").float()).argmin(dim=1)


def _even_signs(x: torch.Tensor, w: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Sign bits with an even number of minus per 8, and |x| with the sign of what the bits miss: two [g, 8].

    Where the number is odd, the element that matters least takes the wrong sign.
    """
    negative = x < 0
    squares = x * x if w is None else x * x * w
    odd = negative.sum(dim=1, keepdim=True) % 2 == 1
    flipped = torch.zeros_like(negative).scatter_(1, squares.argmin(dim=1, keepdim=True), odd)
    magnitude = x.abs()
    return negative ^ flipped, torch.where(flipped, -magnitude, magnitude)


def _iq2_first_scale(y: torch.Tensor, w: Weights) -> torch.Tensor:
    """A first scale per 32 elements, y [b, 32]: rows are looked up by their nearest level vector."""
    rows, nearest = grid("IQ2_XXS").float(), _iq2_nearest()
    powers = 3 ** torch.arange(8)
    peak = y.amax(dim=1, keepdim=True)
    weighted_y = y if w is None else y * w
    best_gain, best = torch.zeros_like(peak), peak / 43.0
    for factor in _IQ2_FACTORS:
        scaled = y * (safe_inverse(peak) * (43.0 * factor))
        digits = (scaled > 16.5).to(torch.int64) + (scaled > 34.0).to(torch.int64)
        index = nearest[(digits.reshape(-1, 4, 8) * powers).sum(dim=-1)]
        q = rows[index].reshape(-1, 32)
        product = (weighted_y * q).sum(dim=1, keepdim=True)
        scale = product * safe_inverse(weighted_sum(q * q, w))
        gain = scale * product
        better = gain > best_gain
        best_gain, best = torch.where(better, gain, best_gain), torch.where(better, scale, best)
    return best


class _RowSearch:
    """The rows of the IQ2_XXS table that suit each group of 8 elements, y [g, 8].

    The whole table is scored once, for a first scale; later scales choose among the best rows of that.
    """

    def __init__(self, y: torch.Tensor, w: Weights, first_scale: torch.Tensor) -> None:
        rows = grid("IQ2_XXS").float()  # [256, 8]
        linear = (y if w is None else y * w) @ rows.t()  # [g, 256]
        squares = (rows * rows).sum(dim=1).expand_as(linear) if w is None else w @ (rows * rows).t()
        wide = first_scale.repeat(1, 4).reshape(-1, 1)
        gain = torch.addcmul(linear * (2.0 * wide), squares, wide * wide, value=-1.0)
        self.index = gain.topk(_IQ2_KEPT, dim=1).indices  # [g, kept], best first
        self.linear, self.squares = linear.gather(1, self.index), squares.gather(1, self.index)

    def best(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best place among the kept rows and its gain per group, for a scale per 32: [b, 1] -> two [b, 4]."""
        wide = scale.repeat(1, 4).reshape(-1, 1)
        gain, place = torch.addcmul(self.linear * (2.0 * wide), self.squares, wide * wide, value=-1.0).max(dim=1)
        return place.reshape(-1, 4), gain.reshape(-1, 4)

    def moments(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of w y g and of w g g per 32 for the rows at `place` [b, 4]: two [b, 1]."""
        flat = place.reshape(-1, 1)
        sums = [part.gather(1, flat).reshape(-1, 4).sum(dim=1, keepdim=True) for part in (self.linear, self.squares)]
        return sums[0], sums[1]


def encode_iq2_xxs(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """256 elements: d, then per 32 four table rows, four sign indices and a four-bit scale: d (2 s + 1) / 8.

    Rows are chosen for a first scale, for the rounded scale and its neighbours, and once more for the refitted d.
    """
    groups, group_w = x.reshape(-1, 8), None if w is None else w.reshape(-1, 8)
    signs, y = _even_signs(groups, group_w)
    first = _iq2_first_scale(y.reshape(-1, 32), None if w is None else w.reshape(-1, 32))
    search = _RowSearch(y, group_w, first)
    product, squares = search.moments(torch.zeros((first.shape[0], 4), dtype=torch.int64))
    scale = (product * safe_inverse(squares)).clamp(min=0.0).reshape(-1, 8)  # [n, 8]
    d = to_half(scale.amax(dim=1, keepdim=True) * (8.0 / 31.0))
    step = ((scale * safe_inverse(d) * 8.0 - 1.0) * 0.5).round_().clamp_(0, 15)
    best_gain = torch.full_like(step, -torch.inf)
    best, place = step, torch.zeros((step.numel(), 4), dtype=torch.int64)
    for change in (0, -1, 1):
        trial = (step + change).clamp(0, 15)
        found, gain = search.best((d * (2.0 * trial + 1.0) * 0.125).reshape(-1, 1))
        total = gain.sum(dim=1).reshape(-1, 8)
        better = total > best_gain
        best_gain, best = torch.where(better, total, best_gain), torch.where(better, trial, best)
        place = torch.where(better.reshape(-1, 1), found, place)
    product, squares = search.moments(place)
    unit = (2.0 * best + 1.0) * 0.125
    over = (unit * product.reshape(-1, 8)).sum(dim=1, keepdim=True)
    refit = over * safe_inverse((unit * unit * squares.reshape(-1, 8)).sum(dim=1, keepdim=True))
    d = torch.where(refit > 0, to_half(refit), d)
    place = search.best((d * unit).reshape(-1, 1))[0]
    index = search.index.gather(1, place.reshape(-1, 1)).reshape(-1, 8, 4)
    return _pack_iq2_xxs(d, index, signs.reshape(-1, 8, 4, 8), best)


def _pack_iq2_xxs(d: torch.Tensor, index: torch.Tensor, signs: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    bits = (signs[..., :7].to(torch.int64) << torch.arange(7)).sum(dim=-1)  # [n, 8, 4]
    words = (bits << torch.tensor([0, 7, 14, 21])).sum(dim=-1) | step.to(torch.int64) << 28
    word_bytes = ((words[..., None] >> torch.tensor([0, 8, 16, 24])) & 255).to(torch.uint8)
    return torch.cat((half_bytes(d), torch.cat((index.to(torch.uint8), word_bytes), dim=-1).reshape(-1, 64)), dim=1)


def encode_tq2_0(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Ternary codes and d = amax, two bits each; meant for weights that are ternary already."""
    d = to_half(x.abs().amax(dim=1, keepdim=True))
    planes = (nearest_codes(x, d, -1, 1) + 1).to(torch.uint8).reshape(-1, 2, 4, 32)
    packed = planes[:, :, 0] | planes[:, :, 1] << 2 | planes[:, :, 2] << 4 | planes[:, :, 3] << 6
    return torch.cat((packed.reshape(-1, 64), half_bytes(d)), dim=1)


@lru_cache
def e4m3_values() -> torch.Tensor:
    """The 127 finite non-negative E4M3 values by code, float32."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


@lru_cache
def _e2m1_table() -> torch.Tensor:
    """Nearest E2M1 magnitude code for floor(4 |x|) in 0..31: all midpoints are multiples of one quarter."""
    levels = torch.tensor(E2M1_DOUBLED[:8], dtype=torch.float32) * 0.5
    centres = torch.arange(32) * 0.25 + 0.125
    return (centres[:, None] - levels).abs().argmin(dim=1)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Nearest four-bit float codes, sign in bit 3 (never on zero), int64."""
    magnitude = _e2m1_table()[(values.abs() * 4.0).clamp_(max=31.0).to(torch.int64)]
    return torch.where((values < 0) & (magnitude > 0), magnitude | 8, magnitude)


def fit_group_scale(x: torch.Tensor, w: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 scale codes [g, 1] and E2M1 codes [g, 16] for groups x [g, 16], both int64.

    Tries the scales from just under amax / 6 to amax / 4, where the largest value lands on 6 or on 4.
    """
    table, levels = e4m3_values(), torch.tensor(E2M1_DOUBLED, dtype=torch.float32) * 0.5
    wanted = (x.abs().amax(dim=1, keepdim=True) / 6.0).clamp(max=448.0)
    start = torch.bucketize(wanted, (table[1:] + table[:-1]) * 0.5)
    best_error = torch.full_like(wanted, torch.inf)
    best_scale, best_codes = start, torch.zeros(x.shape, dtype=torch.int64)
    for step in (0, -1, 1, 2, 3, 4, 5):
        trial = (start + step).clamp(0, 126)
        scale = table[trial]
        codes = e2m1_codes(x * safe_inverse(scale))
        error = x - levels[codes] * scale
        squares = weighted_sum(error * error, w)
        better = squares < best_error
        best_error = torch.where(better, squares, best_error)
        best_scale, best_codes = torch.where(better, trial, best_scale), torch.where(better, codes, best_codes)
    return best_scale, best_codes


def encode_nvfp4(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """Four E4M3 scales and 64 E2M1 codes; the scales carry no common factor (see `encode` for the global scale)."""
    scale, codes = fit_group_scale(x.reshape(-1, 16), None if w is None else w.reshape(-1, 16))
    packed = pack_halves(codes).reshape(-1, 32)
    return torch.cat((scale.to(torch.uint8).reshape(-1, 4), packed), dim=1)


def encode_mxfp4(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """One power of two per 32 and E2M1 codes; tries the two exponents that bring amax between 3 and 12."""
    levels = torch.tensor(E2M1_DOUBLED, dtype=torch.float32) * 0.5
    exponent = torch.frexp(x.abs().amax(dim=1, keepdim=True)).exponent.to(torch.int64) - 3  # amax / 2^e in [4, 8)
    exponent = exponent.clamp(-127, 126)
    best_error = torch.full((x.shape[0], 1), torch.inf)
    best, best_codes = exponent, torch.zeros(x.shape, dtype=torch.int64)
    for step in (0, 1):
        scale = torch.ldexp(torch.ones(()), (exponent + step).to(torch.float32))
        codes = e2m1_codes(x * safe_inverse(scale))
        error = x - levels[codes] * scale
        squares = weighted_sum(error * error, w)
        better = squares < best_error
        best_error = torch.where(better, squares, best_error)
        best, best_codes = torch.where(better, exponent + step, best), torch.where(better, codes, best_codes)
    return torch.cat(((best + 127).to(torch.uint8), pack_halves(best_codes)), dim=1)
