"""Which form of the kernel serves each storage format, and how its blocks are laid out for it.

The bits are those of the file, sorted: codes go to planes of 16-bit words in the order in which a tensor core's left
operand is held [steps, N / 16, fragments, 256] (`tiles.from_fragment`), so that a thread's sixteen bytes are its own;
scales and other small fields to int32 words [steps, words, N] that are contiguous over weight rows. Six-bit scales take
a byte, seven-bit sign indices their eight signs, super-scales float32, TQ1_0's base-3 digits two bits; nothing else
grows. Formats multiplied in integers have planes of bytes [steps, N / 16, fragments, 512] instead (`integers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slimserve.ops.triton import integers, tiles
from slimserve.quant.blocks import half_field, nibbles, short_field, word_field
from slimserve.quant.decode import k_scale_mins, q3_k_scales
from slimserve.quant.decode_grid import iq1_m_scale, ternary_codes
from slimserve.quant.grids import grid, parity_signs

Unpacked = tuple[torch.Tensor | None, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes uint8 [B, block] in element order, words int32 [B, words of one block] and, where a format has them, minima
[B, groups]; B whole blocks."""


@dataclass(frozen=True, slots=True)
class TileFormat:
    """How a format meets a kernel: constants of `linear_kernel` or `integer_kernel`, and `unpack` for whole blocks.

    step, dot: elements of one step of K and of one product. low_bits, high_bits: bits of a code in the two planes.
    field_bits: width of what `unpack` calls words (packed into int32 words per step where narrower).
    words: int32 words per row and step, and bias: what the tile leaves to the offset (see `tiles`). offsets: groups
    add a multiple of the sum of x. spread: where each bit of a low plane's word goes, if not where it is.
    grid: name of the table of an I format, and the factor that its entries are multiplied with.
    integer: multiplied in integers, in `order` (see `integers`). low_at, high_at: the bit of a byte at which a plane's
    field is put; low_shift, high_shift: the code's bit at which it begins. minima: so many groups of a step have a
    minimum, an integer of eight or four bits (`unpack` leaves them beside the codes).
    """

    code: int
    scale: int
    step: int
    dot: int
    unpack: Callable[[torch.Tensor], Unpacked] | None = None
    low_bits: int = 0
    high_bits: int = 0
    field_bits: int = 32
    bias: int = 0
    words: int = 1
    offsets: bool = False
    minima: int = 0
    grid: str = ""
    grid_factor: int = 1
    grid_row: int = 8
    grid_high: int = 0
    grid_delta: bool = False
    weight_parts: int = 1
    spread: tuple[int, ...] = ()
    integer: bool = False
    order: int = 0
    low_at: int = 0
    low_shift: int = 0
    high_at: int = 0
    high_shift: int = 0

    @property
    def columns(self) -> int:
        """Columns of a product for each input row: integers come as two planes."""
        return 2 if self.integer else 1

    @property
    def chained(self) -> bool:
        """Whether products add to one sum along K, because tiles hold final values (up to a scale per row)."""
        return self.scale in (tiles.SCALE_NONE.value, tiles.SCALE_E4M3.value)

    @property
    def joined(self) -> bool:
        """Whether the dots of 128 elements are one where no copies are under way (`linear_kernel.walk_joined`): those
        of final values that bfloat16 holds, but for FP8, whose products were faster with copies."""
        whole = self.chained and self.weight_parts == 1
        return whole and not self.integer and self.code != tiles.FLOAT8.value


