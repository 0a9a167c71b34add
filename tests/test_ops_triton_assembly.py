"""The decoders' inline assembly, executed instruction by instruction, against what the codes mean.

No device is needed: a few PTX instructions are written out here. Every decoder is fed random words and all codes. Its
constraints are held against the registers that its operands and results take.
"""

from __future__ import annotations

import random
import struct
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_device import triton_marks

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    from slimserve.ops.triton import formats, integer_kernel, integers, tiles
    from slimserve.ops.triton.relayout import relayout
    from slimserve.quant.formats import find_format
    from slimserve.quant.grids import IQ4_LEVELS, grid, parity_signs
    from slimserve.quant.tensor import PackedTensor

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
    "mul.lo.u32": lambda a, b: (a * b) & MASK,
    "mad.lo.u32": lambda a, b, c: (a * b + c) & MASK,
    "mad.lo.s32": lambda a, b, c: (a * b + c) & MASK,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "cvt.u64.u32": lambda a: a,
    "add.u64": lambda a, b: a + b,
    "prmt.b32": permute,
    "lop3.b32": logic,
    "fma.rn.bf16x2": lambda a, b, c: halves(lambda x, y, z: x * y + z, a, b, c),
    "cvt.rn.f16x2.e4m3x2": lambda a: (fp8(a), fp8(a >> 8)),
    "cvt.f32.f16": lambda a: a,
    "cvt.rn.bf16x2.f32": lambda high, low: as_bits(high) << 16 | as_bits(low),
}


TABLE_AT = 0x7F3A_0000_1200
"""Address of the table that loads read, beyond 32 bits."""
SHARED_AT = 0x0440
"""Address of what a block of assembly keeps in shared memory."""

NO_EFFECT = (".reg", ".shared", "bar.warp.sync")


def execute(
    program: str,
    inputs: list[int],
    outputs: int,
    table: torch.Tensor | None = None,
    shared: dict[int, int] | None = None,
    lane: int = 0,
) -> list[int]:
    """Output registers of an assembly block; table: the 32-bit words that stand in memory at TABLE_AT, shared: those of
    shared memory by address, which stores change."""
    registers: dict[str, Any] = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    registers |= {"table": SHARED_AT, "%tid.x": lane}
    for line in program.strip().strip("{}").split(";"):
        parts = line.strip().split(None, 1)
        if not parts or parts[0] in NO_EFFECT:
            continue
        operation, rest = parts
        names = [name.strip(" {}[]") for name in rest.split(",")]

        def address(name: str) -> int:
            base, _, offset = name.partition("+")
            return int(registers[base]) + int(offset or 0)

        if operation.startswith("ld.global.nc."):
            assert table is not None
            place, odd = divmod(address(names[-1]) - TABLE_AT, 4)
            for i, name in enumerate(names[:-1]):
                assert odd == 0 and 0 <= place + i < table.shape[0]
                registers[name] = int(table[place + i]) & MASK
        elif operation == "ld.shared.b32":
            assert shared is not None
            registers[names[0]] = shared[address(names[1])]
        elif operation == "st.shared.v4.b32":
            assert shared is not None
            for i, name in enumerate(names[1:]):
                shared[address(names[0]) + 4 * i] = registers[name]
        elif operation == "mov.b32" and rest.lstrip().startswith("{"):
            value = registers[names[2]]
            pair = value if isinstance(value, tuple) else (value & 0xFFFF, value >> 16)
            registers[names[0]], registers[names[1]] = pair
        else:
            values = [registers[name] if name in registers else int(name) for name in names[1:]]
            registers[names[0]] = OPERATIONS[operation](*values)
    return [registers[f"${i}"] for i in range(outputs)]


class Values:
    """Stands for a tensor in a decoder: numbers of so many bits."""

    shape = ()

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def to(self, bits: int) -> Values:
        return Values(bits)

    def __add__(self, other: object) -> Values:
        return self

    __radd__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __rshift__ = __and__ = __add__


BYTE, HALF, WORD = Values(8), Values(16), Values(32)


class EmittedError(Exception):
    """Ends a decoder once its assembly is known: what follows, if anything, is no assembly."""


