"""Random packed weights of a wanted spread: any bytes that a format can hold, with scales that decode to it.

Bits come from a counter-based generator in plain integer arithmetic, so that a tensor is the same on every device
and does not depend on what was made before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, prod, sqrt

import torch

from slimserve.errors import RefusalError
from slimserve.quant.decode import block_decoder
from slimserve.quant.decode_scaled import SCALE_BLOCK
from slimserve.quant.formats import PLAIN_DTYPES, find_format
from slimserve.quant.tensor import BlockFormat, PackedTensor

BELL_SPREAD = sqrt(8 * (256**2 - 1) / 12)
"""Standard deviation of the sum of eight random bytes."""

_CHUNK_WORDS = 1 << 22
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_E2M1_SPREAD = sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
_INT4_SPREAD = sqrt((16**2 - 1) / 12)
_BLOCKS_TO_CALIBRATE = 8192


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (x >> count) & ((1 << (64 - count)) - 1)


class RandomBits:
    """A stream of random bits named by (seed, name): splitmix64 of a counter (Steele et al., 2014), on any device."""

    def __init__(self, seed: int, name: str, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self.device = device
        self._key = int.from_bytes(digest, "little", signed=True)
        self._next = 0

    def words(self, count: int) -> torch.Tensor:
        """The next `count` words: int64 [count], all 64 bits random."""
        x = torch.arange(self._next + 1, self._next + 1 + count, dtype=torch.int64, device=self.device)
        self._next += count
        x = x.mul_(_GOLDEN).add_(self._key)
        x = (x ^ _shifted(x, 30)).mul_(_MIX_1)
        x = (x ^ _shifted(x, 27)).mul_(_MIX_2)
        return x ^ _shifted(x, 31)

    def fill_bytes(self, out: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous uint8 tensor of any shape."""
        flat = out.view(-1)
        for start in range(0, flat.numel(), 8 * _CHUNK_WORDS):
            piece = flat[start : start + 8 * _CHUNK_WORDS]
            piece.copy_(self.words(ceil(piece.numel() / 8)).view(torch.uint8)[: piece.numel()])
        return out

    def bell(self, out: torch.Tensor, spread: float) -> torch.Tensor:
        """Fill a contiguous float tensor with values around zero of the given standard deviation (a sum of bytes)."""
        flat = out.view(-1)
        for start in range(0, flat.numel(), _CHUNK_WORDS):
            piece = flat[start : start + _CHUNK_WORDS]
            sums = self.words(piece.numel()).view(torch.uint8).view(-1, 8).sum(dim=1, dtype=torch.int32)
            piece.copy_((sums - 8 * 255 // 2).to(torch.float32).mul_(spread / BELL_SPREAD))
        return out

    def uniform(self, count: int) -> torch.Tensor:
        """float32 [count] in [0, 1), in steps of 2^-24."""
        return _shifted(self.words(count), 40).to(torch.float32) * 2.0**-24


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How random blocks become ordinary ones.

    halves: (byte offset, factor) of the fp16 fields that hold the block's scale, and multiples of it that take the
    mean away. signed: whether scales take either sign, for formats whose codes are not centred. prepare: edits blocks
    in place first (equal scales and minima). exponent: byte offset of a power-of-two scale instead.
    """

    halves: tuple[tuple[int, float], ...] = ()
    signed: bool = False
    prepare: Callable[[torch.Tensor], None] | None = None
    exponent: int | None = None


def _equal_nibbles(blocks: torch.Tensor) -> None:
    """Q2_K: the minimum's four bits as the scale's."""
    blocks[:, 0:16] = (blocks[:, 0:16] & 15) * 17


def _equal_six_bits(blocks: torch.Tensor) -> None:
    """Q4_K, Q5_K: the eight six-bit minima as the scales."""
    blocks[:, 8:12] = blocks[:, 4:8]
    blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17


_ONE_HALF = _Recipe(((0, 1.0),))
_SIGNED_HALF = _Recipe(((0, 1.0),), signed=True)
_RECIPES: dict[str, _Recipe] = {
    "Q4_0": _SIGNED_HALF,
    "Q4_1": _Recipe(((0, 1.0), (2, -7.5))),
    "Q5_0": _SIGNED_HALF,
    "Q5_1": _Recipe(((0, 1.0), (2, -15.5))),
    "Q8_0": _ONE_HALF,
    "Q2_K": _Recipe(((80, 1.0), (82, 1.5)), prepare=_equal_nibbles),
    "Q3_K": _Recipe(((108, 1.0),)),
    "Q4_K": _Recipe(((0, 1.0), (2, 7.5)), prepare=_equal_six_bits),
    "Q5_K": _Recipe(((0, 1.0), (2, 15.5)), prepare=_equal_six_bits),
    "Q6_K": _Recipe(((208, 1.0),)),
    "IQ4_NL": _SIGNED_HALF,
    "IQ4_XS": _SIGNED_HALF,
    "IQ2_XXS": _ONE_HALF,
    "IQ2_XS": _ONE_HALF,
    "IQ2_S": _ONE_HALF,
    "IQ3_XXS": _ONE_HALF,
    "IQ3_S": _ONE_HALF,
    "IQ1_S": _ONE_HALF,
    "TQ2_0": _Recipe(((64, 1.0),), signed=True),
    "MXFP4": _Recipe(exponent=0),
}

SUPPORTED = frozenset((*_RECIPES, "F32", "F16", "BF16", "F8_E4M3", "E2M1_G16", "INT4"))
"""Formats in which weights can be made."""


def _shape_blocks(blocks: torch.Tensor, recipe: _Recipe, scale: float) -> None:
    """Give random blocks [n, bytes] scales around `scale`, between 0.75 and 1.25 of it."""
    if recipe.prepare is not None:
        recipe.prepare(blocks)
    if recipe.exponent is not None:
        blocks[:, recipe.exponent] = (127 + round(log2(scale))) + (blocks[:, recipe.exponent] & 1)
        return
    offset = recipe.halves[0][0]
    sizes = (blocks[:, offset].to(torch.float32) / 512 + 0.75) * scale
    if recipe.signed:
        sizes = torch.where(blocks[:, offset + 1] >= 128, -sizes, sizes)
    for offset, factor in recipe.halves:
        field = (sizes * factor).to(torch.float16).view(torch.uint8).view(-1, 2)
        blocks[:, offset : offset + 2] = field


@lru_cache
def _unit_spread(name: str) -> float:
    """Standard deviation of decoded blocks whose scale is 1."""
    fmt, recipe, decoder = find_format(name), _RECIPES[name], block_decoder(name)
    assert fmt is not None and decoder is not None
    blocks = torch.empty(_BLOCKS_TO_CALIBRATE, fmt.block_bytes, dtype=torch.uint8)
    RandomBits(0, "calibration", blocks.device).fill_bytes(blocks)
    _shape_blocks(blocks, recipe, 1.0)
    return float(decoder(blocks).to(torch.float64).square().mean().sqrt())


def random_packed(
    fmt: BlockFormat, shape: tuple[int, ...], spread: float, bits: RandomBits, *, scales: str = "", name: str = ""
) -> PackedTensor:
    """A random weight whose decoded values lie around zero with standard deviation `spread`.

    To a few percent; formats whose scales are powers of two only to a factor of 1.5.
    `scales`: how formats with side scales keep them ("tensor", "channel", "block128", "group16", "group128").
    Raises RefusalError for a format that has no recipe.
    """
    device = bits.device
    if fmt.name == "F8_E4M3":
        return _random_fp8(fmt, shape, spread, bits, scales, name)
    if fmt.name in ("E2M1_G16", "INT4"):
        return _random_grouped(fmt, shape, spread, bits, name)
    if fmt.name in ("F32", "F16", "BF16"):
        data = torch.empty(shape, dtype=PLAIN_DTYPES[fmt.name], device=device)
        return PackedTensor(fmt, shape, bits.bell(data, spread), name)
    recipe = _RECIPES.get(fmt.name)
    if recipe is None:
        raise RefusalError(f"{name}: synthetic weights cannot be made as {fmt.name}")
    data = torch.empty((*shape[:-1], fmt.row_bytes(shape[-1])), dtype=torch.uint8, device=device)
    bits.fill_bytes(data)
    _shape_blocks(data.view(-1, fmt.block_bytes), recipe, spread / _unit_spread(fmt.name))
    return PackedTensor(fmt, shape, data, name)


def _around(bits: RandomBits, shape: tuple[int, ...], middle: float) -> torch.Tensor:
    """Positive float32 values between 0.75 and 1.25 of `middle` that bfloat16 holds exactly."""
    values = (bits.uniform(prod(shape)) * 0.5 + 0.75) * middle
    return values.to(torch.bfloat16).to(torch.float32).view(shape)


def _random_fp8(
    fmt: BlockFormat, shape: tuple[int, ...], spread: float, bits: RandomBits, scales: str, name: str
) -> PackedTensor:
    """Bell-shaped payloads that use the whole range up to 448."""
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=bits.device)
    own = 448.0 / (4 * 255) * BELL_SPREAD
    bits.bell(data, own)
    rows, columns = shape[-2:]
    extents = {
        "tensor": (1,),
        "channel": (*shape[:-1], 1),
        "block128": (*shape[:-2], -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)),
    }
    if scales not in extents:
        raise RefusalError(f"{name}: F8_E4M3 with {scales or 'no'} scales cannot be made")
    return PackedTensor(fmt, shape, data, name, {"weight_scale": _around(bits, extents[scales], spread / own)})


def _random_grouped(
    fmt: BlockFormat, shape: tuple[int, ...], spread: float, bits: RandomBits, name: str
) -> PackedTensor:
    """Four-bit codes: NVFP4 with e4m3 scales 0.5 .. 3.75 and a power of two for all, INT4 with a scale per 128."""
    data = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=bits.device)
    bits.fill_bytes(data)
    if fmt.name == "INT4":
        scale = _around(bits, (*shape[:-1], shape[-1] // 128), spread / _INT4_SPREAD).to(torch.bfloat16)
        return PackedTensor(fmt, shape, data, name, {"weight_scale": scale})
    codes = torch.empty((*shape[:-1], shape[-1] // 16), dtype=torch.uint8, device=bits.device)
    codes = bits.fill_bytes(codes) % 24 + 0x30
    every = (torch.arange(24, dtype=torch.uint8) + 0x30).view(torch.float8_e4m3fn).to(torch.float32)
    whole = 2.0 ** round(log2(spread / (_E2M1_SPREAD * float(every.square().mean().sqrt()))))
    scales = {
        "weight_scale": codes.view(torch.float8_e4m3fn),
        "global_scale": torch.tensor([whole], device=bits.device),
    }
    return PackedTensor(fmt, shape, data, name, scales)