def as_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack non-negative integers [B, n] of `bits` bits into int32 words [B, n * bits / 32], low first."""
    per_word = 32 // bits
    wide = values.to(torch.int64).reshape(values.shape[0], -1, per_word)
    shifts = torch.arange(per_word, device=values.device, dtype=torch.int64) * bits
    packed = (wide << shifts).sum(dim=-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _float_word(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32).contiguous().view(torch.int32)


def _raw_half(blocks: torch.Tensor, offset: int, count: int = 1) -> torch.Tensor:
    return short_field(blocks, offset, count)


def _five(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Nibbles at offset + 4 with the fifth bits of the u32 at `offset`."""
    bits = (word_field(blocks, offset) >> torch.arange(32, device=blocks.device)) & 1  # [B, 32]
    return nibbles(blocks[:, offset + 4 : offset + 20]) | (bits << 4).to(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    return nibbles(blocks[:, 2:18]), _raw_half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    return nibbles(blocks[:, 4:20]), as_words(_raw_half(blocks, 0, 2), 16)


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    return _five(blocks, 2), _raw_half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    return _five(blocks, 4), as_words(_raw_half(blocks, 0, 2), 16)


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    return blocks[:, 2:34], _raw_half(blocks, 0)


def _two_bit(fields: torch.Tensor) -> torch.Tensor:
    """64 bytes -> 256 codes: element 128 h + 32 s + b is bit pair s of byte 32 h + b."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=fields.device)
    return ((fields.reshape(-1, 2, 1, 32) >> shifts[:, None]) & 3).reshape(-1, 256)


def _q2_k(blocks: torch.Tensor) -> Unpacked:
    scales = blocks[:, 0:16]
    words = torch.cat((as_words(_raw_half(blocks, 80, 2), 16), as_words(scales & 15, 4)), dim=1)
    return _two_bit(blocks[:, 16:80]), words, scales >> 4


def _signed_words(unit: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A float unit [B, 1] and signed scales [B, n] as bytes."""
    return torch.cat((_float_word(unit), as_words(scales.to(torch.int32) & 255, 8)), dim=1)


def _q3_k(blocks: torch.Tensor) -> Unpacked:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, None, 0:32] >> bits[:, None]) & 1).reshape(-1, 256)
    # The code less 4 as two's complement, at the top of a byte: 32 times its value.
    codes = (_two_bit(blocks[:, 32:96]) | (high << 2)) ^ 4
    return codes, _signed_words(half_field(blocks, 108) / 32, q3_k_scales(blocks[:, 96:108]))


def _k_words(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, minimum = k_scale_mins(blocks[:, 4:16])
    return torch.cat((as_words(_raw_half(blocks, 0, 2), 16), as_words(scale, 8)), dim=1), minimum


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    return nibbles(blocks[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 256), *_k_words(blocks)


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, None, 16:48] >> bits[:, None]) & 1).reshape(-1, 256)
    return nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 256) | (high << 4), *_k_words(blocks)


def _q6_k(blocks: torch.Tensor) -> Unpacked:
    low = nibbles(blocks[:, 0:128].reshape(-1, 2, 64)).reshape(-1, 256)
    # The code less 32 as two's complement, at the top of a byte: four times its value.
    codes = (low | (_two_bit(blocks[:, 128:192]) << 4)) ^ 32
    return codes, _signed_words(half_field(blocks, 208) / 4, blocks[:, 192:208].view(torch.int8))


def _iq4_nl(blocks: torch.Tensor) -> Unpacked:
    return nibbles(blocks[:, 2:18]), _raw_half(blocks, 0)


def _iq4_xs(blocks: torch.Tensor) -> Unpacked:
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    high = (short_field(blocks, 2) >> shifts) & 3  # [B, 8]
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).reshape(-1, 8)
    scales = (low | (high << 4)) + (128 - 32)
    words = torch.cat((_float_word(half_field(blocks, 0)), as_words(scales, 8)), dim=1)
    return nibbles(blocks[:, 8:136].reshape(-1, 8, 16)).reshape(-1, 256), words


def _mxfp4(blocks: torch.Tensor) -> Unpacked:
    return nibbles(blocks[:, 1:17]), blocks[:, 0:1].to(torch.int32)


def scaled_e2m1(codes: torch.Tensor, scales: torch.Tensor) -> Unpacked:
    """Codes [B, 16 n] and E4M3 scale bytes [B, n] as `tiles.word_e2m1` and `tiles.group_factor` read them.

    A scale byte becomes (exponent + 10) * 8 + mantissa, its number written with a leading one; a group whose scale
    is zero gets zero codes (and any scale).
    """
    value = scales.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    mantissa, exponent = torch.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    bytes_ = (exponent + 9) * 8 + (mantissa * 16).to(torch.int32) - 8
    zero = value == 0
    live = torch.where(zero, 0, 255).to(torch.uint8).repeat_interleave(16, dim=1)
    return codes & live, torch.where(zero, 0, bytes_.to(torch.int32))


