"""The Triton matrix product against float64 on decoded weights, for every format, and row by row against itself."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE, ON_DEVICE, triton_marks

from slimserve.ops.numerics import NumericsConfig
from slimserve.quant import formats
from slimserve.quant.decode import dequantize
from slimserve.quant.tensor import PackedTensor

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    from slimserve.ops.triton import linear as kernels
    from slimserve.ops.triton.formats import TILE_FORMATS
    from slimserve.ops.triton.relayout import refuses

FORMATS = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
    "NVFP4", "E2M1_G16", "F8_E4M3", "INT4",
]  # fmt: skip
HALF_FIELDS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def random_weight(name: str, rows: int, width: int, groups: int | None = None, block: bool = False) -> PackedTensor:
    """Random bytes of a format with scales of ordinary size."""
    fmt = formats.find_format(name)
    assert fmt is not None
    lead = (rows,) if groups is None else (groups, rows)
    shape = (*lead, width)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if name in plain:
        return PackedTensor(fmt, shape, torch.randn(shape).to(plain[name]), name)
    if name == "F8_E4M3":
        data = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = torch.rand(*lead[:-1], -(-rows // 128), -(-width // 128)) if block else torch.rand(*lead, 1)
        return PackedTensor(fmt, shape, data, name, {"weight_scale": scale + 0.1})
    data = torch.randint(0, 256, (*lead, fmt.row_bytes(width)), dtype=torch.uint8)
    if name == "E2M1_G16":
        scale = (torch.rand(*lead, width // 16) * 3).to(torch.float8_e4m3fn)
        scale[..., ::3] = torch.tensor(0.005).to(torch.float8_e4m3fn)  # subnormal
        return PackedTensor(fmt, shape, data, name, {"weight_scale": scale, "global_scale": torch.tensor([0.03])})
    if name == "INT4":
        return PackedTensor(fmt, shape, data, name, {"weight_scale": torch.rand(*lead, width // 128).half()})
    blocks = data.view(-1, fmt.block_bytes)
    for offset in HALF_FIELDS.get(name, ()):
        halves = (torch.randn(blocks.shape[0], 1) * 0.05).half()
        blocks[:, offset : offset + 2] = halves.view(torch.uint8)
    if name == "IQ1_M":
        blocks[:, 49::2] = (blocks[:, 49::2] & 15) | torch.tensor([0x00, 0x00, 0x80, 0x20], dtype=torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(120, 130, (blocks.shape[0],), dtype=torch.uint8)
    if name == "NVFP4":
        blocks[:, 0:4] = torch.randint(0, 80, (blocks.shape[0], 4), dtype=torch.uint8)
    return PackedTensor(fmt, shape, data, name)


def multiply(weight: PackedTensor, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The kernel's product, written between guard columns that must stay NaN."""
    served = kernels.TritonLinear(weight, torch.device(DEVICE), NumericsConfig())
    rows = weight.shape[0]
    guarded = torch.full((x.shape[0] + 1, rows + 2), math.nan, dtype=out_dtype, device=DEVICE)
    served(x.to(DEVICE), guarded[:-1, 1:-1])
    assert guarded[:, 0].isnan().all() and guarded[:, -1].isnan().all() and guarded[-1].isnan().all()
    assert int(served.meeting.locks.sum()) == 0 and bool((served.meeting.slots == -1).all())
    return guarded[:-1, 1:-1]


def error_bound(name: str) -> float:
    """Integer products round the input to sixteen bits of its block's largest element; the others take it as it is."""
    return 1e-4 if TILE_FORMATS[name].integer else 2e-5


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


WIDTH = 5120 if ON_DEVICE else 256
ROWS = 300 if ON_DEVICE else 21


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_matches_float64(name: str) -> None:
    torch.manual_seed(0)
    weight = random_weight(name, ROWS, WIDTH)
    assert refuses(name, weight.shape) is None
    decoded = dequantize(weight).double()
    for dtype, count in ((torch.bfloat16, 3), (torch.float32, 1)):
        x = torch.randn(count, WIDTH).to(dtype)
        got = multiply(weight, x, torch.float32)
        assert relative(got, x.double() @ decoded.T) < error_bound(name), dtype


