"""Load-time relayout of packed weights: the same bits, sorted into planes and words (see `formats`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slimserve.errors import RefusalError
from slimserve.ops.triton import integers, tiles
from slimserve.ops.triton.formats import TILE_FORMATS, TileFormat, as_words, scaled_e2m1, table_of
from slimserve.ops.triton.launch import cdiv
from slimserve.quant.decode_scaled import SCALE_BLOCK, has_block_scale, pair_codes
from slimserve.quant.tensor import PackedTensor

_CHUNK_ELEMENTS = 1 << 23
"""Elements unpacked at a time, so that load needs little memory beside the weight. Intermediate tensors of up to 32 MiB
are smaller than most large weights: these do not settle in blocks that those left, whose remainders would be lost."""


TILE_ROWS = 16
"""Weight rows of a tensor core's left operand."""


@dataclass(slots=True)
class TileWeight:
    """A [G, N, K] weight as the kernel reads it (G = 1 for a plain matrix).

    planes: 16-bit words in fragment order [G, steps, ceil(N / 16), fragments, 256] or None; a plain dtype has one plane
    [G, N, K]. words int32 [G, steps, words * N] (`_word_blocks`). row_scale [G, N] and block_scale
    [G, ceil(N / 128), steps] are float32 or None.
    """

    format: TileFormat
    groups: int
    rows: int
    width: int
    steps: int
    low: torch.Tensor | None
    high: torch.Tensor | None
    minima: torch.Tensor | None
    words: torch.Tensor | None
    table: torch.Tensor | None
    row_scale: torch.Tensor | None = None
    block_scale: torch.Tensor | None = None

    @property
    def tiles(self) -> int:
        """Sixteens of weight rows."""
        return cdiv(self.rows, TILE_ROWS)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = (self.low, self.high, self.minima, self.words, self.table, self.row_scale, self.block_scale)
        return sum(t.numel() * t.element_size() for t in held if t is not None)


def refuses(packed_format: str, shape: tuple[int, ...] | None) -> str | None:
    """Why the kernel does not serve a format, or None."""
    fmt = TILE_FORMATS.get(packed_format)
    if fmt is None:
        return f"no tile decoder for {packed_format}"
    if shape is not None and shape[-2] * cdiv(shape[-1], fmt.step) * 16 >= 1 << 31:
        return f"{shape} exceeds 32-bit row and step counts"
    return None