class Recorder:
    """Stands for `tl` in a decoder: keeps the assembly that the decoder would emit. Types are their bits."""

    int8, bfloat16, int32, float32, int64 = 8, 16, 32, 32, 64

    def __init__(self) -> None:
        self.program, self.outputs, self.arguments, self.is_pure = "", 0, (), False

    def inline_asm_elementwise(
        self, program: str, constraints: Any, arguments: Any, *, dtype: Any, is_pure: bool, pack: int
    ) -> None:
        results = list(dtype) if isinstance(dtype, tuple) else [dtype]
        taken = ["=r"] * sum(registers_of(bits, pack) for bits in results)
        for argument in arguments:
            taken += ["l" if argument.bits == 64 else "r"] * registers_of(argument.bits, pack)
        found = [name.replace("&", "") for name in str(getattr(constraints, "value", constraints)).split(",")]
        assert found == taken
        self.is_pure = is_pure
        self.program, self.outputs, self.arguments = program, found.count("=r"), tuple(arguments)
        raise EmittedError

    def broadcast_to(self, value: Any, shape: Any) -> Any:
        return value


def registers_of(bits: int, pack: int) -> int:
    """Registers that `pack` numbers take: whole ones, a register for each number of 32 bits or more."""
    if bits >= 32:
        return pack
    assert bits * pack % 32 == 0
    return bits * pack // 32


def record(decoder: Any, *arguments: Any) -> Recorder:
    """What a decoder emits for its arguments."""
    recorder = Recorder()
    source = decoder.fn
    namespace = {**source.__globals__, "tl": recorder}
    with pytest.raises(EmittedError):
        types.FunctionType(source.__code__, namespace)(*arguments)
    return recorder


def assembly(decoder: Any, *arguments: Any, shared: dict[int, int] | None = None) -> Callable[..., list[int]]:
    """The assembly that a decoder emits for its arguments, as a function of registers."""
    recorder = record(decoder, *arguments)
    assert recorder.is_pure
    return lambda *registers: execute(recorder.program, list(registers), recorder.outputs, shared=shared)


def words(count: int = 64) -> list[int]:
    random.seed(3)
    return [0, MASK, *(random.getrandbits(32) for _ in range(count))]


def both(function: Callable[[int], float], word: int) -> list[float]:
    """A function of the two 16-bit words of a register."""
    return [function(word & 0xFFFF), function(word >> 16)]


def numbers(register: int) -> list[float]:
    return [as_float(register), as_float(register >> 16)]


def bytes_of(register: int) -> list[int]:
    assert 0 <= register <= MASK
    return [(register >> shift) & 255 for shift in (0, 8, 16, 24)]


def of_bytes(values: list[int]) -> int:
    return sum((value & 255) << (8 * place) for place, value in enumerate(values))


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def byte_registers() -> list[int]:
    """Registers with every byte at every place, beside unlike ones."""
    return [of_bytes([byte, byte + 85, 2 * byte + 1, 255 - byte]) for byte in range(256)]


@pytest.mark.parametrize(("shift", "mask", "bias"), [(0, 15, 8), (12, 15, 0), (4, 15, -128), (6, 3, 1), (14, 3, 0)])
def test_fields(shift: int, mask: int, bias: int) -> None:
    run = assembly(tiles.word_field, HALF, shift, mask, bias, True)
    for word in words():
        assert numbers(run(word)[0]) == both(lambda w: ((w >> shift) & mask) - bias, word)


@pytest.mark.parametrize(
    ("shift", "mask", "high", "high_mask", "lift"),
    [(0, 15, 0, 3, 4), (12, 15, 14, 3, 4), (6, 3, 15, 1, 2), (8, 15, 1, 1, 4)],
)
def test_fields_of_two_planes(shift: int, mask: int, high: int, high_mask: int, lift: int) -> None:
    run = assembly(tiles.word_fields, HALF, HALF, shift, mask, high, high_mask, lift, 4, True)
    for word, other in zip(words(), reversed(words()), strict=True):
        expected = [
            ((w >> shift) & mask | ((h >> high) & high_mask) << lift) - 4
            for w, h in ((word & 0xFFFF, other & 0xFFFF), (word >> 16, other >> 16))
        ]
        assert numbers(run(word, other)[0]) == expected


