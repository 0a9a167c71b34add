"""Products in integers: input rows as sixteen-bit integers, decoded rows, and sums against exact ones."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_ops_triton_linear import HALF_FIELDS, random_weight, relative
from triton_device import DEVICE, ON_DEVICE, triton_marks

from slimserve.ops.numerics import NumericsConfig
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import find_format
from slimserve.quant.tensor import PackedTensor

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    import triton
    import triton.language as tl

    from slimserve.measure.kernel_sweep import CROWD, PROGRAMS, cuts_of
    from slimserve.measure.kernels import SHAPES
    from slimserve.ops.triton import integers, relayout
    from slimserve.ops.triton import linear as kernels
    from slimserve.ops.triton.experts import group_rows
    from slimserve.ops.triton.formats import TILE_FORMATS
    from slimserve.ops.triton.linear_kernel import PATIENCE, hand_over, step_of, take_over

    @triton.jit
    def take_over_kernel(places_ptr, out_ptr, count, TAKEN: tl.constexpr, EXACT: tl.constexpr):
        at = tl.arange(0, 8)
        tl.store(out_ptr + at, take_over(places_ptr + at, 8, count, tl.full((8,), 1.0, tl.float32), TAKEN, EXACT))

    @triton.jit
    def bounds_kernel(out_ptr, num_steps, num_segments):
        for segment in range(num_segments + 1):
            tl.store(out_ptr + segment, step_of(segment, num_steps, num_segments))

    @triton.jit
    def hand_over_kernel(values_ptr, places_ptr, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        hand_over(places_ptr + at, tl.load(values_ptr + at))


FORMATS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS"]
ORDERS = {"Q4_K": 0, "Q6_K": 1, "Q2_K": 2}
"""A format of each order of elements."""
SCALE_BYTES: dict[str, list[int]] = {
    "Q2_K": list(range(16)),
    "Q3_K": list(range(96, 108)),
    "Q4_K": list(range(4, 16)),
    "Q5_K": list(range(4, 16)),
    "Q6_K": list(range(192, 208)),
    "IQ2_XXS": list(range(9, 66, 8)),
}
"""Bytes of a block that hold integer scales (and minima)."""
LARGEST = 32639
"""The largest integer whose two signed bytes are int8."""


def served(weight: PackedTensor) -> kernels.TritonLinear:
    return kernels.TritonLinear(weight, torch.device(DEVICE), NumericsConfig())


def test_every_integer_format_is_tested() -> None:
    assert {name for name, fmt in TILE_FORMATS.items() if fmt.integer} == set(FORMATS)
    assert {name: TILE_FORMATS[name].order for name in ORDERS} == ORDERS


# Input rows


def planes_of(rows: kernels.Prepared, order: int, wide: bool) -> torch.Tensor:
    """Prepared planes as int64 [2 M, steps, 256] in the order of elements, whatever the form they are prepared for."""
    assert rows.scale is not None
    steps, count = rows.scale.shape
    columns = 2 * count if wide else (2 * count + 7) // 8 * 8
    assert rows.planes.shape == (columns, rows.width) and rows.width == 256 * steps and rows.planes.is_contiguous()
    planes = rows.planes.cpu().long()
    if wide:  # by chunks, as a tensor core's right operand stands in memory: column, step, chunk, half, t, byte
        held = planes.view(columns, steps, 8, 2, 4, 4).permute(0, 1, 2, 4, 3, 5)
    else:  # what a thread reads stands together: step, eight, pair of chunks, column, t, chunk of the pair, half, byte
        held = planes.view(steps, columns // 8, 4, 8, 4, 2, 2, 4).permute(1, 3, 0, 2, 5, 4, 6, 7)
    held = held.reshape(columns, steps, 256)[: 2 * count]  # the last axis: chunk, t, half, byte
    axes = [torch.arange(size) for size in (8, 4, 2, 4)]
    element = integers.element_at.fn(*torch.meshgrid(*axes, indexing="ij"), order).reshape(-1)
    assert sorted(element.tolist()) == list(range(256))
    return held[..., element.argsort()]


def integers_of(rows: kernels.Prepared, order: int, wide: bool) -> torch.Tensor:
    """The integers [M, steps, 256] of prepared rows."""
    upper, lower = planes_of(rows, order, wide).unflatten(0, (-1, 2)).unbind(1)
    return 256 * upper + lower


def sums_of(rows: kernels.Prepared, wide: bool) -> torch.Tensor:
    """Prepared sums as int64 [2 digits, 2 M, steps, 32] in the order of minima, whatever the form."""
    assert rows.scale is not None and rows.sums is not None
    steps, count = rows.scale.shape
    columns = rows.planes.shape[0]
    assert rows.sums.shape == (2, columns, steps, 32) and rows.sums.is_contiguous()
    sums = rows.sums.cpu().long()
    if not wide:  # step, column, t, digit, half, byte: a thread's minima are four of either half
        sums = sums.view(steps, columns, 4, 2, 2, 4).permute(3, 1, 0, 4, 2, 5).reshape(2, columns, steps, 32)
    return sums[:, : 2 * count]


@pytest.mark.parametrize("order", range(3))
def test_orders(order: int) -> None:
    """Scales of groups act on chunks, on halves of chunks, or on what a thread holds."""
    seen = set()
    for chunk in range(8):
        for t in range(4):
            for half in range(2):
                for byte in range(4):
                    element = integers.element_at.fn(chunk, t, half, byte, order)
                    assert integers.place_at.fn(element, order) == (chunk, t, half, byte)
                    group = (chunk, 2 * chunk + half, chunk // 4 * 8 + 2 * t + chunk % 4 // 2)[order]
                    assert element // (32, 16, 16)[order] == group
                    seen.add(element)
    assert seen == set(range(256))


def input_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows [8, 512] of ordinary and extreme numbers, with a stride beyond their width."""
    most = float(torch.finfo(dtype).max)
    least = 1e-42 if dtype == torch.float32 else 1e-38 if dtype == torch.bfloat16 else 6e-8
    small = 1e-38 if dtype != torch.float16 else 1e-6
    x = torch.randn(8, 768)
    x[1] = 0
    x[2] *= small
    x[3] = torch.sign(x[3]) * least
    x[4] = (torch.rand(768) * 2 - 1) * most
    x[5] = torch.sign(x[5]) * (3e38 if dtype == torch.float32 else most)
    x[6] *= 1e-3
    x[6, ::200] = 1e4  # far above the rest of their blocks
    x[7] *= 1e-29 if dtype != torch.float16 else 1e-5
    return x.to(dtype).to(DEVICE)[:, 100:612]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_input_rows_as_integers(name: str, wide: bool) -> None:
    torch.manual_seed(20)
    weight = served(random_weight(name, 16, 512)).weight
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = input_rows(dtype)
        prepared = kernels.prepare_rows(x, weight, wide)
        found = integers_of(prepared, ORDERS[name], wide)
        expected = x.cpu().double().view(8, 2, 256)
        largest = expected.abs().amax(dim=-1)
        assert prepared.scale is not None and prepared.scale.shape == (2, 8)
        scale = prepared.scale.cpu().double().T
        assert scale.isfinite().all()
        counted = largest > 1e-30  # the rest are zeros: their products are below any other's rounding
        assert int(counted.sum()) >= 10
        assert torch.allclose(scale[counted], (largest / LARGEST)[counted], rtol=1e-6, atol=0)
        assert (scale[~counted] * LARGEST < 1e-30).all()
        assert (found[counted].abs().amax(dim=-1) == LARGEST).all()
        assert (found[~counted] == 0).all()
        # Half a step, and what the inverse of the scale is off by.
        error = (found * scale[..., None] - expected).abs()
        assert (error <= 0.52 * scale[..., None])[counted].all(), dtype


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_sums_of_groups(name: str, wide: bool, dtype: torch.dtype, aligned: bool) -> None:
    torch.manual_seed(21)
    minima = TILE_FORMATS[name].minima
    weight = served(random_weight(name, 16, 1280)).weight
    x = torch.randn(5, 1281, device=DEVICE)  # ten columns: an eight and a part of one
    x[1] = x[1].abs() + 1  # sums of one sign
    # Threads hold other elements for every size of a number, and where rows are not aligned.
    x = x.to(dtype)[:, 1:]
    x = x.contiguous() if aligned else x
    prepared = kernels.prepare_rows(x, weight, wide)
    if not minima:
        assert prepared.sums is None
        return
    planes = planes_of(prepared, ORDERS[name], wide).view(10, 5, minima, 256 // minima)
    expected = torch.zeros(10, 5, 32, dtype=torch.int64)
    for step in range(5):
        # Minima of four steps share a byte each (or a half of one): a step's stand in its part of 32 places.
        for group in range(minima):
            expected[:, step, step % (32 // minima) * minima + group] = -planes[:, step, group].sum(dim=-1)
    upper, lower = sums_of(prepared, wide)
    assert lower.min() >= 0
    assert torch.equal(128 * upper + lower, expected)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_broken_blocks_have_no_number_and_leave_others_alone(name: str, wide: bool) -> None:
    torch.manual_seed(22)
    weight = served(random_weight(name, 16, 512)).weight
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(5, 512).to(dtype).to(DEVICE)
        whole = kernels.prepare_rows(x, weight, wide)
        broken = torch.zeros(2, 5, dtype=torch.bool)
        for row, column, value in ((1, 3, math.nan), (2, 511, math.inf), (4, 256, -math.inf), (4, 0, math.nan)):
            x[row, column] = value
            broken[column // 256, row] = True
        prepared = kernels.prepare_rows(x, weight, wide)
        assert prepared.scale is not None and whole.scale is not None
        assert torch.equal(prepared.scale.isnan().cpu(), broken)
        assert torch.equal(prepared.scale.cpu()[~broken], whole.scale.cpu()[~broken])
        kept = ~broken.T.repeat_interleave(2, dim=0)  # [2 M, steps]
        got, expected = (planes_of(rows, ORDERS[name], wide) for rows in (prepared, whole))
        assert torch.equal(got[kept], expected[kept])
        if TILE_FORMATS[name].minima:
            assert torch.equal(sums_of(prepared, wide)[:, kept], sums_of(whole, wide)[:, kept])


# Decoded rows


def extreme_weight(name: str, rows: int, width: int, groups: int | None = None) -> PackedTensor:
    """Random blocks with integer scales of all zeros and all ones, bytes of all ones, and halves of every kind."""
    weight = random_weight(name, rows, width, groups)
    blocks = weight.data.view(-1, weight.format.block_bytes)
    for place, value in enumerate((0, 255)):
        blocks[1 + place :: 5][:, SCALE_BYTES[name]] = value
    blocks[3::10], blocks[8::10] = 255, 0
    halves = torch.tensor([0.013, -0.7, 6e-8, 0.0, -3e-5, 65504.0, -0.0], dtype=torch.float16)
    for place, offset in enumerate(HALF_FIELDS[name]):
        kind = (torch.arange(blocks.shape[0]) // (place + 1)) % 7
        blocks[:, offset : offset + 2] = halves[kind, None].view(torch.uint8)
    return weight


@pytest.mark.parametrize(("rows", "width"), [(21, 256), (37, 1280), (18, 2304)])
@pytest.mark.parametrize("name", FORMATS)
def test_decoded_rows_are_the_reference_decoders(name: str, rows: int, width: int) -> None:
    torch.manual_seed(23)
    weight = extreme_weight(name, rows, width)
    expected = dequantize(weight)
    assert expected.isfinite().all() and expected.norm() > 0
    linear = served(weight)
    ids = torch.cat((torch.randperm(rows), torch.tensor([rows - 1, 0, 0, -3, rows + 5])))
    got = linear.rows(ids.to(DEVICE), torch.float32).cpu()
    assert torch.equal(got, expected[ids.clamp(0, rows - 1)])
    rounded = linear.rows(ids[:3].to(DEVICE), torch.bfloat16).cpu()
    if ON_DEVICE:  # the interpreter cuts bfloat16 numbers off instead of rounding them
        rounded = linear.rows(ids.to(DEVICE), torch.bfloat16).cpu()
        assert torch.equal(rounded, expected[ids.clamp(0, rows - 1)].bfloat16())


def matrix_of(stack: relayout.TileWeight, group: int) -> relayout.TileWeight:
    planes: dict[str, Any] = {
        name: None if (plane := getattr(stack, name)) is None else plane[group : group + 1]
        for name in ("low", "high", "minima", "words")
    }
    return replace(stack, groups=1, **planes)


@pytest.mark.parametrize("name", FORMATS)
def test_stacks_hold_each_matrix_and_pieces_make_a_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(24)
    packed = extreme_weight(name, 37, 512, groups=3)
    linear = served(PackedTensor(packed.format, packed.shape[1:], packed.data[0], name))
    stack = relayout.relayout(packed, torch.device(DEVICE))
    expected = dequantize(packed)
    monkeypatch.setattr(relayout, "_CHUNK_ELEMENTS", 1)  # sixteen rows at a time
    pieces = relayout.relayout(packed, torch.device(DEVICE))
    for plane in ("low", "high", "minima", "words"):
        one, other = getattr(stack, plane), getattr(pieces, plane)
        assert (one is None and other is None) or torch.equal(one, other)
    for group in range(3):
        linear.weight = matrix_of(stack, group)
        got = linear.rows(torch.arange(37, device=DEVICE), torch.float32)
        assert torch.equal(got.cpu(), expected[group])


# Products

NARROW, WIDE = (16, 8), (64, 32, 4, True)


@pytest.mark.parametrize("form", [NARROW, WIDE])
@pytest.mark.parametrize("name", FORMATS)
def test_broken_zero_and_large_rows(name: str, form: tuple[int, int]) -> None:
    torch.manual_seed(25)
    weight = random_weight(name, 13, 512)
    linear, tile = served(weight), kernels.Tile(*form)
    x = torch.randn(4, 512)
    x[2] = 0
    x[3] *= 1e4
    clean = torch.full((4, 13), math.nan, device=DEVICE)
    linear.run(x.to(DEVICE), clean, tile)
    expected = x.double() @ dequantize(weight).double().T
    for row in (0, 1, 3):
        assert relative(clean[row], expected[row]) < 1e-4
    assert (clean[2] == 0).all()
    x[1, 300] = math.nan
    got = torch.zeros((4, 13), device=DEVICE)
    linear.run(x.to(DEVICE), got, tile)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("name", FORMATS)
def test_narrow_and_wide_forms_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(26)
    weight = random_weight(name, 13, 2304)
    linear = served(weight)
    linear.segments = 5  # the last is shorter
    x = torch.randn(3, 2304).bfloat16()
    results = []
    narrow, wide = kernels.Tile(*NARROW), kernels.Tile(*WIDE)
    # Segments side by side, and one after the other.
    for processors, tile in ((1 << 20, narrow), (0, wide), *([(0, narrow), (1 << 20, wide)] if ON_DEVICE else [])):
        monkeypatch.setattr(kernels, "multiprocessors", lambda device, n=processors: n)
        guarded = torch.full((4, 15), math.nan, device=DEVICE)
        linear.run(x.to(DEVICE), guarded[:-1, 1:-1], tile)
        assert guarded[:, 0].isnan().all() and guarded[:, -1].isnan().all() and guarded[-1].isnan().all()
        results.append(guarded[:-1, 1:-1].contiguous())
    assert relative(results[0], x.double() @ dequantize(weight).double().T) < 1e-4
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert int(linear.meeting.locks.sum()) == 0 and bool((linear.meeting.slots == -1).all())


def test_no_sum_that_is_handed_over_looks_absent() -> None:
    bits = [-1, -2, 0x7FFFFFFF, 0x7FC00000, -0x400000, -0x800000, -0x80000000, 0x3F800000]
    values = torch.tensor(bits, dtype=torch.int32, device=DEVICE).view(torch.float32)
    places = torch.full((8,), -1, dtype=torch.int32, device=DEVICE)
    hand_over_kernel[(1,)](values, places, COUNT=8)
    assert places.tolist() == [0x7FFFFFFF, *bits[1:]]


@pytest.mark.skipif(ON_DEVICE, reason="sums come late only under the interpreter")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("broken", [False, True])
def test_a_sum_may_come_at_any_time(exact: bool, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of two segments are waited for; one of them appears after so many loads, another is a NaN by itself."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, loads = InterpreterBuilder.create_masked_load, 0
    places = torch.full((16,), -1, dtype=torch.int32)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal loads
        loads += 1
        if loads == late:
            places[8:] = torch.full((8,), 0.5).view(torch.int32)
        return load(*arguments, **keywords)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    # So many loads a time, and two more when it is asked what is absent.
    taken = 2 if exact else 4
    asked = taken * PATIENCE.value
    for late in (3, *range(asked - 1, asked + 4)):
        loads = 0
        places[:8] = torch.full((8,), 0.25).view(torch.int32)
        places[8:] = -1
        if broken:
            places[3] = 0x7FC00000
        out = torch.zeros(8)
        take_over_kernel[(1,)](places, out, 2, TAKEN=taken, EXACT=exact)
        expected = torch.full((8,), 1.75)
        if broken:
            assert out[3].isnan()
            out[3] = 1.75
        assert torch.equal(out, expected), late
        assert bool((places == -1).all())


@pytest.mark.parametrize(("steps", "segments"), [(20, 3), (68, 9), (72, 18), (5, 5), (7, 1), (137, 60)])
def test_segments_differ_by_a_step_from_the_longest_to_the_shortest(steps: int, segments: int) -> None:
    bounds = torch.full((segments + 1,), -1, dtype=torch.int32, device=DEVICE)
    bounds_kernel[(1,)](bounds, steps, segments)
    lengths = bounds.diff().tolist()
    assert int(bounds[0]) == 0 and int(bounds[-1]) == steps
    assert lengths[0] == max(lengths) == -(-steps // segments)
    assert lengths[-1] == min(lengths) == steps // segments


@pytest.mark.parametrize(("name", "width", "times"), [("Q4_K", 2560, 1), ("Q4_K", 3072, 2), ("Q8_0", 2560, 5)])
def test_segments_hand_over_sums_that_are_no_numbers(
    name: str, width: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(30)
    weight = random_weight(name, 13, width)
    linear, tile = served(weight), kernels.Tile(*NARROW)
    steps = linear.weight.steps
    linear.segments = steps
    # All at once, and more segments than are taken over at a time.
    assert -(-(steps - 1) // kernels.taken_at_once(steps - 1, linear.weight.format, tile)[0]) == times
    x = torch.randn(4, width).bfloat16()
    results = []
    # Clean rows and broken ones, segments side by side; broken ones, one segment after the other.
    for processors, broken in ((1 << 20, False), (1 << 20, True), (0, True)):
        if broken:
            x[0, 5] = x[0, 1400] = math.nan
            x[2, width - 1] = math.nan  # in the segment that takes the others' sums
            x[3, 700] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)  # a NaN of all ones
        monkeypatch.setattr(kernels, "multiprocessors", lambda device, n=processors: n)
        out = torch.zeros((4, 13), device=DEVICE)
        linear.run(x.to(DEVICE), out, tile)
        assert int(linear.meeting.locks.sum()) == 0 and bool((linear.meeting.slots == -1).all())
        results.append(out)
    clean, side_by_side, in_order = results
    assert clean.isfinite().all() and bool((clean != 0).all())
    for got in (side_by_side, in_order):
        assert got[[0, 2, 3]].isnan().all()
        assert torch.equal(got[1], clean[1])


def test_few_segments_are_taken_at_once_and_registers_stay_few() -> None:
    whole, nibbles = TILE_FORMATS["Q4_K"], TILE_FORMATS["NVFP4"]
    taken = kernels.taken_at_once
    assert [taken(n, nibbles, kernels.CAPPED) for n in (1, 9, 17, 18)] == [(1, True), (9, True), (17, True), (9, False)]
    assert [taken(n, nibbles, kernels.NARROW) for n in (2, 9)] == [(2, True), (4, False)]
    assert [taken(n, nibbles, kernels.NARROW_TILES[1]) for n in (2, 9)] == [(2, True), (2, False)]
    assert [taken(n, whole, kernels.NARROW_TILES[1]) for n in (9, 10)] == [(9, True), (9, False)]


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("name", ["Q4_K", "F8_E4M3"])
def test_a_measurement_compiles_what_it_times(name: str, swept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, programs = TILE_FORMATS[name], PROGRAMS if swept else ()
    compiled = cuts_of(name, SHAPES, programs)
    # Of the weights that they are compiled on, no segment is without a step.
    assert max(compiled) <= min(8192, CROWD[1]) // fmt.step
    kinds = {kernels.taken_at_once(cut - 1, fmt, kernels.CAPPED) for cut in compiled}
    for count in programs or [kernels.SEGMENT_PROGRAMS]:
        monkeypatch.setattr(kernels, "SEGMENT_PROGRAMS", count)
        for rows, width in SHAPES.values():
            weight = SimpleNamespace(rows=rows, steps=-(-width // fmt.step), format=fmt, groups=1)
            cut = kernels.segments_of(cast("relayout.TileWeight", weight))
            assert cut == 1 or kernels.taken_at_once(cut - 1, fmt, kernels.CAPPED) in kinds


@pytest.mark.parametrize("name", FORMATS)
def test_grouped_products_are_those_of_each_matrix(name: str) -> None:
    torch.manual_seed(27)
    width = 512 if name in ("Q5_K", "IQ2_XXS") else 256
    packed = random_weight(name, 13, width, groups=4)
    stack = relayout.relayout(packed, torch.device(DEVICE))
    meeting = kernels.Meeting.on(torch.device(DEVICE))
    segments = width // 256
    x = torch.randn(5, width).to(DEVICE)
    # Counts: a tile and a part of one, one, none, and a part.
    ids = torch.tensor([[0, 0], [0, 1], [0, 3], [0, 0], [3, 3]])
    wide = kernels.Tile(*WIDE)
    every = {}
    for group in (0, 1, 3):
        out = torch.empty((5, 13), device=DEVICE)
        rows = kernels.prepare_rows(x, stack, True)
        kernels.launch(matrix_of(stack, group), segments, meeting, rows, 5, out, wide)
        every[group] = out.cpu()
    expected = torch.stack([every[group][pair // 2] for pair, group in enumerate(ids.reshape(-1).tolist())])
    truth = torch.stack(
        [(dequantize(packed)[g].double() @ x[p // 2].double().cpu()) for p, g in enumerate(ids.view(-1))]
    )
    assert relative(expected, truth) < 1e-4
    for form, columns in ((NARROW, 4), (WIDE, 16)):
        tile = kernels.Tile(*form)
        lists = group_rows(ids.to(DEVICE), 4, columns, 2)
        counts = sorted(lists.tile_count.tolist())
        assert counts[-3:] == ([2, 3, 4] if columns == 4 else [1, 3, 6])
        out = torch.full((10, 13), math.nan, device=DEVICE)
        rows = kernels.prepare_rows(x, stack, tile.wide)
        kernels.launch(stack, segments, meeting, rows, 10, out, tile, lists)
        assert torch.equal(out.cpu(), expected), form
    assert int(meeting.locks.sum()) == 0 and bool((meeting.slots == -1).all())


@pytest.mark.parametrize("names", [("Q4_K", "Q2_K"), ("IQ2_XXS", "Q5_K"), ("Q6_K", "Q4_K"), ("Q8_0", "Q3_K")])
def test_parts_together_are_the_parts_alone(names: tuple[str, str]) -> None:
    torch.manual_seed(28)
    parts = [served(random_weight(name, rows, 256)) for name, rows in zip(names, (20, 13), strict=True)]
    bias = torch.randn(33, device=DEVICE)
    products, plain = (kernels.TritonLinear.fuse(parts, given) for given in (bias, None))
    assert products is not None and plain is not None and kernels.TritonLinear.fuse(parts[:1], bias) is None
    x = torch.randn(3, 256).bfloat16().to(DEVICE)
    alone = torch.full((3, 33), math.nan, device=DEVICE)
    parts[0](x, alone[:, :20])
    parts[1](x, alone[:, 20:])
    assert alone.isfinite().all()
    together = torch.full((3, 33), math.nan, device=DEVICE)
    plain(x, together)
    assert torch.equal(together, alone)
    products(x, together)
    assert torch.equal(together, alone + bias)


def test_input_rows_are_prepared_once_for_those_that_read_them_alike() -> None:
    weights = [served(random_weight(name, 16, 256)).weight for name in ("IQ2_XXS", "Q5_K", "Q6_K", "Q4_K", "Q2_K")]
    x = torch.randn(2, 256, device=DEVICE)
    narrow, wide = kernels.Tile(*NARROW), kernels.Tile(*WIDE)
    first, second, third, fourth, fifth = kernels.prepare_shared(x, weights, [narrow, narrow, narrow, wide, narrow])
    assert first is second and first.sums is not None
    assert len({id(rows) for rows in (first, third, fourth, fifth)}) == 4
    assert third.sums is None and fourth.sums is not None and fifth.sums is not None


# Exact sums


def with_halves(weight: PackedTensor, *values: float) -> np.ndarray:
    """Decoded [N, steps, 256] as if every block had these halves."""
    data = weight.data.clone()
    blocks = data.view(-1, weight.format.block_bytes)
    for offset, value in zip(HALF_FIELDS[weight.format.name], values, strict=True):
        blocks[:, offset : offset + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
    decoded = dequantize(PackedTensor(weight.format, weight.shape, data, "")).double().numpy()
    whole = decoded.astype(np.int64)
    assert (whole == decoded).all()
    return whole.reshape(weight.shape[0], -1, 256)


@pytest.mark.parametrize("form", [NARROW, WIDE])
@pytest.mark.parametrize("name", [*ORDERS, "IQ2_XXS"])
def test_sums_are_those_of_exact_integers(name: str, form: tuple[int, int]) -> None:
    torch.manual_seed(29)
    fmt = find_format(name)
    assert fmt is not None
    rows, steps, count = 20, 3, 3
    weight = random_weight(name, rows, 256 * steps)
    blocks = weight.data.view(rows, steps, fmt.block_bytes)
    halves = [
        blocks[..., offset : offset + 2].contiguous().view(torch.float16).double().numpy()[..., 0]
        for offset in HALF_FIELDS[name]
    ]
    # Each block of an input row reaches the largest integer: rounding to integers finds these, and the scale, again.
    values = torch.randint(-LARGEST, LARGEST + 1, (count, steps, 256))
    values[:, :, 17] = LARGEST * (1 - 2 * torch.randint(0, 2, (count, steps)))
    scale = torch.randint(-12, 6, (count, steps)).double().exp2()
    x = (values * scale[..., None]).float().view(count, -1).to(DEVICE)
    linear, tile = served(weight), kernels.Tile(*form)
    prepared = kernels.prepare_rows(x, linear.weight, tile.wide)
    assert torch.equal(integers_of(prepared, TILE_FORMATS[name].order, tile.wide), values)
    # IQ2_XXS multiplies by an eighth.
    codes = with_halves(weight, *((8.0,) if name == "IQ2_XXS" else (1.0, 0.0)[: len(halves)]))
    units = [halves[0] / 8 if name == "IQ2_XXS" else halves[0]]
    factors = [codes]
    if len(halves) == 2:
        factors.append(with_halves(weight, 0.0, 1.0))
        units.append(halves[1])
    terms = np.stack([
        np.einsum("nsk,msk->mns", factor, values.numpy()) * unit * scale.numpy()[:, None, :]
        for factor, unit in zip(factors, units, strict=True)
    ])  # fmt: skip
    expected = terms.sum(axis=(0, 3))
    out = torch.full((count, rows), math.nan, device=DEVICE)
    linear.run(x, out, tile)
    error = np.abs(out.cpu().double().numpy() - expected)
    assert np.linalg.norm(error) < 1e-6 * np.linalg.norm(expected)
    # Every sum for itself: the terms of a step are exact integers, so nothing is lost but by a few roundings.
    assert (error <= 1e-6 * np.abs(terms).sum(axis=(0, 3))).all()