def test_fp8_block_scales_and_a_tail() -> None:
    weight = random_weight("F8_E4M3", 150, 416, block=True)
    x = torch.randn(3, 416).bfloat16()
    assert relative(multiply(weight, x, torch.float32), x.double() @ dequantize(weight).double().T) < 2e-5


@pytest.mark.parametrize(("name", "width"), [("Q4_1", 96), ("Q5_0", 288), ("Q8_0", 32), ("BF16", 48), ("F32", 20)])
def test_widths_that_are_no_multiple_of_a_step(name: str, width: int) -> None:
    weight = random_weight(name, 5, width)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(2, width).to(dtype)
        assert relative(multiply(weight, x, torch.float32), x.double() @ dequantize(weight).double().T) < 2e-5


COUNTS = (1, 2, 3, 8, 16, 33, 64, 300, 2049) if ON_DEVICE else (1, 9)
ROW_FORMATS = FORMATS if ON_DEVICE else ["Q4_K", "Q8_0"]


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_a_row_does_not_depend_on_the_number_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    width = 4096 if ON_DEVICE else 1280
    weight = random_weight(name, 200 if ON_DEVICE else 20, width)
    served = kernels.TritonLinear(weight, torch.device(DEVICE), NumericsConfig())
    assert served.segments > 1
    x = torch.randn(max(COUNTS), width).bfloat16().to(DEVICE)
    results = []
    for processors in (0, 1 << 20):  # segments one after the other; segments in parallel
        monkeypatch.setattr(kernels, "multiprocessors", lambda device, n=processors: n)
        for count in COUNTS:
            out = torch.full((count, weight.shape[0]), math.nan, device=DEVICE)
            served(x[:count], out)
            results.append(out)
    for once, spread in zip(results[: len(COUNTS)], results[len(COUNTS) :], strict=True):
        assert torch.equal(once, spread)
    for out in results:
        # The interpreter multiplies through BLAS, whose order depends on the tile; a device's must not.
        same = torch.equal if ON_DEVICE else torch.allclose
        assert same(out, results[len(COUNTS) - 1][: out.shape[0]])