@pytest.mark.parametrize("high", [0, 1])
def test_bytes(high: int) -> None:
    integer, float8 = assembly(tiles.signed_byte, HALF, high, True), assembly(tiles.float8, HALF, high, True)
    for byte in range(256):
        word = (byte << (8 * high)) * 65537 ^ (0x5A << (8 * (1 - high)))
        assert numbers(integer(word)[0]) == [byte - 256 if byte > 127 else byte] * 2
        if byte & 127 != 127:
            placed = sum(((word >> source) & 0x10001) << target for source, target in enumerate(formats.E4M3_BITS))
            assert numbers(float8(placed)[0]) == [fp8(byte)] * 2


@pytest.mark.parametrize("low", [0, 1])
def test_tables_of_sixteen(low: int) -> None:
    levels, e2m1 = assembly(tiles.levels, HALF, low, True), assembly(tiles.e2m1, HALF, low, True)
    for word in words():
        for place, (level, doubled) in enumerate(zip(levels(word), e2m1(word), strict=True)):
            nibbles = [(w >> (4 * low + 8 * place)) & 15 for w in (word & 0xFFFF, word >> 16)]
            assert numbers(level) == [float(IQ4_LEVELS[n]) for n in nibbles]
            assert numbers(doubled) == [(-2 if n > 7 else 2) * E2M1[n & 7] for n in nibbles]


def test_scaled_e2m1() -> None:
    for q in range(4):
        factor = assembly(tiles.group_factor, WORD, WORD, True)
        for word in words(8):
            byte = (word >> (8 * q)) & 127
            scale = factor(word & 0x7F7F7F7F, 16448 + 257 * q)[0]
            assert numbers(scale) == [(1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 10 + 119)] * 2
            for field in range(4):
                run = assembly(tiles.word_e2m1, HALF, WORD, field, True)
                codes = [random.getrandbits(16) for _ in range(2)]
                packed = [sum(((c >> i) & 1) << target for i, target in enumerate(formats.E2M1_BITS)) for c in codes]
                got = numbers(run(packed[0] | packed[1] << 16, scale, scale)[0])
                for code, value in zip(codes, got, strict=True):
                    nibble = (code >> (4 * field)) & 15
                    level = (-1 if nibble > 7 else 1) * E2M1[nibble & 7]
                    assert value * 128 == level * (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 10)


def test_raised_scales() -> None:
    for index in range(4):
        run = assembly(tiles._byte_raised, WORD, WORD, index, True)
        for word in words():
            assert run(word, 0x4B000000)[0] == 0x4B000000 | bytes_of(word)[index]
    for index in range(8):
        run = assembly(tiles._odd_raised, WORD, index, True)
        for word in words():
            assert run(word)[0] == 0x4B000000 | 2 * ((word >> (4 * index)) & 15) + 1


