"""Scanning scales at load: a scale that is not finite, negative or unset stops the load with its name."""

from __future__ import annotations

import torch

from slimserve.errors import FormatError


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
