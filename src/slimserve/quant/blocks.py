"""Fields of packed blocks, shared by decoders and encoders."""

from __future__ import annotations

from collections.abc import Callable

import torch

BlockDecoder = Callable[[torch.Tensor], torch.Tensor]
"""Whole blocks, uint8 [n, block_bytes] -> float32, n * block_size elements in order."""


def half_field(blocks: torch.Tensor, offset: int, count: int = 1) -> torch.Tensor:
    """`count` little-endian fp16 values at byte `offset` of each block, as float32 [n, count]."""
    return blocks[:, offset : offset + 2 * count].contiguous().view(torch.float16).to(torch.float32)


def word_field(blocks: torch.Tensor, offset: int, count: int = 1) -> torch.Tensor:
    """`count` little-endian u32 words at byte `offset`, as int64 [n, count] (never negative)."""
    words = blocks[:, offset : offset + 4 * count].contiguous().view(torch.int32)
    return words.to(torch.int64) & 0xFFFFFFFF


def short_field(blocks: torch.Tensor, offset: int, count: int = 1) -> torch.Tensor:
    """`count` little-endian u16 values at byte `offset`, as int32 [n, count] (never negative)."""
    shorts = blocks[:, offset : offset + 2 * count].contiguous().view(torch.int16)
    return shorts.to(torch.int32) & 0xFFFF


def nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """Low nibbles, then high nibbles, of the last dimension: [..., b] uint8 -> [..., 2b] uint8."""
    return torch.cat((bytes_ & 0x0F, bytes_ >> 4), dim=-1)