def fields_of(bits: int, at: int) -> set[tuple[int, int, int]]:
    """Field, width and place of each chunk's codes in a plane."""
    return {(chunk % (8 // bits), bits, at) for chunk in range(8)} if bits else set()


def test_fields_of_bytes() -> None:
    served = [fmt for fmt in formats.TILE_FORMATS.values() if fmt.integer and fmt.code == integers.BYTES.value]
    assert len(served) == 4
    plain = set().union(*(fields_of(f.low_bits, f.low_at) | fields_of(f.high_bits, f.high_at) for f in served))
    assert len(plain) > 10
    for field, bits, at in plain:
        run = assembly(integers.byte_field, BYTE, field, bits, at, True)
        for word in byte_registers():
            expected = [((b >> (field * bits)) & ((1 << bits) - 1)) << at for b in bytes_of(word)]
            assert bytes_of(run(word)[0]) == expected, (field, bits, at)


def test_fields_of_two_planes_of_bytes() -> None:
    served = [fmt for fmt in formats.TILE_FORMATS.values() if fmt.integer and fmt.high_bits]
    assert len(served) == 3
    for fmt in served:
        for chunk in range(8):
            low, high = chunk % (8 // fmt.low_bits), chunk % (8 // fmt.high_bits)
            run = assembly(
                integers.byte_fields, BYTE, BYTE, low, fmt.low_bits, fmt.low_at, high, fmt.high_bits, fmt.high_at, True
            )
            for word, other in zip(byte_registers(), words(254), strict=True):
                expected = [
                    ((a >> (low * fmt.low_bits)) & ((1 << fmt.low_bits) - 1)) << fmt.low_at
                    | ((b >> (high * fmt.high_bits)) & ((1 << fmt.high_bits) - 1)) << fmt.high_at
                    for a, b in zip(bytes_of(word), bytes_of(other), strict=True)
                ]
                assert bytes_of(run(word, other)[0]) == expected


@pytest.mark.parametrize("field", range(4))
def test_scaled_fields(field: int) -> None:
    run = assembly(integers.scaled_field, BYTE, WORD, field, True)
    for factor in range(16):
        for word in byte_registers():
            expected = [((b >> (2 * field)) & 3) * factor for b in bytes_of(word)]
            assert bytes_of(run(word, *[factor] * 4)[0]) == expected


def test_nibbles_at_a_run_time_place() -> None:
    run = assembly(integers.nibble_of, WORD, WORD, True)
    for word in words():
        assert [run(word, 4 * i)[0] for i in range(8)] == [(word >> (4 * i)) & 15 for i in range(8)]
    # Minima of four bits: two steps share a byte.
    minima = assembly(integer_kernel._dot_minima, BYTE, None, WORD, None, None, None, 16, False, 8, 1, True)
    for word in byte_registers():
        for shift in (0, 4):
            assert bytes_of(minima(word, *[shift] * 4)[0]) == [(b >> shift) & 15 for b in bytes_of(word)]


def test_integer_scales() -> None:
    def byte(word: int, group: int) -> int:
        return bytes_of(word)[group % 4]

    kinds: dict[int, tuple[int, int, Callable[[int, int], int]]] = {
        integers.UNSIGNED_BYTES.value: (8, 4, byte),
        integers.SIGNED_BYTES.value: (16, 4, lambda word, group: signed(byte(word, group), 8)),
    }
    odd = integers.ODD_NIBBLES.value
    served = {fmt.scale for fmt in formats.TILE_FORMATS.values() if fmt.integer}
    assert served == {*kinds, odd, integers.NO_SCALES.value}
    assert all(fmt.words == 2 for fmt in formats.TILE_FORMATS.values() if fmt.integer and fmt.scale == odd)
    halves = [assembly(integers.odd_bytes, WORD, high, True) for high in (False, True)]
    for group in range(8):
        held = tuple(Values(32) for _ in range(3))
        recorded = record(integers.integer_scale, held, group, odd, True)
        assert len(recorded.arguments) == 1 and recorded.arguments[0] is held[1 + group % 2]
        for word in words():
            got = execute(recorded.program, halves[group % 2](word), recorded.outputs)[0]
            assert got == 2 * ((word >> (4 * group)) & 15) + 1
    for kind, (groups, per_word, meaning) in kinds.items():
        for group in range(groups):
            held = tuple(Values(32) for _ in range(1 + groups // per_word))
            recorded = record(integers.integer_scale, held, group, kind, True)
            assert len(recorded.arguments) == 1 and recorded.arguments[0] is held[1 + group // per_word]
            for word in (*words(), *byte_registers()):
                got = execute(recorded.program, [word], recorded.outputs)[0]
                assert signed(got, 32) == meaning(word, group), (kind, group)


def test_scaled_sums() -> None:
    run = assembly(integers.scaled_sum, WORD, WORD, WORD, True)
    random.seed(5)
    for _ in range(200):
        scale, dot = random.randint(-128, 127), random.randint(-(1 << 20), 1 << 20)
        total = random.randint(-(1 << 30), 1 << 30)
        assert signed(run(scale & MASK, dot & MASK, total & MASK)[0], 32) == scale * dot + total


FOLDED: dict[str, tuple[list[int], list[int]]] = {
    "Q3_K": ([32 * code for code in range(-4, 4)], list(range(-32, 32))),
    "Q4_K": (list(range(16)), list(range(64))),
    "Q5_K": (list(range(32)), list(range(64))),
    "Q6_K": ([4 * code for code in range(-32, 32)], list(range(-128, 128))),
    "IQ2_XXS": ([sign * level for level in (8, 25, 43) for sign in (1, -1)], list(range(1, 32, 2))),
}
"""All codes that a chunk of a format may hold, as its bytes, and all integer scales."""


@pytest.mark.parametrize("name", FOLDED)
def test_codes_times_scales_in_two_planes(name: str) -> None:
    fmt = formats.TILE_FORMATS[name]
    codes, scales = FOLDED[name]
    # As the wide form of the kernel asks for it.
    run = assembly(integers.folded, BYTE, WORD, fmt.scale != integers.UNSIGNED_BYTES.value, True)
    random.seed(11)
    for scale in scales:
        # The extremes side by side, where a carry would pass from one to the other; then all, beside unlike ones.
        least, most = min(codes), max(codes)
        fours = [[least] * 4, [most] * 4, [least, least, most, most], [most, most, least, least]]
        fours += [[least, most] * 2, [most, least] * 2]
        mixed = random.sample(codes, len(codes))
        fours += [[mixed[(i + j) % len(mixed)] for j in (0, 1, 3, 4)] for i in range(len(mixed))]
        for four in fours:
            upper, lower = run(of_bytes(four), *[scale & MASK] * 4)
            found = [256 * signed(a, 8) + signed(b, 8) for a, b in zip(bytes_of(upper), bytes_of(lower), strict=True)]
            assert found == [code * scale for code in four], (scale, four)


def test_every_format_with_scales_beside_its_codes_is_folded() -> None:
    served = {name for name, fmt in formats.TILE_FORMATS.items() if fmt.integer}
    assert served == {*FOLDED, "Q2_K"}  # whose scales are multiplied into its codes


def test_grid_bytes() -> None:
    fmt = find_format("IQ2_XXS")
    assert fmt is not None
    torch.manual_seed(2)
    data = torch.randint(0, 256, (16, fmt.block_bytes), dtype=torch.uint8)
    weight = relayout(PackedTensor(fmt, (16, 256), data, "weight"), torch.device("cpu"))
    assert weight.low is not None and weight.low.shape == (1, 1, 1, 2, 512) and weight.table is not None
    held = weight.low.view(torch.int32).reshape(2, 32, 4)  # [fragment, lane, word]
    rows, parity = grid("IQ2_XXS").tolist(), parity_signs().tolist()
    # The table's copy in shared memory, written by the threads of a warp; of several warps each writes the same.
    filled = record(integers.shared_table, Values(64))
    assert filled.outputs == 3 and not filled.is_pure
    shared: dict[int, int] = {}
    for lane in (*range(32), 37):
        constants = execute(filled.program, [TABLE_AT], 3, weight.table, shared, lane)
        assert constants == [SHARED_AT, *integers.GRID_CONSTANTS]
    assert shared == {SHARED_AT + 4 * i: int(word) & MASK for i, word in enumerate(weight.table[:256])}
    held_constants = [value for value in constants for _ in range(16)]
    for chunk in range(8):
        run = assembly(integers.grid_bytes, BYTE, (WORD, WORD, WORD), chunk % 4, shared=shared)
        for lane in range(32):
            four = [int(word) & MASK for word in held[chunk // 4, lane]]
            got = run(*four, *held_constants)
            assert len(got) == 4
            for half in range(2):
                for upper in range(2):
                    block = data[8 * upper + lane // 4, 2 + 8 * chunk : 10 + 8 * chunk].tolist()
                    packed = int.from_bytes(bytes(block[4:]), "little")
                    for byte, value in enumerate(bytes_of(got[2 * half + upper])):
                        element = integers.element_at.fn(chunk, lane % 4, half, byte, integers.CHUNKS.value)
                        row, place = divmod(element - 32 * chunk, 8)
                        negative = (parity[(packed >> (7 * row)) & 127] >> place) & 1
                        level = rows[block[row]][place]
                        assert signed(value, 8) == (-level if negative else level)
