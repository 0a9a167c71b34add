"""Reference decode of the formats built on code tables: the I types, ternary types, MXFP4 and NVFP4.

Layouts and formulas are ggml's block definitions; scale products are exact in float32 as in `quant.decode`.
"""

from __future__ import annotations

import torch

from slimserve.quant.blocks import BlockDecoder, half_field, nibbles, short_field, word_field
from slimserve.quant.grids import E2M1_DOUBLED, IQ4_LEVELS, grid, parity_signs


def _rows(name: str, index: torch.Tensor) -> torch.Tensor:
    """Rows of table `name`: int64 [...] -> float32 [..., components]."""
    table = grid(name).to(index.device, torch.float32)
    return table[index]


def _sign_factors(sign_bytes: torch.Tensor) -> torch.Tensor:
    """Bit j of each byte as -1 or +1 for component j: uint8 [...] -> float32 [..., 8]."""
    bits = torch.arange(8, dtype=torch.uint8, device=sign_bytes.device)
    return 1.0 - 2.0 * ((sign_bytes[..., None] >> bits) & 1).to(torch.float32)


def _indexed_signs(index: torch.Tensor) -> torch.Tensor:
    """Signs of 7-bit indices: int [...] in 0..127 -> float32 [..., 8]."""
    return _sign_factors(parity_signs().to(index.device)[index.long()])


def _word_signs(words: torch.Tensor) -> torch.Tensor:
    """The four 7-bit sign indices of each u32: int64 [n, 8] -> float32 [n, 8, 4, 8]."""
    shifts = torch.tensor([0, 7, 14, 21], device=words.device)
    return _indexed_signs((words[..., None] >> shifts) & 127)


