"""C++ matrix products: every format against float64 on decoded weights, and rows bit for bit alone or together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimserve.ops import Activations, NumericsConfig, linear, prepare_linear
from slimserve.ops.cpu import library
from slimserve.ops.cpu.build import find_compiler
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import find_format, is_plain
from slimserve.quant.tensor import PackedTensor

if find_compiler() is None:
    pytest.skip("no C++ compiler: the CPU kernels cannot be built", allow_module_level=True)

# Byte offsets of the fp16 fields of a block; the other bytes may take any value.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,),
    "IQ3_S": (0,), "IQ1_S": (0,), "IQ1_M": (), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")
SIDE = ("F8_E4M3", "F8_BLOCK", "E2M1_G16", "INT4")
ALL = (*HALVES, *PLAIN, *SIDE)
ROW_COUNTS = (1, 2, 3, 8, 11, 16, 33, 48, 49, 64)


def random_packed(name: str, rows: int, columns: int, seed: int) -> PackedTensor:
    rng = np.random.default_rng(seed)
    if name in SIDE:
        return random_side(name, rows, columns, rng)
    fmt = find_format(name)
    assert fmt is not None
    if is_plain(fmt):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        data = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32)).to(dtype)
        return PackedTensor(fmt, (rows, columns), data, name)
    blocks = rng.integers(0, 256, (rows * columns // fmt.block_size, fmt.block_bytes), dtype=np.uint8)
    for offset in HALVES[name]:
        scale = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    if name == "IQ1_M":  # top nibbles of four words spell an fp16 near 0.01
        for word, nibble in enumerate((0xF, 0x1, 0x1, 0x2)):
            blocks[:, 49 + 2 * word] = (blocks[:, 49 + 2 * word] & 0x0F) | (nibble << 4)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 126, len(blocks))
    if name == "NVFP4":
        blocks[:, :4] = rng.integers(0, 128, (len(blocks), 4))
    data = torch.from_numpy(blocks.reshape(rows, -1))
    return PackedTensor(fmt, (rows, columns), data, name)


def random_side(name: str, rows: int, columns: int, rng: np.random.Generator) -> PackedTensor:
    fmt = find_format(name.replace("F8_BLOCK", "F8_E4M3"))
    assert fmt is not None
    positive = torch.from_numpy(rng.random((rows, columns // 16)).astype(np.float32) + 0.1)
    if name.startswith("F8"):
        data = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32) * 50).to(torch.float8_e4m3fn)
        shape = (rows, 1) if name == "F8_E4M3" else (-(-rows // 128), -(-columns // 128))
        scales = {"weight_scale": torch.from_numpy(rng.random(shape).astype(np.float32) * 0.01)}
        return PackedTensor(fmt, (rows, columns), data, name, scales)
    data = torch.from_numpy(rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
    if name == "E2M1_G16":
        scales = {
            "weight_scale": (positive * 300).to(torch.float8_e4m3fn),
            "global_scale": torch.tensor([3.7e-4]),
        }
    else:
        scales = {"weight_scale": positive[:, : columns // 128].to(torch.float16)}
    return PackedTensor(fmt, (rows, columns), data, name, scales)


def numerics(activations: Activations) -> NumericsConfig:
    return NumericsConfig(cpu_activations=activations)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the int8 mode sees them: 32 at a time, scale amax / 127."""
    blocks = x.double().reshape(x.shape[0], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / scale.clamp(min=1e-30)) * scale).reshape(x.shape)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("name", ALL)
def test_matches_float64_on_decoded_weights(name: str, activations: Activations) -> None:
    packed = random_packed(name, 77, 768, seed=3)
    weight = prepare_linear([packed], numerics=numerics(activations))
    assert "panels" in weight.kernel
    decoded = dequantize(packed).double()
    x = torch.randn(19, 768, generator=torch.Generator().manual_seed(5))
    integer = activations is Activations.INT8 and name not in (*PLAIN, "F8_E4M3", "F8_BLOCK")
    want = (rounded(x) if integer else x.double()) @ decoded.T
    # An activation that lies between two int8 steps may fall to either side: 1e-3 there, rounding of float32 elsewhere.
    limit = 1e-3 if integer else 2e-6
    assert relative_error(linear(x, weight), want) < limit
    assert relative_error(linear(x[:3], weight), want[:3]) < limit