@pytest.mark.parametrize(
    ("rows", "steps", "step", "count"),
    [
        (17408, 20, 256, 3),  # a segment less would make it half as long again
        (5120, 68, 256, 9),  # ten would be 3,200 programs
        (5120, 136, 128, 9),
        (10240, 20, 256, 5),
        (2560, 36, 256, 18),
        (34816, 20, 256, 1),
        (248320, 20, 256, 1),
        (896, 19, 256, 7),
        (16, 1, 256, 1),
        (256, 2400, 256, 185),
    ],
)
def test_the_cut_keeps_programs_even(rows: int, steps: int, step: int, count: int) -> None:
    found, tiles = kernels.cut_segments(rows, steps, step), -(-rows // 16)
    assert found == count
    assert found == 1 or (
        tiles * found <= kernels.SEGMENT_PROGRAMS and steps * step >= found * kernels.SEGMENT_ELEMENTS
    )


def test_a_stack_and_a_sweep_are_cut_as_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [kernels.cut_segments(rows, 68, 256, groups) for rows, groups in ((5120, 1), (640, 8), (640, 288))]
    assert counts == [9, 10, 10]
    for programs, count in ((1600, 5), (2400, 7), (4400, 12)):
        monkeypatch.setattr(kernels, "SEGMENT_PROGRAMS", programs)
        assert kernels.cut_segments(5120, 68, 256) == count


def test_registers_leave_room_for_as_many_programs_as_there_are() -> None:
    most = kernels.most_registers
    assert [most(kernels.CAPPED, n, 132) for n in (1, 3168, 3169, 3264)] == [80, 80, 72, 72]
    assert most(kernels.CAPPED, 3168, 114) == 72
    assert most(kernels.NARROW, 1, 132) == 0 and most(kernels.INTEGER_16, 1, 132) == 128


@pytest.mark.skipif(not ON_DEVICE, reason="registers are a device's")
@pytest.mark.parametrize("name", ["NVFP4", "F8_E4M3", "Q8_0", "Q4_K", "Q6_K", "Q2_K", "IQ2_XXS"])
def test_registers_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    served = kernels.TritonLinear(random_weight(name, 700, 5120), torch.device(DEVICE), NumericsConfig())
    x = torch.randn(4, 5120).bfloat16().to(DEVICE)
    results = []
    for warps in (kernels.EVEN_WARPS, 0):
        monkeypatch.setattr(kernels, "EVEN_WARPS", warps)
        results.append(torch.empty(4, 700, device=DEVICE))
        served.run(x, results[-1], kernels.CAPPED)
    assert torch.equal(*results)


BOTH_FORMS = ("Q4_K", "Q2_K", "NVFP4", "IQ2_XXS", "Q4_1", "F16", "F8_E4M3", "BF16")
UNEVEN = (("F8_BLOCK", 416), ("BF16", 72), ("E2M1_G16", 720))
IN_SEGMENTS = (("NVFP4", 1536), ("BF16", 1536))


@pytest.mark.parametrize(("name", "width"), [*((name, 768) for name in BOTH_FORMS), *UNEVEN, *IN_SEGMENTS])
def test_both_forms_of_the_kernel_agree(name: str, width: int) -> None:
    torch.manual_seed(8)
    weight = random_weight(name.replace("BLOCK", "E4M3"), 20, width, block=name == "F8_BLOCK")
    served = kernels.TritonLinear(weight, torch.device(DEVICE), NumericsConfig())
    assert served.segments == max(1, width // kernels.SEGMENT_ELEMENTS)
    x = torch.randn(9, width).bfloat16()
    expected = x.double() @ dequantize(weight).double().T
    for tile in (kernels.Tile(16, 16), kernels.Tile(64, 16, 4, True)):
        out = torch.full((9, 20), math.nan, device=DEVICE)
        served.run(x.to(DEVICE), out, tile)
        assert relative(out, expected) < error_bound(weight.format.name), tile


@pytest.mark.skipif(not ON_DEVICE, reason="tile shapes only differ on a device")
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "NVFP4", "Q6_K", "Q2_K", "IQ2_XXS", "F8_E4M3", "BF16"])
def test_every_tile_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(4)
    weight = random_weight(name, 700, 5120)
    served = kernels.TritonLinear(weight, torch.device(DEVICE), NumericsConfig())
    x = torch.randn(40, 5120).bfloat16().to(DEVICE)
    expected = torch.empty(40, 700, device=DEVICE)
    served.run(x, expected, kernels.NARROW)
    assert served.wide == kernels.warp_groups_agree(torch.device(DEVICE))
    for tile in (*kernels.TILES, *kernels.NARROW_TILES, *kernels.SWEEP):
        if tile.wide and not served.wide:
            continue
        out = torch.full((40, 700), math.nan, device=DEVICE)
        served.run(x, out, tile)
        assert torch.equal(out, expected), tile


def test_extreme_activations_stay_finite() -> None:
    weight = random_weight("Q4_K", 20, 256)
    x = (torch.randn(2, 256) * 1e4).bfloat16()
    got = multiply(weight, x, torch.float32)
    assert relative(got, x.double() @ dequantize(weight).double().T) < error_bound("Q4_K")


def test_every_format_of_the_kernel_is_tested() -> None:
    assert set(TILE_FORMATS) == set(FORMATS)


