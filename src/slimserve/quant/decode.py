"""Reference decode of every storage format to float32, in torch.

Each decoder turns whole blocks, uint8 [n, block_bytes], into float32 [n, block_size]. Every product of a scale with
a small integer is exact in float32, so the order of factors does not matter; where an offset is added or subtracted
there is one rounding, as in ggml. Layouts and formulas are ggml's block definitions.
"""

from __future__ import annotations

import torch

from slimserve.errors import FormatError
from slimserve.quant.blocks import BlockDecoder, half_field, nibbles
from slimserve.quant.decode_grid import GRID_DECODERS
from slimserve.quant.decode_scaled import decode_scaled
from slimserve.quant.formats import is_plain
from slimserve.quant.tensor import PackedTensor

_CHUNK_ELEMENTS = 1 << 21
"""Elements decoded at a time, so that integer intermediates stay small beside the result."""


def dequantize(packed: PackedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode `packed` to a plain tensor of its logical shape; the reference path, never used to serve.

    Exact in float32 by the format's definition, then rounded to `dtype`; NaN and infinity in scales pass through.
    Raises FormatError, naming the tensor, for a format that has no decoder.
    """
    if packed.scales or packed.format.type_id is None:
        return decode_scaled(packed, _decode_plain_or_blocks).to(dtype)
    return _decode_plain_or_blocks(packed).to(dtype)


def _decode_plain_or_blocks(packed: PackedTensor) -> torch.Tensor:
    """Decode the data alone, without side scales."""
    fmt = packed.format
    if is_plain(fmt):
        return packed.data.to(torch.float32).reshape(packed.shape)
    decoder = block_decoder(fmt.name)
    if decoder is None:
        raise FormatError(f"tensor {packed.name!r}: format {fmt.name} (id {fmt.type_id}) has no decoder")
    return decode_blocks(decoder, packed.data, fmt.block_size, fmt.block_bytes).reshape(packed.shape)


def block_decoder(name: str) -> BlockDecoder | None:
    """The decoder of the block format called `name`, or None."""
    return _DECODERS.get(name)


def decode_blocks(decoder: BlockDecoder, data: torch.Tensor, block_size: int, block_bytes: int) -> torch.Tensor:
    """Decode uint8 `data` (whole blocks) piecewise; returns float32 [num_blocks, block_size]."""
    blocks = data.reshape(-1, block_bytes)  # [B, block_bytes]
    num_blocks = blocks.shape[0]
    out = torch.empty((num_blocks, block_size), dtype=torch.float32, device=data.device)
    step = max(1, _CHUNK_ELEMENTS // block_size)
    for start in range(0, num_blocks, step):
        piece = blocks[start : start + step]
        out[start : start + step] = decoder(piece).reshape(piece.shape[0], block_size)
    return out


def _fifth_bits(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Bit i of the u32 at `offset`, moved to weight 16: uint8 [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = (blocks[:, offset : offset + 4, None] >> shifts) & 1  # [n, 4, 8]
    return bits.reshape(-1, 32) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (nibbles(blocks[:, 2:18]).to(torch.float32) - 8.0) * half_field(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return nibbles(blocks[:, 4:20]).to(torch.float32) * half_field(blocks, 0) + half_field(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = nibbles(blocks[:, 6:22]) | _fifth_bits(blocks, 2)
    return (q.to(torch.float32) - 16.0) * half_field(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = nibbles(blocks[:, 8:24]) | _fifth_bits(blocks, 4)
    return q.to(torch.float32) * half_field(blocks, 0) + half_field(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:34].view(torch.int8).to(torch.float32) * half_field(blocks, 0)


def _q8_1(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 4:36].view(torch.int8).to(torch.float32) * half_field(blocks, 0)


def _two_bit_planes(qs: torch.Tensor) -> torch.Tensor:
    """64 bytes -> 256 two-bit values: element 128 * half + 32 * s + b is bit pair s of byte 32 * half + b."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=qs.device)
    halves = qs.reshape(-1, 2, 1, 32)
    return (halves >> shifts[:, None]) & 3  # [n, 2, 4, 32]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, 0:16]
    d, dmin = half_field(blocks, 80), half_field(blocks, 82)
    scale = d * (scales & 0x0F).to(torch.float32)  # [n, 16]
    minimum = dmin * (scales >> 4).to(torch.float32)
    q = _two_bit_planes(blocks[:, 16:80]).reshape(-1, 16, 16).to(torch.float32)
    return scale[:, :, None] * q - minimum[:, :, None]


def q3_k_scales(packed: torch.Tensor) -> torch.Tensor:
    """The sixteen 6-bit scales of Q3_K from their 12 bytes, less 32: uint8 [n, 12] -> int8 [n, 16]."""
    low = nibbles(packed[:, 0:8])  # [n, 16]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    high = (packed[:, None, 8:12] >> shifts[:, None]) & 3  # [n, 4, 4]
    return (low | (high.reshape(-1, 16) << 4)).to(torch.int8) - 32


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    mask = (blocks[:, None, 0:32] >> bits[:, None]) & 1  # [n, 8, 32]
    low = _two_bit_planes(blocks[:, 32:96]).reshape(-1, 8, 32)
    q = low.to(torch.int8) - ((mask ^ 1) << 2).to(torch.int8)
    scale = half_field(blocks, 108) * q3_k_scales(blocks[:, 96:108]).to(torch.float32)  # [n, 16]
    return scale[:, :, None] * q.reshape(-1, 16, 16).to(torch.float32)


def k_scale_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit (scale, min) pairs of Q4_K and Q5_K from their 12 bytes: uint8 [n, 12] -> two uint8 [n, 8]."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scale, minimum


def _scale_min_terms(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, minimum = k_scale_mins(blocks[:, 4:16])
    d, dmin = half_field(blocks, 0), half_field(blocks, 2)
    return (d * scale.to(torch.float32))[:, :, None], (dmin * minimum.to(torch.float32))[:, :, None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scale_min_terms(blocks)
    q = nibbles(blocks[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scale * q.to(torch.float32) - minimum


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scale_min_terms(blocks)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, None, 16:48] >> bits[:, None]) & 1) << 4  # [n, 8, 32]
    q = nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32) | high
    return scale * q.to(torch.float32) - minimum


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = nibbles(blocks[:, 0:128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts[:, None]) & 3  # [n, 2, 4, 32]
    q = (low | (high << 4)).to(torch.int8) - 32
    scale = half_field(blocks, 208) * blocks[:, 192:208].view(torch.int8).to(torch.float32)  # [n, 16]
    return scale[:, :, None] * q.reshape(-1, 16, 16).to(torch.float32)


def _q8_k(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, 0:4].contiguous().view(torch.float32)
    return scale * blocks[:, 4:260].view(torch.int8).to(torch.float32)


_DECODERS: dict[str, BlockDecoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q8_1": _q8_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_K": _q8_k,
    **GRID_DECODERS,
}
