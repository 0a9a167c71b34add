"""The decoders' inline assembly, executed instruction by instruction, against what the codes mean.

No device is needed: a few PTX instructions are written out here. Every decoder is fed random words and all codes.
"""

from __future__ import annotations

import random
import re
import struct
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_device import triton_marks

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    from slimserve.ops.triton import formats, tiles, tiles_grid
    from slimserve.quant.grids import IQ4_LEVELS, grid

MASK = 0xFFFFFFFF
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def as_float(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", (bits & 0xFFFF) << 16))[0])


def as_bits(value: float) -> int:
    """bfloat16 bits of a number that bfloat16 holds exactly."""
    word = struct.unpack("I", struct.pack("f", value))[0]
    assert word & 0xFFFF == 0, f"{value} is not a bfloat16 number"
    return int(word >> 16)


def halves(function: Callable[..., float], *words: int) -> int:
    return sum(as_bits(function(*(as_float(word >> shift) for word in words))) << shift for shift in (0, 16))


def permute(a: int, b: int, selector: int) -> int:
    source, result = (b << 32) | a, 0
    for i in range(4):
        index = (selector >> (4 * i)) & 15
        byte = (source >> (8 * (index & 7))) & 255
        result |= ((255 if byte > 127 else 0) if index > 7 else byte) << (8 * i)
    return result


def logic(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for entry in range(8):
        if (table >> entry) & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result & MASK


def fp8(byte: int) -> float:
    return float(torch.tensor([byte & 255], dtype=torch.uint8).view(torch.float8_e4m3fn).float())


OPERATIONS: dict[str, Callable[..., Any]] = {
    "shr.b32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: (a << n) & MASK,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: (a + b) & MASK,
    "sub.u32": lambda a, b: (a - b) & MASK,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "mov.b32": lambda a: a,
    "prmt.b32": permute,
    "lop3.b32": logic,
    "fma.rn.bf16x2": lambda a, b, c: halves(lambda x, y, z: x * y + z, a, b, c),
    "cvt.rn.f16x2.e4m3x2": lambda a: (fp8(a), fp8(a >> 8)),
    "cvt.f32.f16": lambda a: a,
    "cvt.rn.bf16x2.f32": lambda high, low: as_bits(high) << 16 | as_bits(low),
}


def execute(program: str, inputs: list[int], outputs: int, table: torch.Tensor | None = None) -> list[int]:
    """Output registers of an assembly block; table is the memory that a load of two words finds from address 0."""
    registers: dict[str, Any] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in program.strip().strip("{}").split(";"):
        parts = line.strip().split(None, 1)
        if not parts or parts[0] == ".reg":
            continue
        operation, rest = parts
        names = [name.strip(" {}[]") for name in rest.split(",")]
        if operation.startswith("ld.global"):
            assert table is not None
            row = registers[names[2]] // 8
            registers[names[0]], registers[names[1]] = (int(word) & MASK for word in table[row])
        elif operation == "mov.b32" and rest.lstrip().startswith("{"):
            value = registers[names[2]]
            pair = value if isinstance(value, tuple) else (value & 0xFFFF, value >> 16)
            registers[names[0]], registers[names[1]] = pair
        else:
            values = [registers[name] if name in registers else int(name) for name in names[1:]]
            registers[names[0]] = OPERATIONS[operation](*values)
    return [registers[f"${i}"] for i in range(outputs)]


class Recorder:
    """Stands for `tl` in a decoder: keeps the assembly that the decoder would emit."""

    bfloat16 = int32 = float32 = "type"

    def __init__(self) -> None:
        self.program, self.outputs = "", 0

    def inline_asm_elementwise(self, program: str, constraints: str, arguments: Any, **options: Any) -> None:
        self.program, self.outputs = program, len(re.findall("=", constraints))

    def broadcast_to(self, value: Any, shape: Any) -> Any:
        return value


class Anything:
    shape = ()

    def __add__(self, other: object) -> Anything:
        return self

    __radd__ = __mul__ = __rmul__ = to = __add__


def assembly(decoder: Any, *arguments: Any, table: torch.Tensor | None = None) -> Callable[..., list[int]]:
    """The assembly that a decoder emits for its constant arguments (words are None), as a function of registers."""
    recorder = Recorder()
    source = decoder.fn
    namespace = {**source.__globals__, "tl": recorder}
    types.FunctionType(source.__code__, namespace)(*(Anything() if a is None else a for a in arguments))
    assert recorder.program
    return lambda *registers: execute(recorder.program, list(registers), recorder.outputs, table)


def words(count: int = 64) -> list[int]:
    random.seed(3)
    return [0, MASK, *(random.getrandbits(32) for _ in range(count))]


def both(function: Callable[[int], float], word: int) -> list[float]:
    """A function of the two 16-bit words of a register."""
    return [function(word & 0xFFFF), function(word >> 16)]


def numbers(register: int) -> list[float]:
    return [as_float(register), as_float(register >> 16)]


@pytest.mark.parametrize(("shift", "mask", "bias"), [(0, 15, 8), (12, 15, 0), (4, 15, -128), (6, 3, 1), (14, 3, 0)])
def test_fields(shift: int, mask: int, bias: int) -> None:
    run = assembly(tiles.word_field, None, shift, mask, bias, True)
    late = assembly(tiles.word_bits, None, None, 127, True)
    for word in words():
        assert numbers(run(word)[0]) == both(lambda w: ((w >> shift) & mask) - bias, word)
        safe = word & 0x3F3F3F3F
        assert numbers(late(safe, 8, 8)[0]) == both(lambda w: (w >> 8) & 63, safe)


@pytest.mark.parametrize(
    ("shift", "mask", "high", "high_mask", "lift"),
    [(0, 15, 0, 3, 4), (12, 15, 14, 3, 4), (6, 3, 15, 1, 2), (8, 15, 1, 1, 4)],
)
def test_fields_of_two_planes(shift: int, mask: int, high: int, high_mask: int, lift: int) -> None:
    run = assembly(tiles.word_fields, None, None, shift, mask, high, high_mask, lift, 4, True)
    for word, other in zip(words(), reversed(words()), strict=True):
        expected = [
            ((w >> shift) & mask | ((h >> high) & high_mask) << lift) - 4
            for w, h in ((word & 0xFFFF, other & 0xFFFF), (word >> 16, other >> 16))
        ]
        assert numbers(run(word, other)[0]) == expected


@pytest.mark.parametrize("high", [0, 1])
def test_bytes(high: int) -> None:
    signed, float8 = assembly(tiles.signed_byte, None, high, True), assembly(tiles.float8, None, high, True)
    for byte in range(256):
        word = (byte << (8 * high)) * 65537 ^ (0x5A << (8 * (1 - high)))
        assert numbers(signed(word)[0]) == [byte - 256 if byte > 127 else byte] * 2
        if byte & 127 != 127:
            assert numbers(float8(word)[0]) == [fp8(byte)] * 2


@pytest.mark.parametrize("low", [0, 1])
def test_tables_of_sixteen(low: int) -> None:
    levels, e2m1 = assembly(tiles.levels, None, low, True), assembly(tiles.e2m1, None, low, True)
    for word in words():
        for place, (level, doubled) in enumerate(zip(levels(word), e2m1(word), strict=True)):
            nibbles = [(w >> (4 * low + 8 * place)) & 15 for w in (word & 0xFFFF, word >> 16)]
            assert numbers(level) == [float(IQ4_LEVELS[n]) for n in nibbles]
            assert numbers(doubled) == [(-2 if n > 7 else 2) * E2M1[n & 7] for n in nibbles]


def test_scaled_e2m1() -> None:
    for q in range(4):
        factor = assembly(tiles.group_factor, None, None, True)
        for word in words(8):
            byte = (word >> (8 * q)) & 127
            scale = factor(word & 0x7F7F7F7F, 16448 + 257 * q)[0]
            assert numbers(scale) == [(1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 10 + 119)] * 2
            for field in range(4):
                run = assembly(tiles.word_e2m1, None, None, field, True)
                codes = [random.getrandbits(16) for _ in range(2)]
                packed = [sum(((c >> i) & 1) << target for i, target in enumerate(formats.E2M1_BITS)) for c in codes]
                got = numbers(run(packed[0] | packed[1] << 16, scale, scale)[0])
                for code, value in zip(codes, got, strict=True):
                    nibble = (code >> (4 * field)) & 15
                    level = (-1 if nibble > 7 else 1) * E2M1[nibble & 7]
                    assert value * 128 == level * (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 10)


def test_scaled_two_bits() -> None:
    for index in range(8):
        raised = assembly(tiles.nibble_raised, None, None, True)
        for word in words(8):
            nibble = (word >> (4 * index)) & 15
            start = raised(word, 4 * index)[0]
            assert numbers(start) == [128 + nibble] * 2
            factor = assembly(tiles.nibble_factor, None, index, True)(start)[0]
            got = assembly(tiles.scaled_two_bits, None, None, index, True)(word, factor, factor)[0]
            assert [v * 16384 for v in numbers(got)] == both(
                lambda w, n=nibble, i=index: n * ((w >> (2 * i)) & 3), word
            )


@pytest.mark.parametrize("dot", range(4))
def test_grid_pairs(dot: int) -> None:
    table = formats.table_of(formats.TILE_FORMATS["IQ2_XXS"], torch.device("cpu"))
    rows = grid("IQ2_XXS")
    assert table is not None
    program = tiles_grid._pairs_program.fn if hasattr(tiles_grid._pairs_program, "fn") else tiles_grid._pairs_program
    text = str(program(dot)) if not hasattr(program(dot), "value") else program(dot).value
    for _ in range(40):
        index = [[random.randrange(256) for _ in range(2)] for _ in range(4)]
        signs = [[random.getrandbits(8) for _ in range(2)] for _ in range(4)]
        registers = []
        for pair in range(2):
            registers.append(sum(index[2 * pair + b // 2][b % 2] << (8 * b) for b in range(4)))
            registers.append(
                sum(
                    ((signs[2 * pair + d][row] >> w) & 1) << (8 * (w % 4) + 4 * d + 2 * row + w // 4)
                    for d in range(2)
                    for row in range(2)
                    for w in range(8)
                )
            )
        got = execute(text, registers + [0] * 8, 8, table)
        for row in range(2):
            values = [v for half in range(2) for pair in range(2) for v in numbers(got[4 * half + 2 * pair + row])]
            expected = [float(rows[index[dot][row]][w]) * (-1 if (signs[dot][row] >> w) & 1 else 1) for w in range(8)]
            assert values == expected