def _nibble_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Low then high nibble of each byte, interleaved: uint8 [n, b] -> float32 [n, 2b]."""
    pairs = torch.stack((scale_bytes & 15, scale_bytes >> 4), dim=-1)
    return pairs.reshape(scale_bytes.shape[0], -1).to(torch.float32)


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    fields = blocks[:, 2:66].reshape(-1, 8, 8)
    words = word_field(fields.reshape(-1, 8), 4).reshape(-1, 8)  # [n, 8]
    scale = half_field(blocks, 0) * (0.5 + (words >> 28).to(torch.float32)) * 0.25  # [n, 8]
    rows = _rows("IQ2_XXS", fields[:, :, 0:4].long())  # [n, 8, 4, 8]
    return scale[:, :, None, None] * rows * _word_signs(words)


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    codes = short_field(blocks, 2, 32)  # [n, 32]
    scale = half_field(blocks, 0) * (0.5 + _nibble_scales(blocks[:, 66:74])) * 0.25  # [n, 16]
    values = _rows("IQ2_XS", (codes & 511).long()) * _indexed_signs(codes >> 9)  # [n, 32, 8]
    return scale[:, :, None] * values.reshape(-1, 16, 16)


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 66:74, None] >> shifts) & 3).reshape(-1, 32).long()
    scale = half_field(blocks, 0) * (0.5 + _nibble_scales(blocks[:, 74:82])) * 0.25  # [n, 16]
    rows = _rows("IQ2_S", blocks[:, 2:34].long() | (high << 8))  # [n, 32, 8]
    return scale[:, :, None] * (rows * _sign_factors(blocks[:, 34:66])).reshape(-1, 16, 16)


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = word_field(blocks, 66, 8)
    scale = half_field(blocks, 0) * (0.5 + (words >> 28).to(torch.float32)) * 0.5  # [n, 8]
    rows = _rows("IQ3_XXS", blocks[:, 2:66].long()).reshape(-1, 8, 4, 8)
    return scale[:, :, None, None] * rows * _word_signs(words)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 66:74, None] >> bits) & 1).reshape(-1, 64).long()
    scale = half_field(blocks, 0) * (1.0 + 2.0 * _nibble_scales(blocks[:, 106:110]))  # [n, 8]
    rows = _rows("IQ3_S", blocks[:, 2:66].long() | (high << 8)).reshape(-1, 32, 8)
    return scale[:, :, None] * (rows * _sign_factors(blocks[:, 74:106])).reshape(-1, 8, 32)


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    qh = short_field(blocks, 34, 8)  # [n, 8]
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    high = ((qh[:, :, None] >> shifts) & 7).reshape(-1, 32).long()
    scale = half_field(blocks, 0) * (2 * ((qh >> 12) & 7) + 1).to(torch.float32)  # [n, 8]
    delta = torch.where(qh >= 0x8000, -0.125, 0.125)
    rows = _rows("IQ1", blocks[:, 2:34].long() | (high << 8)).reshape(-1, 8, 32)
    return scale[:, :, None] * (rows + delta[:, :, None])


def iq1_m_scale(blocks: torch.Tensor) -> torch.Tensor:
    """The fp16 super-scale of IQ1_M, one nibble in the top of each of four u16: uint8 [n, 56] -> float32 [n, 1]."""
    words = short_field(blocks, 48, 4)
    nibble_shifts = torch.tensor([12, 8, 4, 0], dtype=torch.int32, device=blocks.device)
    bits = ((words & 0xF000) >> nibble_shifts).sum(dim=1, keepdim=True)
    return bits.to(torch.int16).view(torch.float16).to(torch.float32)


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    words = short_field(blocks, 48, 4)
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    scales = ((words[:, :, None] >> shifts) & 7).reshape(-1, 16)
    scale = iq1_m_scale(blocks) * (2 * scales + 1).to(torch.float32)  # [n, 16]
    qh = torch.stack((blocks[:, 32:48] & 15, blocks[:, 32:48] >> 4), dim=-1).reshape(-1, 32)
    delta = torch.where((qh & 8) != 0, -0.125, 0.125)  # [n, 32]
    rows = _rows("IQ1", blocks[:, 0:32].long() | ((qh & 7).long() << 8))  # [n, 32, 8]
    return scale[:, :, None] * (rows + delta[:, :, None]).reshape(-1, 16, 16)


def _level(levels: tuple[float, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=codes.device)[codes.long()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return half_field(blocks, 0) * _level(IQ4_LEVELS, nibbles(blocks[:, 2:18]))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    high = (short_field(blocks, 2) >> shifts) & 3  # [n, 8]
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).reshape(-1, 8)
    scale = half_field(blocks, 0) * ((low | (high << 4)) - 32).to(torch.float32)  # [n, 8]
    values = _level(IQ4_LEVELS, nibbles(blocks[:, 8:136].reshape(-1, 8, 16)))  # [n, 8, 32]
    return scale[:, :, None] * values


def _trits(bytes_: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` base-3 digits of each byte, digit-major: uint8 [n, b] -> uint8 [n, count * b].

    A byte holds digits as a fraction of 256: digit i is the integer part of 3 * (byte * 3^i mod 256) / 256.
    """
    powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.int16, device=bytes_.device)
    fractions = (bytes_[:, None, :].to(torch.int16) * powers[:, None]) & 255  # [n, count, b]
    return ((fractions * 3) >> 8).reshape(bytes_.shape[0], -1)


def ternary_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Base-3 digits of TQ1_0 blocks uint8 [B, 54] in element order: int16 [B, 256] of 0..2."""
    parts = (_trits(blocks[:, 0:32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    return torch.cat(parts, dim=1)


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    return (ternary_codes(blocks).to(torch.float32) - 1.0) * half_field(blocks, 52)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    q = (blocks[:, 0:64].reshape(-1, 2, 1, 32) >> shifts[:, None]) & 3
    return (q.reshape(-1, 256).to(torch.float32) - 1.0) * half_field(blocks, 64)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent = blocks[:, 0:1].to(torch.int32)
    # 2^(e - 128): e = 0 and 1 are subnormal in float32. The doubled levels take the other factor of two.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _level(E2M1_DOUBLED, nibbles(blocks[:, 1:17]))


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 0:4].to(torch.int32)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).to(torch.float32)
    normal = (1.0 + mantissa / 8.0) * torch.exp2((exponent - 7).to(torch.float32))
    scale = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    scale = torch.where((codes == 0) | (codes == 0x7F), 0.0, scale)  # [n, 4]
    values = _level(E2M1_DOUBLED, nibbles(blocks[:, 4:36].reshape(-1, 4, 8)))  # [n, 4, 16]
    return 0.5 * scale[:, :, None] * values


GRID_DECODERS: dict[str, BlockDecoder] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