def _operands(codes: torch.Tensor, dot: int) -> torch.Tensor:
    """Elements [r, steps, step] as operands of sixteen [r, steps, step / 16, 2, 4, 2] (kh, q, kl; see `tiles`)."""
    rows, steps, step = codes.shape
    held = codes.reshape(rows, steps, step // dot, 4, dot // 16, 2, 2).permute(0, 1, 2, 4, 5, 3, 6)
    return held.reshape(rows, steps, step // 16, 2, 4, 2)


def _fragments(words: torch.Tensor) -> torch.Tensor:
    """Words [r, steps, fragments, 2, 4, 2] of r = 16 t rows in the order of threads: [steps, t, fragments, 256]."""
    rows, steps, count = words.shape[:3]
    held = words.reshape(rows // TILE_ROWS, 2, 8, steps, count, 2, 4, 2).permute(3, 0, 4, 2, 6, 5, 1, 7)
    return held.reshape(steps, rows // TILE_ROWS, count, 256).to(torch.int16)


def _plane(operands: torch.Tensor, bits: int, shift: int, spread: tuple[int, ...] = ()) -> torch.Tensor:
    """Bits [shift, shift + bits) of operands [r, steps, n, 2, 4, 2], 16 / bits of them to a fragment."""
    rows, steps, count = operands.shape[:3]
    per_word = 16 // bits
    fields = (operands.to(torch.int32) >> shift) & ((1 << bits) - 1)
    fields = fields.view(rows, steps, count // per_word, per_word, 2, 4, 2)
    packed = fields[:, :, :, 0].clone()
    for field in range(1, per_word):
        packed |= fields[:, :, :, field] << (bits * field)
    if spread:
        moved = torch.zeros_like(packed)
        for source, target in enumerate(spread):
            moved |= ((packed >> source) & 1) << target
        packed = moved
    return _fragments(packed)


def _in_order(codes: torch.Tensor, order: int) -> torch.Tensor:
    """Elements [r, steps, 256] at their places [r, steps, chunk, t, half, byte] (`integers.element_at`)."""
    rows, steps, _ = codes.shape
    if order == integers.CHUNKS.value:
        return codes.reshape(rows, steps, 8, 4, 2, 4)
    if order == integers.HALVES.value:
        return codes.reshape(rows, steps, 8, 2, 4, 4).transpose(3, 4)
    return codes.reshape(rows, steps, 2, 4, 4, 2, 4).transpose(3, 4).reshape(rows, steps, 8, 4, 2, 4)


def _byte_fragments(held: torch.Tensor) -> torch.Tensor:
    """Bytes [r, steps, n, t, half, byte] of r = 16 t rows in the order of threads: int8 [steps, t, n, 512]."""
    rows, steps, count = held.shape[:3]
    held = held.reshape(rows // TILE_ROWS, 2, 8, steps, count, 4, 2, 4).permute(3, 0, 4, 2, 5, 6, 1, 7)
    return held.reshape(steps, rows // TILE_ROWS, count, 512).to(torch.uint8).view(torch.int8)


def _byte_plane(held: torch.Tensor, bits: int, shift: int) -> torch.Tensor:
    """Bits [shift, shift + bits) of codes [r, steps, 8, 4, 2, 4], 8 / bits chunks to a byte."""
    fields = ((held >> shift) & ((1 << bits) - 1)).unflatten(2, (bits, 8 // bits))
    packed = fields[:, :, :, 0].clone()
    for field in range(1, 8 // bits):
        packed |= fields[:, :, :, field] << (bits * field)
    return _byte_fragments(packed)


def _grid_pairs(fields: torch.Tensor, steps: int) -> torch.Tensor:
    """Grid rows and sign bytes [r, steps * 64] of r = 16 t rows (`formats._pair_words`) as bytes [steps, t, 2, 512]
    that `integers.grid_bytes` reads."""
    held = fields.reshape(-1, 2, 8, steps, 4, 2, 4, 2).to(torch.int64)  # [t, rh, g, steps, pair, chunk, q, kind]
    index = torch.zeros_like(held[:, 0, :, :, :, 0, :, 0])
    signs = torch.zeros_like(index)
    for chunk in range(2):
        for high in range(2):
            k = 2 * chunk + high
            index |= held[:, high, :, :, :, chunk, :, 0] << (8 * k)
            for weight in range(8):
                signs |= ((held[:, high, :, :, :, chunk, :, 1] >> weight) & 1) << (4 * weight + k)
    words = torch.stack((index, signs), dim=-1)  # [t, g, steps, pair, q, kind]
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    words = words.reshape(*words.shape[:3], 2, 2, 4, 2).permute(2, 0, 3, 1, 5, 4, 6)  # [steps, t, fragment, g, q, ..]
    return words.reshape(steps, -1, 2, 128).contiguous().view(torch.int8)


def _unpack(
    packed: PackedTensor, fmt: TileFormat, data: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Codes [r, steps * step] (IQ2_XXS: see `_grid_pairs`), word fields [r, steps, n] and minima [r, steps, groups] of
    rows data [r, row bytes], padded with zero blocks."""
    rows = data.shape[0]
    padded = cdiv(packed.shape[-1], fmt.step) * fmt.step
    if fmt.unpack is None:
        codes = pair_codes(data) if fmt.low_bits == 4 else data.view(torch.uint8)
        return torch.nn.functional.pad(codes, (0, padded - codes.shape[1])), None, None
    block, size = packed.format.block_size, packed.format.block_bytes
    data = torch.nn.functional.pad(data, (0, padded // block * size - data.shape[1]))
    unpacked, fields, *rest = fmt.unpack(data.reshape(-1, size))
    minima = rest[0].reshape(rows, padded // fmt.step, -1) if rest else None
    steps = padded // fmt.step
    if fields is not None:
        fields = fields.reshape(rows, steps, -1)
    return (None if unpacked is None else unpacked.reshape(rows, -1)), fields, minima


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


def _minima(minima: torch.Tensor) -> torch.Tensor:
    """Minima [r, steps, 8 or 16] of r = 16 t rows as fragments of four steps each [steps / 4, t, 1, 512]: a byte each,
    or two of four bits, those of the later two steps above those of the first two."""
    rows, steps, groups = minima.shape
    four = torch.nn.functional.pad(minima.to(torch.uint8), (0, 0, 0, -steps % 4)).reshape(rows, -1, 4 * groups)
    if groups == 16:
        four = four[..., :32] | (four[..., 32:] << 4)
    return _byte_fragments(four.reshape(rows, -1, 1, 2, 4, 4).transpose(3, 4))


def _empty_plane(fmt: TileFormat, steps: int, rows: int, bits: int, device: torch.device) -> torch.Tensor:
    """A plane of so many bits of each element: fragments of 512 bytes."""
    held = (512, torch.int8) if fmt.integer else (256, torch.int16)
    return torch.empty((steps, cdiv(rows, TILE_ROWS), fmt.step * bits // 256, held[0]), dtype=held[1], device=device)


def _word_blocks(fmt: TileFormat) -> list[tuple[int, int]]:
    """First word and width of the blocks [rows, width] in which the words of a step lie (`tiles.word_block`)."""
    if fmt.code == tiles.GRID.value:
        return [(word, 1) for word in range(fmt.words)]
    whole, rest = fmt.words // 4 * 4, fmt.words % 4
    blocks = [(word, 4) for word in range(0, whole, 4)]
    return blocks + ([(whole, 2)] if rest >= 2 else []) + ([(fmt.words - 1, 1)] if rest % 2 else [])


def _whole(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """data on `device` in memory of its own: as it is where nothing else lies in its memory, else a copy."""
    moved = data.contiguous().to(device)
    own = moved.numel() * moved.element_size() == moved.untyped_storage().nbytes()
    # On the CPU the memory may be a file's, which is not to be kept open.
    return moved if own and (moved is not data or device.type != "cpu") else moved.clone()


def _matrix(packed: PackedTensor, fmt: TileFormat, device: torch.device) -> list[torch.Tensor | None]:
    """low, high, minima, words, row scale and block scale of one [N, K] matrix."""
    rows, width = packed.shape
    steps = cdiv(width, fmt.step)
    block_scale = None
    if packed.format.name == "F8_E4M3" and has_block_scale(packed):
        block_scale = packed.scales["weight_scale"].float().reshape(cdiv(rows, SCALE_BLOCK), steps).to(device)
    row_scale = _row_scale(packed, rows)
    scales = [None if row_scale is None else row_scale.to(device), block_scale]
    if packed.format.name in ("BF16", "F16", "F32"):
        return [_whole(packed.data.reshape(rows, width), device), None, None, None, *scales]
    low, high, minima, words = None, None, None, None
    side = _side_fields(packed, fmt, steps)
    if fmt.low_bits:
        low = _empty_plane(fmt, steps, rows, fmt.low_bits, device)
    if fmt.high_bits:
        high = _empty_plane(fmt, steps, rows, fmt.high_bits, device)
    if fmt.minima:
        minima = _empty_plane(fmt, cdiv(steps, 4), rows, 1, device)
    if fmt.unpack is not None or side is not None:
        words = torch.empty((steps, fmt.words * rows), dtype=torch.int32, device=device)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, width) // TILE_ROWS) * TILE_ROWS
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        codes, fields, least = _unpack(packed, fmt, packed.data[start:stop].to(device))
        if side is not None:
            fields = side[start:stop].to(device)
        if packed.format.name == "E2M1_G16" and codes is not None and fields is not None:
            codes, fields = scaled_e2m1(codes, fields.reshape(stop - start, -1))
            fields = None if fields is None else fields.reshape(stop - start, steps, -1)
        if codes is not None and low is not None:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, (start - stop) % TILE_ROWS))
            here = slice(start // TILE_ROWS, cdiv(stop, TILE_ROWS))
            if fmt.integer and fmt.grid:
                low[:, here] = _grid_pairs(codes, steps)
            elif fmt.integer:
                held = _in_order(codes.reshape(codes.shape[0], steps, fmt.step), fmt.order)
                low[:, here] = _byte_plane(held, fmt.low_bits, fmt.low_shift)
                if high is not None:
                    high[:, here] = _byte_plane(held, fmt.high_bits, fmt.high_shift)
            else:
                codes = codes.reshape(codes.shape[0], steps, fmt.step)
                operands = _operands(codes, fmt.dot)
                low[:, here] = _plane(operands, fmt.low_bits, 0, fmt.spread)
                if high is not None:
                    high[:, here] = _plane(operands, fmt.high_bits, fmt.low_bits)
            if minima is not None and least is not None:
                least = torch.nn.functional.pad(least, (0, 0, 0, 0, 0, (start - stop) % TILE_ROWS))
                minima[:, here] = _minima(least)
        if fields is not None and words is not None:
            if fmt.field_bits < 32:
                fields = as_words(fields.reshape(-1, fields.shape[-1]), fmt.field_bits)
            fields = fields.reshape(stop - start, steps, -1).transpose(0, 1)  # [steps, r, words]
            for first, count in _word_blocks(fmt):
                block = words[:, first * rows : (first + count) * rows].view(steps, rows, count)
                block[:, start:stop] = fields[:, :, first : first + count]
    return [low, high, minima, words, *scales]


def _matrix_of(packed: PackedTensor, group: int) -> PackedTensor:
    shared = {name: scale for name, scale in packed.scales.items() if scale.numel() == 1}
    own = {name: scale[group] for name, scale in packed.scales.items() if name not in shared}
    return PackedTensor(packed.format, packed.shape[1:], packed.data[group], packed.name, {**shared, **own})


def relayout(packed: PackedTensor, device: torch.device) -> TileWeight:
    """Sort a packed [N, K] or [G, N, K] weight for the kernel, on `device`."""
    fmt = TILE_FORMATS[packed.format.name]
    rows, width = packed.shape[-2:]
    groups = packed.shape[0] if len(packed.shape) == 3 else 1
    stacked: list[torch.Tensor | None] = []
    if groups == 1:
        # No copy: a second table of a large vocabulary would leave a hole as large as itself among the weights.
        matrix = packed if len(packed.shape) == 2 else _matrix_of(packed, 0)
        stacked = [None if tensor is None else tensor[None] for tensor in _matrix(matrix, fmt, device)]
    else:
        for g in range(groups):
            for place, tensor in enumerate(_matrix(_matrix_of(packed, g), fmt, device)):
                if g == 0:
                    stacked.append(None if tensor is None else tensor.new_empty((groups, *tensor.shape)))
                target = stacked[place]
                if tensor is not None and target is not None:
                    target[g] = tensor
    steps = cdiv(width, fmt.step)
    low, high, minima, words, row_scale, block_scale = stacked
    table = table_of(fmt, device)
    if device.type == "cuda":
        # The next weight must not settle in what the intermediates of this one leave: their remainders would be lost.
        torch.cuda.empty_cache()
    return TileWeight(fmt, groups, rows, width, steps, low, high, minima, words, table, row_scale, block_scale)
