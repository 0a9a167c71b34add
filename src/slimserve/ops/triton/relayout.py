"""Load-time relayout of packed weights: the same bits, sorted into planes and words (see `formats`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimserve.errors import RefusalError
from slimserve.ops.triton.formats import TILE_FORMATS, TileFormat, as_words, scaled_e2m1, table_of
from slimserve.ops.triton.launch import cdiv
from slimserve.quant.decode_scaled import SCALE_BLOCK, has_block_scale, pair_codes
from slimserve.quant.tensor import PackedTensor

_CHUNK_ELEMENTS = 1 << 24
"""Elements unpacked at a time, so that load needs little memory beside the weight."""


@dataclass(slots=True)
class TileWeight:
    """A [G, N, K] weight as the kernel reads it (G = 1 for a plain matrix).

    planes: codes [G, steps, tiles, N, bytes] or None; a plain dtype has one plane [G, N, K]. words int32
    [G, steps, words, N]. row_scale [G, N] and block_scale [G, ceil(N / 128), steps] are float32 or None.
    """

    format: TileFormat
    groups: int
    rows: int
    width: int
    steps: int
    low: torch.Tensor | None
    high: torch.Tensor | None
    words: torch.Tensor | None
    table: torch.Tensor | None
    row_scale: torch.Tensor | None = None
    block_scale: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = (self.low, self.high, self.words, self.table, self.row_scale, self.block_scale)
        return sum(t.numel() * t.element_size() for t in held if t is not None)


_WORDS = {8: torch.uint8, 16: torch.int16}


def refuses(packed_format: str, shape: tuple[int, ...] | None) -> str | None:
    """Why the kernel does not serve a format, or None."""
    fmt = TILE_FORMATS.get(packed_format)
    if fmt is None:
        return f"no tile decoder for {packed_format}"
    if shape is not None and shape[-2] * cdiv(shape[-1], fmt.step) * 16 >= 1 << 31:
        return f"{shape} exceeds 32-bit row and step counts"
    return None


def _plane(codes: torch.Tensor, bits: int, shift: int, word_bits: int, spread: tuple[int, ...] = ()) -> torch.Tensor:
    """Bits [shift, shift + bits) of codes [r, steps, dots, W], word_bits / bits dots a tile: [steps, tiles, r, W]."""
    rows, steps, dots, width = codes.shape
    per_tile = word_bits // bits
    fields = (codes.to(torch.int32) >> shift) & ((1 << bits) - 1)
    fields = fields.view(rows, steps, dots // per_tile, per_tile, width)
    packed = fields[:, :, :, 0].clone()
    for field in range(1, per_tile):
        packed |= fields[:, :, :, field] << (bits * field)
    if spread:
        moved = torch.zeros_like(packed)
        for source, target in enumerate(spread):
            moved |= ((packed >> source) & 1) << target
        packed = moved
    return packed.permute(1, 2, 0, 3).to(_WORDS[word_bits])


def _unpack(
    packed: PackedTensor, fmt: TileFormat, data: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Codes [r, steps * step] and word fields [r, steps, n] of rows data [r, row bytes], padded with zero blocks."""
    rows = data.shape[0]
    padded = cdiv(packed.shape[-1], fmt.step) * fmt.step
    if fmt.unpack is None:
        codes = pair_codes(data) if fmt.low_bits == 4 else data.view(torch.uint8)
        return torch.nn.functional.pad(codes, (0, padded - codes.shape[1])), None
    block, size = packed.format.block_size, packed.format.block_bytes
    data = torch.nn.functional.pad(data, (0, padded // block * size - data.shape[1]))
    unpacked, fields = fmt.unpack(data.reshape(-1, size))
    steps = padded // fmt.step
    if fields is not None:
        fields = fields.reshape(rows, steps, -1)
    return (None if unpacked is None else unpacked.reshape(rows, padded)), fields


def _side_fields(packed: PackedTensor, fmt: TileFormat, steps: int) -> torch.Tensor | None:
    """Group scales that stand beside the codes of [N, K], as word fields [N, steps, n]."""
    scale = packed.scales.get("weight_scale")
    if packed.format.name == "E2M1_G16":
        if scale is None or scale.dtype != torch.float8_e4m3fn:
            raise RefusalError(f"{packed.name}: E2M1_G16 on this device needs float8_e4m3fn group scales.")
        codes = scale.contiguous().view(torch.uint8) & 127
        per_step = fmt.step // 16
        return torch.nn.functional.pad(codes, (0, steps * per_step - codes.shape[1])).reshape(-1, steps, per_step)
    if packed.format.name == "INT4":
        if scale is None or packed.shape[-1] != scale.shape[-1] * fmt.step:
            raise RefusalError(f"{packed.name}: INT4 on this device needs one scale per {fmt.step} weights along K.")
        return scale.to(torch.float32).contiguous().view(torch.int32).reshape(-1, steps, 1)
    return None


def _row_scale(packed: PackedTensor, rows: int) -> torch.Tensor | None:
    """What multiplies a whole output row [N]: per-row and per-tensor scales, and the 2^7 that `tiles.word_e2m1`
    leaves."""
    name = packed.format.name
    scale: torch.Tensor | None = None
    if name in ("NVFP4", "E2M1_G16"):
        scale = torch.full((rows,), 128.0)
    if (whole := packed.scales.get("global_scale")) is not None:
        scale = (torch.ones(rows) if scale is None else scale) * whole.float().cpu().reshape(-1)
    own = packed.scales.get("weight_scale")
    if name == "F8_E4M3" and own is not None and not has_block_scale(packed):
        scale = own.float().cpu().reshape(-1).expand(rows).clone()
    return scale


def _minima(codes: torch.Tensor) -> torch.Tensor:
    """Minima of codes [r, steps, 16, W], which `unpack` left in their upper nibbles: words of four steps."""
    rows, steps = codes.shape[:2]
    nibbles = torch.nn.functional.pad((codes[:, :, :, 0] >> 4).to(torch.int32), (0, 0, 0, -steps % 4))
    shifts = torch.arange(0, 16, 4, device=codes.device, dtype=torch.int32)[:, None]
    words = (nibbles.reshape(rows, -1, 4, 16) << shifts).sum(dim=2)  # [r, steps / 4, 16]
    return words.to(torch.int16).permute(1, 0, 2)


def _empty_plane(fmt: TileFormat, bits: int, steps: int, rows: int, device: torch.device) -> torch.Tensor:
    tiles = fmt.step // fmt.dot * bits // fmt.word_bits
    return torch.empty((steps, tiles, rows, fmt.dot), dtype=_WORDS[fmt.word_bits], device=device)


def _matrix(packed: PackedTensor, fmt: TileFormat, device: torch.device) -> list[torch.Tensor | None]:
    """low, high, words, row scale and block scale of one [N, K] matrix."""
    rows, width = packed.shape
    steps = cdiv(width, fmt.step)
    block_scale = None
    if packed.format.name == "F8_E4M3" and has_block_scale(packed):
        block_scale = packed.scales["weight_scale"].float().reshape(cdiv(rows, SCALE_BLOCK), steps).to(device)
    row_scale = _row_scale(packed, rows)
    scales = [None if row_scale is None else row_scale.to(device), block_scale]
    if packed.format.name in ("BF16", "F16", "F32"):
        return [packed.data.reshape(rows, width).contiguous().to(device), None, None, *scales]
    dots, low, high, words = fmt.step // fmt.dot, None, None, None
    side = _side_fields(packed, fmt, steps)
    if fmt.low_bits:
        low = _empty_plane(fmt, fmt.low_bits, steps, rows, device)
    if fmt.high_bits:
        high = _empty_plane(fmt, fmt.high_bits, steps, rows, device)
    if fmt.minima:
        high = torch.zeros((cdiv(steps, 4), 1, rows, 16), dtype=torch.int16, device=device)
    if fmt.unpack is not None or side is not None:
        words = torch.empty((steps, fmt.words, rows), dtype=torch.int32, device=device)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, width))
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        codes, fields = _unpack(packed, fmt, packed.data[start:stop].to(device))
        if side is not None:
            fields = side[start:stop].to(device)
        if packed.format.name == "E2M1_G16" and codes is not None and fields is not None:
            codes, fields = scaled_e2m1(codes, fields.reshape(stop - start, -1))
            fields = None if fields is None else fields.reshape(stop - start, steps, -1)
        if codes is not None and low is not None:
            codes = codes.reshape(stop - start, steps, dots, fmt.dot)
            low[:, :, start:stop] = _plane(codes, fmt.low_bits, 0, fmt.word_bits, fmt.spread)
            if fmt.minima and high is not None:
                high[:, 0, start:stop] = _minima(codes)
            elif high is not None:
                high[:, :, start:stop] = _plane(codes, fmt.high_bits, fmt.low_bits, fmt.word_bits)
        if fields is not None and words is not None:
            if fmt.field_bits < 32:
                fields = as_words(fields.reshape(-1, fields.shape[-1]), fmt.field_bits)
            words[:, :, start:stop] = fields.reshape(stop - start, steps, -1).permute(1, 2, 0)
    return [low, high, words, *scales]