def _nvfp4(blocks: torch.Tensor) -> Unpacked:
    scales = blocks[:, 0:4] & 127
    scales = torch.where(scales == 127, 0, scales)  # the code that E4M3 reads as NaN stands for zero here
    return scaled_e2m1(nibbles(blocks[:, 4:36].reshape(-1, 4, 8)).reshape(-1, 64), scales)


def _sign_bytes(words: torch.Tensor) -> torch.Tensor:
    """The four 7-bit sign indices of each u32 [B, 8] as bytes of eight signs [B, 32]."""
    shifts = torch.tensor([0, 7, 14, 21], device=words.device)
    return parity_signs().to(words.device)[(words[..., None] >> shifts) & 127].reshape(words.shape[0], 32)


def _pair_words(index: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Grid rows and sign bytes [B, 32] of a row as bytes [B, 8, 4, 2] (group, grid row, index or signs).

    Signs are bytes of eight, in the order of the weights. `relayout` interleaves two rows for `integers.grid_bytes`.
    """
    return torch.stack((index.reshape(-1, 8, 4), signs.reshape(-1, 8, 4)), dim=-1)


def _grid_words(
    scale: torch.Tensor, odd: torch.Tensor, signs: torch.Tensor | None, index: torch.Tensor, high: torch.Tensor | None
) -> Unpacked:
    """scale [B, 1]; odd [B, 8 or 16] with factor 2 * odd + 1; sign words; index bytes; further index bits as words."""
    fields = [_float_word(scale), as_words(odd, 4)]
    if signs is not None:
        fields.append(signs)
    fields.append(as_words(index, 8))
    if high is not None:
        fields.append(high)
    return None, torch.cat(fields, dim=1)


def _nibble_pairs(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), dim=-1).reshape(data.shape[0], -1)


def _iq2_xxs(blocks: torch.Tensor) -> Unpacked:
    fields = blocks[:, 2:66].reshape(-1, 8, 8)
    words = word_field(fields.reshape(-1, 8), 4).reshape(-1, 8)
    index = fields[:, :, 0:4].reshape(-1, 32)
    scales = torch.cat((_float_word(half_field(blocks, 0) / 8), as_words(words >> 28, 4)), dim=1)
    return _pair_words(index, _sign_bytes(words)), scales


def _iq2_xs(blocks: torch.Tensor) -> Unpacked:
    codes = short_field(blocks, 2, 32)
    signs = as_words(parity_signs().to(blocks.device)[(codes >> 9).long()], 8)
    high = as_words((codes >> 8) & 1, 1)
    return _grid_words(half_field(blocks, 0) / 8, _nibble_pairs(blocks[:, 66:74]), signs, codes & 255, high)


def _iq2_s(blocks: torch.Tensor) -> Unpacked:
    signs, high = as_words(blocks[:, 34:66], 8), as_words(blocks[:, 66:74], 8)
    return _grid_words(half_field(blocks, 0) / 8, _nibble_pairs(blocks[:, 74:82]), signs, blocks[:, 2:34], high)


def _iq3_xxs(blocks: torch.Tensor) -> Unpacked:
    words = word_field(blocks, 66, 8)
    return _grid_words(half_field(blocks, 0) / 4, words >> 28, as_words(_sign_bytes(words), 8), blocks[:, 2:66], None)


def _iq3_s(blocks: torch.Tensor) -> Unpacked:
    signs, high = as_words(blocks[:, 74:106], 8), as_words(blocks[:, 66:74], 8)
    return _grid_words(half_field(blocks, 0), _nibble_pairs(blocks[:, 106:110]), signs, blocks[:, 2:66], high)


def _iq1_s(blocks: torch.Tensor) -> Unpacked:
    qh = short_field(blocks, 34, 8)
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    high = (qh[:, :, None] >> shifts) & 7 | ((qh >> 15) << 3)[:, :, None]
    words = as_words(high.reshape(-1, 32), 4)
    return _grid_words(half_field(blocks, 0) / 8, (qh >> 12) & 7, None, blocks[:, 2:34], words)


def _iq1_m(blocks: torch.Tensor) -> Unpacked:
    words = short_field(blocks, 48, 4)
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    odd = ((words[:, :, None] >> shifts) & 7).reshape(-1, 16)
    high = as_words(_nibble_pairs(blocks[:, 32:48]), 4)
    return _grid_words(iq1_m_scale(blocks) / 8, odd, None, blocks[:, 0:32], high)


def _tq1_0(blocks: torch.Tensor) -> Unpacked:
    return ternary_codes(blocks), _float_word(half_field(blocks, 52))


def _tq2_0(blocks: torch.Tensor) -> Unpacked:
    return _two_bit(blocks[:, 0:64]), _float_word(half_field(blocks, 64))


NIBBLE_PAIRS = tuple(4 * (0, 2, 1, 3)[bit // 4] + bit % 4 for bit in range(16))
"""Places of the bits of four nibbles where two look-ups decode the first two and the last two at once."""
_NIBBLE_128 = TileFormat(tiles.FIELDS.value, tiles.SCALE_HALF.value, 128, 32, low_bits=4)
_PAIRED = replace(_NIBBLE_128, scale=tiles.SCALE_HALF_PAIR.value, offsets=True)
_FIVE_256 = replace(_NIBBLE_128, step=256, high_bits=1)
_LEVELS = replace(_NIBBLE_128, code=tiles.NIBBLE_LEVELS.value, spread=NIBBLE_PAIRS)
_SUB_16 = TileFormat(tiles.FIELDS.value, tiles.SCALE_BYTE.value, 256, 16, low_bits=2, words=5)
_Q8_0 = TileFormat(tiles.SIGNED_BYTE.value, tiles.SCALE_HALF.value, 128, 32, _q8_0, 8, words=2, field_bits=16)
E2M1_BITS = (6, 7, 8, 15, 3, 4, 5, 12, 0, 1, 2, 9, 10, 11, 13, 14)
"""Places of the bits of four E2M1 codes in a word: one shift brings magnitude and sign of the first three codes to
bits 6..8 and 15, where `tiles.word_e2m1` wants them."""
_E2M1_16 = TileFormat(
    tiles.WORD_E2M1.value, tiles.SCALE_E4M3.value, 256, 64, low_bits=4, field_bits=8, words=4,
    spread=E2M1_BITS,
)  # fmt: skip
E4M3_BITS = (4, 5, 6, 7, 8, 9, 10, 15, 0, 1, 2, 3, 12, 13, 14, 11)
"""Places of the bits of two E4M3 codes in a word: those of the first stand where `tiles.float8` wants them, those of
the second in two lots that one shift each brings there."""
_GRID_32 = TileFormat(tiles.GRID.value, tiles.SCALE_ODD_NIBBLE.value, 256, 32)
_GRID_16 = replace(_GRID_32, dot=16)
_PLAIN = TileFormat(tiles.PLAIN.value, tiles.SCALE_NONE.value, 128, 32, words=0)

_INTEGER = TileFormat(integers.BYTES.value, integers.UNSIGNED_BYTES.value, 256, 32, integer=True, low_bits=4, words=3)
_HALVES = replace(_INTEGER, scale=integers.SIGNED_BYTES.value, order=integers.HALVES.value, words=5)

TILE_FORMATS: dict[str, TileFormat] = {
    "Q4_0": replace(_NIBBLE_128, unpack=_q4_0, bias=8, words=2, field_bits=16),
    "Q4_1": replace(_PAIRED, unpack=_q4_1, bias=-128, words=4),
    "Q5_0": replace(_FIVE_256, unpack=_q5_0, bias=16, words=4, field_bits=16),
    "Q5_1": replace(_FIVE_256, scale=tiles.SCALE_HALF_PAIR.value, offsets=True, unpack=_q5_1, words=8),
    "Q8_0": _Q8_0,
    "Q2_K": replace(
        _INTEGER,
        code=integers.SCALED_BYTES.value,
        scale=integers.NO_SCALES.value,
        order=integers.THREADS.value,
        unpack=_q2_k,
        low_bits=2,
        minima=16,
    ),
    "Q3_K": replace(_HALVES, unpack=_q3_k, low_bits=2, low_at=6, low_shift=1, high_bits=1, high_at=5),
    "Q4_K": replace(_INTEGER, unpack=_q4_k, minima=8),
    "Q5_K": replace(_INTEGER, unpack=_q5_k, high_bits=1, high_at=4, high_shift=4, minima=8),
    "Q6_K": replace(_HALVES, unpack=_q6_k, low_at=4, low_shift=2, high_bits=2, high_at=2),
    "IQ4_NL": replace(_LEVELS, unpack=_iq4_nl, words=2, field_bits=16),
    "IQ4_XS": replace(_LEVELS, scale=tiles.SCALE_BYTE.value, step=256, unpack=_iq4_xs, words=3),
    "MXFP4": replace(_LEVELS, code=tiles.NIBBLE_E2M1.value, scale=tiles.SCALE_POWER.value, unpack=_mxfp4, field_bits=8),
    "NVFP4": replace(_E2M1_16, unpack=_nvfp4),
    "E2M1_G16": _E2M1_16,
    "INT4": replace(_NIBBLE_128, scale=tiles.SCALE_FLOAT.value, bias=8),
    "F8_E4M3": TileFormat(tiles.FLOAT8.value, tiles.SCALE_NONE.value, 128, 64, low_bits=8, words=0, spread=E4M3_BITS),
    "TQ1_0": replace(_SUB_16, scale=tiles.SCALE_FLOAT.value, unpack=_tq1_0, bias=1, words=1),
    "TQ2_0": replace(_SUB_16, scale=tiles.SCALE_FLOAT.value, unpack=_tq2_0, bias=1, words=1),
    "IQ2_XXS": replace(
        _INTEGER,
        code=integers.GRID_BYTES.value,
        scale=integers.ODD_NIBBLES.value,
        unpack=_iq2_xxs,
        low_bits=2,
        grid="IQ2_XXS",
        words=2,
    ),
    "IQ2_XS": replace(_GRID_16, unpack=_iq2_xs, grid="IQ2_XS", words=3 + 8 + 8 + 1, grid_high=1),
    "IQ2_S": replace(_GRID_16, unpack=_iq2_s, grid="IQ2_S", words=3 + 8 + 8 + 2, grid_high=2),
    "IQ3_XXS": replace(_GRID_32, unpack=_iq3_xxs, grid="IQ3_XXS", words=2 + 8 + 16, grid_row=4),
    "IQ3_S": replace(_GRID_32, unpack=_iq3_s, grid="IQ3_S", words=2 + 8 + 16 + 2, grid_row=4, grid_high=1),
    "IQ1_S": replace(_GRID_32, unpack=_iq1_s, grid="IQ1", grid_factor=8, words=2 + 8 + 4, grid_high=4, grid_delta=True),
    "IQ1_M": replace(_GRID_16, unpack=_iq1_m, grid="IQ1", grid_factor=8, words=3 + 8 + 4, grid_high=4, grid_delta=True),
    "BF16": _PLAIN,
    "F16": replace(_PLAIN, weight_parts=2),
    "F32": replace(_PLAIN, weight_parts=3),
}
"""Formats that the kernel serves."""


def _selectors(values: torch.Tensor) -> torch.Tensor:
    """Grid rows [256, 8] of {8, 25, 43} as int32 [256]: four bits per weight, its place among the three."""
    return as_words(torch.where(values == 8, 0, torch.where(values == 25, 1, 2)), 4).reshape(-1)


def table_of(fmt: TileFormat, device: torch.device) -> torch.Tensor | None:
    """The grid of an I format as bfloat16 [entries, row] on `device`, or what `integers.grid_bytes` looks up."""
    if not fmt.grid:
        return None
    if fmt.integer:
        constants = torch.tensor(integers.GRID_CONSTANTS, dtype=torch.int32)
        return torch.cat((_selectors(grid(fmt.grid)).to(torch.int32), constants)).to(device)
    return (grid(fmt.grid).to(torch.float32) * fmt.grid_factor).to(torch.bfloat16).to(device).contiguous()