@pytest.mark.parametrize("fill", (0xFF, 0x77, 0x00))
@pytest.mark.parametrize("name", HALVES)
def test_largest_codes_times_largest_activations(name: str, fill: int) -> None:
    """Every product as large as it may be: sums that were kept in too few bits would show here alone."""
    packed = random_packed(name, 20, 512, seed=4)
    blocks = packed.data.numpy().reshape(-1, packed.format.block_bytes)
    scales = [at + byte for at in HALVES[name] for byte in (0, 1)]
    scales += {"IQ1_M": list(range(48, 56)), "MXFP4": [0], "NVFP4": [0, 1, 2, 3]}.get(name, [])
    codes = np.setdiff1d(np.arange(blocks.shape[1]), scales)
    blocks[:, codes] = fill
    weight = prepare_linear([packed], numerics=numerics(Activations.INT8))
    decoded = dequantize(packed).double()
    x = torch.ones(60, 512) * torch.tensor([1.0, -1.0]).repeat(30)[:, None]
    want = x.double() @ decoded.T
    size = x.double().abs() @ decoded.abs().T
    for rows in (1, 3, 60):  # packed codes, and decoded panels
        error = ((linear(x[:rows], weight).double() - want[:rows]).abs() / size[:rows].clamp(min=1e-30)).max()
        assert error < 1e-6


@pytest.mark.parametrize("activations", list(Activations))
@pytest.mark.parametrize("name", ALL)
def test_rows_have_the_same_bits_alone_and_together(name: str, activations: Activations) -> None:
    packed = random_packed(name, 50, 512, seed=11)
    weight = prepare_linear([packed], numerics=numerics(activations))
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(6))
    alone = torch.cat([linear(x[t : t + 1], weight) for t in range(64)])
    for threads in (1, 2):
        library.set_threads(threads)
        for count in (*ROW_COUNTS, 512):
            together = linear(x[:count], weight)
            shown = min(count, 64)
            assert torch.equal(together[:shown].view(torch.int32), alone[:shown].view(torch.int32)), (threads, count)
    library.set_threads(library.available_cores())


def test_parts_of_different_formats_in_one_call_with_bias() -> None:
    parts = [random_packed(name, n, 256, seed=n) for name, n in (("Q5_0", 33), ("Q8_0", 16), ("Q6_K", 47), ("F16", 5))]
    biases = [torch.randn(33), None, torch.randn(47), None]
    fused = prepare_linear(parts, biases)
    x = torch.randn(21, 256)
    want = torch.cat([linear(x, prepare_linear([part])) for part in parts], dim=1)
    want += torch.cat(
        [bias if bias is not None else torch.zeros(part.shape[0]) for part, bias in zip(parts, biases, strict=True)]
    )
    assert torch.equal(linear(x, fused), want)
    assert torch.equal(linear(x[4:5], fused), want[4:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_in_and_out(dtype: torch.dtype) -> None:
    packed = random_packed("Q4_K", 40, 512, seed=2)
    weight = prepare_linear([packed])
    x = torch.randn(9, 512).to(dtype)
    assert torch.equal(linear(x, weight), linear(x.float(), weight).to(dtype))


def test_guard_bands_and_poison_stay_untouched() -> None:
    packed = random_packed("Q8_0", 37, 320, seed=8)
    prepared = prepare_linear([packed]).parts[0].prepared
    x = torch.randn(11, 320)
    wide = torch.full((13, 37 + 24), float("nan"))
    prepared(x, wide[1:12, 8:45])
    assert torch.isfinite(wide[1:12, 8:45]).all()
    wide[1:12, 8:45] = float("nan")
    assert torch.isnan(wide).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "Q4_1", "IQ2_XXS"])
def test_long_rows_and_extreme_activations(name: str) -> None:
    packed = random_packed(name, 17, 17408, seed=4)
    weight = prepare_linear([packed])
    x = torch.randn(3, 17408)
    x[0] *= 1e4
    x[1, ::7] = 0.0
    want = rounded(x) @ dequantize(packed).double().T
    got = linear(x, weight)
    assert torch.isfinite(got).all()
    for t in range(3):
        assert relative_error(got[t], want[t]) < 1e-3
    assert torch.equal(linear(torch.zeros(2, 17408), weight), torch.zeros(2, 17))


def test_packed_size_is_kept() -> None:
    for name in HALVES:
        packed = random_packed(name, 64, 2048, seed=1)
        assert prepare_linear([packed]).num_bytes <= packed.num_bytes * 1.01, name


def test_unknown_formats_and_lengths_are_left_to_the_reference() -> None:
    fmt = find_format("Q1_0")
    assert fmt is not None
    blocks = torch.zeros(4, 18, dtype=torch.uint8)
    weight = prepare_linear([PackedTensor(fmt, (4, 128), blocks, "q1")])
    assert "reference" in weight.kernel
    assert "Q1_0" in weight.choices[0].refused[0][1]


def test_plain_reads_see_every_page() -> None:
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    read = library.load().slim_read
    assert read(memory.data_ptr(), memory.numel()) == 0
    for at in (0, 4095, 300_000, memory.numel() - 1):
        memory[at] = 1
        assert read(memory.data_ptr(), memory.numel()) != 0
        memory[at] = 0
    assert library.read_rate(1 << 20) > 0