@pytest.mark.parametrize("name", ["Q6_K", "Q4_K", "Q2_K", "Q4_1", "NVFP4", "F8_E4M3", "BF16", "IQ3_S", "IQ2_XXS"])
def test_embedding_rows_are_the_decoded_rows(name: str) -> None:
    torch.manual_seed(9)
    weight = random_weight(name, 37, 256)
    ids = torch.tensor([3, 0, 36, -5, 99], dtype=torch.int32)
    got = kernels.TritonLinear(weight, torch.device(DEVICE), NumericsConfig()).rows(ids.to(DEVICE), torch.float32)
    expected = dequantize(weight)[ids.clamp(0, 36).long()]
    assert torch.allclose(got.cpu(), expected, rtol=1e-6, atol=1e-6)


def experts_oracle(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    gate_up = torch.cat(parts, dim=1)  # [E, 2F, K]
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            gate, up = (gate_up[ids[t, slot]] @ x[t].double()).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[t] += weights[t, slot].double() * (down[ids[t, slot]] @ (gate * torch.sigmoid(gate) * up))
    return out


@pytest.mark.parametrize(("rows", "slots", "experts", "columns"), [(1, 8, 20, 8), (9, 3, 4, 8), (30, 2, 3, 16)])
def test_small_groupings_equal_the_large_ones(
    rows: int, slots: int, experts: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimserve.ops.triton import experts as routed

    torch.manual_seed(6)
    ids = torch.randint(0, experts, (rows, slots), device=DEVICE)
    small = routed.group_rows(ids, experts, columns, slots)
    monkeypatch.setattr(routed, "GROUP_PAIRS", 0)
    large = routed.group_rows(ids, experts, columns, slots)
    assert torch.equal(small.row_ids, large.row_ids) and torch.equal(small.tile_count, large.tile_count)
    live = large.tile_count > 0
    assert torch.equal(small.tile_group[live], large.tile_group[live])
    assert torch.equal(small.tile_first[live], large.tile_first[live])


@pytest.mark.parametrize(
    ("gate_name", "down_name", "split"),
    [("Q8_0", "Q2_K", False), ("Q4_0", "Q6_K", True)]
    + ([("NVFP4", "NVFP4", False), ("Q4_K", "Q6_K", False), ("IQ2_XXS", "Q2_K", True)] if ON_DEVICE else [])
    + ([("F8_E4M3", "Q8_0", True), ("MXFP4", "MXFP4", False)] if ON_DEVICE else []),
)
def test_experts_match_float64_and_rows_stand_alone(gate_name: str, down_name: str, split: bool) -> None:
    from slimserve.ops.triton.experts import TritonExperts

    torch.manual_seed(3)
    num_experts, width, inner, outer = (16, 1024, 512, 300) if ON_DEVICE else (2, 256, 256, 20)
    parts = [random_weight(gate_name, inner, width, num_experts) for _ in range(2)]
    if not split:
        data = torch.cat([part.data for part in parts], dim=1)
        parts = [PackedTensor(parts[0].format, (num_experts, 2 * inner, width), data, gate_name)]
    down = random_weight(down_name, outer, inner, num_experts)
    served = TritonExperts(tuple(parts), down, torch.device(DEVICE), NumericsConfig())
    count = 40 if ON_DEVICE else 2
    x = (torch.randn(count, width) * 0.1).bfloat16()
    ids, weights = torch.randint(0, num_experts, (count, 2)), torch.rand(count, 2)
    arguments = [tensor.to(DEVICE) for tensor in (x, ids, weights)]
    got = served(*arguments, 10.0)
    decoded = [dequantize(part).double() for part in parts]
    expected = experts_oracle(x, decoded, dequantize(down).double(), ids, weights, 10.0)
    assert got.dtype == torch.bfloat16
    assert relative(got, expected) < (5e-3 if ON_DEVICE else 1e-2)
    for t in (0, count - 1):
        alone = served(*[tensor[t : t + 1] for tensor in arguments], 10.0)
        assert torch.equal(alone[0], got[t])
    assert int(served.meeting.locks.sum()) == 0 and bool((served.meeting.slots == -1).all())