def _matrix_of(packed: PackedTensor, group: int) -> PackedTensor:
    shared = {name: scale for name, scale in packed.scales.items() if scale.numel() == 1}
    own = {name: scale[group] for name, scale in packed.scales.items() if name not in shared}
    return PackedTensor(packed.format, packed.shape[1:], packed.data[group], packed.name, {**shared, **own})


def relayout(packed: PackedTensor, device: torch.device) -> TileWeight:
    """Sort a packed [N, K] or [G, N, K] weight for the kernel, on `device`."""
    fmt = TILE_FORMATS[packed.format.name]
    rows, width = packed.shape[-2:]
    groups = packed.shape[0] if len(packed.shape) == 3 else 1
    matrices = [packed] if len(packed.shape) == 2 else [_matrix_of(packed, g) for g in range(groups)]
    stacked: list[torch.Tensor | None] = []
    for g, matrix in enumerate(matrices):
        for place, tensor in enumerate(_matrix(matrix, fmt, device)):
            if g == 0:
                stacked.append(None if tensor is None else tensor.new_empty((groups, *tensor.shape)))
            target = stacked[place]
            if tensor is not None and target is not None:
                target[g] = tensor
    steps = cdiv(width, fmt.step)
    low, high, words, row_scale, block_scale = stacked
    table = table_of(fmt, device)
    return TileWeight(fmt, groups, rows, width, steps, low, high, words, table, row_scale, block_scale)
