"""C++ row operations, attention and experts against the torch references, and their row independence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from test_cpu_linear import random_packed

from slimserve import ops
from slimserve.ops import NumericsConfig, Op
from slimserve.ops.cpu import library, rows, weights
from slimserve.ops.cpu.build import find_compiler
from slimserve.ops.reference import activation, attention, linear, norms, rotary
from slimserve.ops.registry import find

if find_compiler() is None:
    pytest.skip("no C++ compiler: the CPU kernels cannot be built", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.dtype is want.dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 64, 576, 897])
def test_norms(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = draw(70, size).to(dtype), draw(70, size, seed=1).to(dtype), draw(size, seed=2)
    close(rows.rms_norm(x, weight, 1e-6), norms.rms_norm(x, weight, 1e-6), tolerance(dtype))
    got, total = rows.add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
    want, want_total = norms.add_rms_norm(x, residual, weight, 1e-5, weight_offset=1.0)
    assert torch.equal(total, want_total)
    close(got, want, tolerance(dtype))
    alone = torch.cat([rows.rms_norm(x[t : t + 1], weight, 1e-6) for t in range(70)])
    assert torch.equal(alone, rows.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 128, 1001])
def test_gated_activations(dtype: torch.dtype, size: int) -> None:
    x = (draw(40, 2 * size) * 6).to(dtype)
    x[0, :2] = torch.tensor([1e4, -1e4]).to(dtype)
    for limit in (None, 7.0):
        close(rows.silu_mul(x, limit), activation.silu_mul(x, limit), tolerance(dtype))
    close(rows.gelu_tanh_mul(x), activation.gelu_tanh_mul(x), max(tolerance(dtype), 4e-6))
    alone = torch.cat([rows.silu_mul(x[t : t + 1]) for t in range(40)])
    assert torch.equal(alone, rows.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 24), (256, 64)])
def test_rope(dtype: torch.dtype, interleaved: bool, dim: int, rotary_dim: int) -> None:
    wide = draw(33, 3 * dim + 8).to(dtype)
    positions = torch.arange(33) * 977 + 5  # up to 31,000
    inv_freq = 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    got, want = wide.clone(), wide.clone()
    for tensor, run in ((got, rows.rope), (want, rotary.rope)):
        x = tensor[:, : 3 * dim].unflatten(1, (3, dim))
        run(x, positions, inv_freq, rotary_dim=rotary_dim, interleaved=interleaved, scale=1.25)
    close(got, want, max(tolerance(dtype), 4e-6))
    assert torch.equal(got[:, 3 * dim :], wide[:, 3 * dim :])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_page_writes(kv_dtype: torch.dtype) -> None:
    values = draw(50, 2 * 40)[:, :80].unflatten(1, (2, 40)) * 200
    values[0, 0, :6] = torch.tensor([1e5, -1e5, 1e-9, 0.0019, 448.0, -0.0])
    slots = torch.randperm(5 * 64)[:50] + 64
    got = torch.zeros(7, 2, 64, 40).to(kv_dtype)
    want = got.clone()
    rows.write_pages(values, got, slots)
    attention.write_pages(values, want, slots)
    as_bytes = (
        torch.uint8 if kv_dtype is torch.float8_e4m3fn else torch.int16 if kv_dtype.itemsize == 2 else torch.int32
    )
    assert torch.equal(got.view(as_bytes), want.view(as_bytes))


def paged_case(
    lengths: list[int], q_lens: list[int], heads: tuple[int, int], dim: int, kv_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Rows whose contexts end at `lengths`; pages scattered, unwritten slots poisoned with NaN."""
    q_heads, kv_heads = heads
    blocks = max(-(-length // 64) for length in lengths)
    num_pages = 1 + sum(-(-length // 64) for length in lengths)
    k = torch.full((num_pages, kv_heads, 64, dim), float("nan"))
    v = k.clone()
    table = torch.zeros(len(lengths), blocks, dtype=torch.int32)
    pages = (torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(9)) + 1).tolist()
    for row, length in enumerate(lengths):
        for block in range(-(-length // 64)):
            page = pages.pop()
            table[row, block] = page
            filled = min(64, length - 64 * block)
            k[page, :, :filled] = draw(kv_heads, filled, dim, seed=1000 * row + block)
            v[page, :, :filled] = draw(kv_heads, filled, dim, seed=1000 * row + block + 500)
    offsets = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    starts = torch.tensor([length - q for length, q in zip(lengths, q_lens, strict=True)], dtype=torch.int32)
    q = draw(sum(q_lens), q_heads, dim, seed=77)
    return q, k.to(kv_dtype), v.to(kv_dtype), table, offsets, starts


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("heads", "dim", "window", "softcap"),
    [((14, 2), 64, None, None), ((4, 1), 256, 100, None), ((9, 3), 64, None, 30.0), ((2, 2), 80, 64, None)],
)
def test_attention(
    kv_dtype: torch.dtype, heads: tuple[int, int], dim: int, window: int | None, softcap: float | None
) -> None:
    case = paged_case([1, 130, 700, 64], [1, 40, 3, 64], heads, dim, kv_dtype)
    options = {"scale": dim**-0.5, "window": window, "softcap": softcap, "max_q_len": 64, "max_context": 700}
    got = rows.paged_attention(*case, **options)
    want = attention.paged_attention(
        *(t.nan_to_num() if t.is_floating_point() and t.dtype.itemsize > 1 else t for t in case), **options
    )
    assert torch.isfinite(got).all()
    close(got, want, 1e-5)


def test_attention_bits_do_not_depend_on_the_step() -> None:
    q, k, v, table, _, _ = paged_case([1500], [1500], (6, 2), 64, torch.bfloat16)
    options = {"scale": 0.125, "max_q_len": 1500, "max_context": 1500}

    def attend(start: int, stop: int, window: int | None) -> torch.Tensor:
        offsets = torch.tensor([0, stop - start], dtype=torch.int32)
        starts = torch.tensor([start], dtype=torch.int32)
        return rows.paged_attention(q[start:stop], k, v, table, offsets, starts, window=window, **options)

    for window in (None, 600):
        whole = attend(0, 1500, window)
        for threads in (1, 2):
            library.set_threads(threads)
            cuts = [0, 1, 64, 65, 200, 731, 1024, 1499, 1500]
            parts = torch.cat([attend(a, b, window) for a, b in pairwise(cuts)])
            assert torch.equal(parts.view(torch.int32), whole.view(torch.int32))
    library.set_threads(library.available_cores())
    two_rows = rows.paged_attention(
        q[1490:1500], k, v, table.expand(2, -1).contiguous(), torch.tensor([0, 4, 10], dtype=torch.int32),
        torch.tensor([1490, 1494], dtype=torch.int32), **options,
    )  # fmt: skip
    assert torch.equal(two_rows.view(torch.int32), attend(1490, 1500, None).view(torch.int32))


@pytest.mark.parametrize("formats", [("Q4_K", "Q6_K"), ("IQ2_XXS", "Q2_K"), ("BF16", "BF16"), ("E2M1_G16", "E2M1_G16")])
@pytest.mark.parametrize("split", [False, True])
def test_experts(formats: tuple[str, str], split: bool) -> None:
    experts, hidden, inner = 5, 256, 512
    up = [random_packed(formats[0], 2 * inner, hidden, seed=e) for e in range(experts)]
    down = [random_packed(formats[1], hidden, inner, seed=50 + e) for e in range(experts)]
    gate_up = stack(up)
    parts = (halves(gate_up, 0, inner), halves(gate_up, inner, 2 * inner)) if split else (gate_up,)
    device, float_numerics = torch.device("cpu"), NumericsConfig(cpu_activations=weights.Activations.FLOAT)
    x = draw(23, hidden) * 0.05
    ids = torch.randint(0, experts, (23, 3), generator=torch.Generator().manual_seed(3))
    share = torch.rand(23, 3, generator=torch.Generator().manual_seed(4))
    want = linear.ReferenceExperts(parts, stack(down), device, float_numerics)(x, ids, share, 2.0)
    served = weights.CpuExperts(parts, stack(down), device, float_numerics)
    got = served(x, ids, share, 2.0)
    close(got, want, 1e-4 * float(want.abs().max()))
    quick = weights.CpuExperts(parts, stack(down), device, NumericsConfig())
    together = quick(x, ids, share, 2.0)
    assert float((together - want).norm() / want.norm()) < 0.05
    alone = torch.cat([quick(x[t : t + 1], ids[t : t + 1], share[t : t + 1], 2.0) for t in range(23)])
    assert torch.equal(alone.view(torch.int32), together.view(torch.int32))


def stack(parts: list) -> object:
    scales = {
        name: torch.stack([p.scales[name] for p in parts])
        if parts[0].scales[name].numel() > 1
        else parts[0].scales[name]
        for name in parts[0].scales
    }
    return type(parts[0])(
        parts[0].format, (len(parts), *parts[0].shape), torch.stack([p.data for p in parts]), parts[0].name, scales
    )


def halves(packed, start: int, stop: int) -> object:
    scales = {n: s[:, start:stop] if s.numel() > 1 else s for n, s in packed.scales.items()}
    shape = (packed.shape[0], stop - start, packed.shape[2])
    return type(packed)(packed.format, shape, packed.data[:, start:stop].contiguous(), packed.name, scales)


@pytest.mark.parametrize("name", ["Q5_0", "Q8_0", "Q4_K", "Q6_K", "Q3_K", "IQ3_S", "BF16", "F32", "E2M1_G16"])
def test_embedding(name: str) -> None:
    packed = random_packed(name, 99, 512, seed=5)
    ids = torch.tensor([0, 98, 7, 7, 1000, -3], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        want = linear.embedding(ids, packed, dtype)
        close(rows.embedding(ids, packed, dtype), want, 0.0 if dtype is torch.float32 and name != "E2M1_G16" else 1e-2)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_heads_placed_in_one_call_have_the_bits_of_the_single_calls(
    norms: bool, rotated: bool, kv_dtype: torch.dtype
) -> None:
    tokens, num_heads, kv_heads, dim = 37, 6, 2, 80
    heads = draw(tokens, num_heads + 2 * kv_heads, dim)
    q_norm, k_norm = (draw(dim, seed=1), draw(dim, seed=2)) if norms else (None, None)
    slots, positions = torch.randperm(4 * 64)[:tokens], torch.arange(tokens) + 1000
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64) if rotated else None
    got_pages = [torch.zeros(4, kv_heads, 64, dim).to(kv_dtype) for _ in range(2)]
    want_pages = [torch.zeros(4, kv_heads, 64, dim).to(kv_dtype) for _ in range(2)]
    assert find(Op.PLACE_HEADS, heads.device, heads.dtype, kv_dtype) is not None
    got = ops.place_heads(
        heads.clone(), num_heads, *got_pages, slots, positions, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
        inv_freq=inv_freq, rotary_dim=64,
    )  # fmt: skip
    q, k, v = heads[:, :num_heads], heads[:, num_heads : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = rows.rms_norm(q, q_norm, 1e-6), rows.rms_norm(k, k_norm, 1e-6)
    for part in (q, k):
        if inv_freq is not None:
            rows.rope(part, positions, inv_freq, rotary_dim=64)
    rows.write_pages(k, want_pages[0], slots)
    rows.write_pages(v, want_pages[1], slots)
    assert torch.equal(got, q)
    for one, other in zip(got_pages, want_pages, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("gelu", "limit"), [(False, None), (False, 1.5), (True, None)])
def test_gated_feed_forward_in_one_call_has_the_bits_of_the_single_calls(gelu: bool, limit: float | None) -> None:
    gate_up = ops.prepare_linear([random_packed("Q5_0", 512, 256, seed=1), random_packed("Q4_0", 512, 256, seed=2)])
    down = ops.prepare_linear([random_packed("Q6_K", 96, 512, seed=3)], [torch.randn(96)])
    x = draw(300, 256)
    both = ops.linear(x, gate_up)
    want = ops.linear(ops.gelu_tanh_mul(both) if gelu else ops.silu_mul(both, limit), down)
    got = ops.gated_mlp(x, gate_up, down, gelu=gelu, limit=limit)
    assert torch.equal(got, want)
    assert torch.equal(ops.gated_mlp(x[299:], gate_up, down, gelu=gelu, limit=limit), want[299:])
