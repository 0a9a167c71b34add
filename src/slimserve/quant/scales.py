"""Scanning scales at load: a scale that is not finite, negative or unset stops the load with its name."""

from __future__ import annotations

import torch

from slimserve.errors import FormatError
from slimserve.quant.tensor import PackedTensor


def _first(mask: torch.Tensor) -> list[int]:
    return [int(index) for index in mask.nonzero()[0]]


def check_scale(name: str, scale: torch.Tensor) -> None:
    """Refuse NaN, infinity, negative values and a tensor of nothing but zeros; raises FormatError naming `name`.

    Zeros between other values pass: a group of zero weights has scale zero.
    """
    if scale.numel() == 0:
        raise FormatError(f"scale {name!r} is empty")
    if scale.dtype is torch.float8_e4m3fn:
        bits = scale.view(torch.uint8)
        not_finite, negative, zero = (bits & 0x7F) == 0x7F, bits > 0x80, (bits & 0x7F) == 0
    else:
        not_finite, negative, zero = ~torch.isfinite(scale), scale < 0, scale == 0
    if bool(not_finite.any()):
        at = _first(not_finite)
        raise FormatError(f"scale {name!r} holds {float(scale[tuple(at)].float())} at {at}; the file is damaged")
    if bool(negative.any()):
        at = _first(negative)
        raise FormatError(f"scale {name!r} holds {float(scale[tuple(at)].float()):g} at {at}; scales are not negative")
    if bool(zero.all()):
        raise FormatError(f"scale {name!r} holds nothing but zeros, that is unset")


def check_unset_rows(name: str, scale: torch.Tensor, data: torch.Tensor, mask: int) -> None:
    """Refuse a row whose scales are all zero though its data are not: its scales were never written.

    scale [..., N, groups]; data uint8 [..., N, bytes], where `data & mask` is zero for a zero weight.
    """
    width = scale.shape[-1]
    plain = scale.view(torch.uint8) & 0x7F if scale.dtype is torch.float8_e4m3fn else scale
    zero_rows = (plain.reshape(-1, width) == 0).all(dim=1).nonzero().flatten()
    if not zero_rows.numel():
        return
    filled = ((data.reshape(-1, data.shape[-1])[zero_rows] & mask) != 0).any(dim=1)
    if bool(filled.any()):
        row = int(zero_rows[int(filled.nonzero()[0])])
        raise FormatError(f"scale {name!r} is zero in row {row} though its weights are not, that is unset")


_HALF_FIELDS: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q8_1": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ3_XXS": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ3_S": (0,),
    "IQ2_S": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Byte offsets of the fp16 fields that scale a whole block."""

_ROWS_AT_ONCE = 1 << 18
_HALF_EXPONENT = 0x7C00
_PLAIN_AT_ONCE = 1 << 17
_MAGNITUDES = {
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0x7F),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
"""For each dtype: integers of its width, the mask without sign, and the smallest pattern that is not finite."""


def _bad_half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Blocks whose fp16 field at `offset` is NaN or infinite: bool [n]."""
    high = blocks[:, offset + 1]  # sign, exponent and the top of the mantissa
    return (high & (_HALF_EXPONENT >> 8)) == _HALF_EXPONENT >> 8


def _bad_blocks(name: str, blocks: torch.Tensor) -> torch.Tensor | None:
    """Which blocks of a format have a scale that is not finite; None for formats that cannot hold one."""
    if name == "IQ1_M":
        # The fp16 scale lies in the top nibbles of four u16: its exponent is the last nibble and a bit of the third.
        return ((blocks[:, 55] & 0x70) == 0x70) & ((blocks[:, 53] & 0xC0) == 0xC0)
    if name == "MXFP4":
        return blocks[:, 0] == 0xFF
    if name == "Q8_K":
        return (blocks[:, 2:4].contiguous().view(torch.int16).flatten() & 0x7F80) == 0x7F80
    fields = _HALF_FIELDS.get(name)
    if fields is None:
        return None
    bad = _bad_half(blocks, fields[0])
    for offset in fields[1:]:
        bad = bad | _bad_half(blocks, offset)
    return bad


def check_weight(packed: PackedTensor) -> None:
    """Refuse a weight that holds NaN or infinity: in a block's scale, or anywhere in a plain tensor.

    Side scales are checked where they are built. Raises FormatError naming the tensor and the row.
    """
    fmt, data = packed.format, packed.data
    if data.dtype in _MAGNITUDES:
        _check_plain(packed)
        return
    if data.dtype is not torch.uint8 or fmt.type_id is None:
        return
    blocks = data.reshape(-1, fmt.block_bytes)
    for start in range(0, blocks.shape[0], _ROWS_AT_ONCE):
        bad = _bad_blocks(fmt.name, blocks[start : start + _ROWS_AT_ONCE])
        if bad is None:
            return
        if bool(bad.any()):
            block = start + _first(bad)[0]
            row = block * fmt.block_size // packed.shape[-1]
            raise FormatError(
                f"tensor {packed.name!r}: the {fmt.name} scale of block {block} (row {row}) is not finite"
            )


def _check_plain(packed: PackedTensor) -> None:
    """Magnitude bits as integers: NaN and infinity are the largest."""
    integer, magnitude, first_bad = _MAGNITUDES[packed.data.dtype]
    flat = packed.data.reshape(-1)
    for start in range(0, flat.numel(), _PLAIN_AT_ONCE):
        bits = flat[start : start + _PLAIN_AT_ONCE].view(integer) & magnitude
        if int(bits.max()) >= first_bad:
            at = start + _first(bits >= first_bad)[0]
            raise FormatError(f"tensor {packed.name!r} holds a value that is not finite at element {at}")
