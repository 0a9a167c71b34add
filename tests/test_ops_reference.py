"""The torch references against float64, and the rule that a row stands alone."""

from __future__ import annotations

import math

import pytest
import torch

from slimserve import ops
from slimserve.ops.reference import attention, linear, norms
from slimserve.ops.reference.order import tree_sum
from slimserve.quant import formats
from slimserve.quant.tensor import PackedTensor


def plain(weight: torch.Tensor) -> PackedTensor:
    kinds = {torch.float32: formats.F32, torch.float16: formats.F16, torch.bfloat16: formats.BF16}
    return PackedTensor(kinds[weight.dtype], tuple(weight.shape), weight)


def test_tree_sum_matches_float64_for_every_length() -> None:
    for count in (1, 2, 3, 7, 64, 100, 1023):
        values = torch.randn(5, count)
        assert torch.allclose(tree_sum(values).double(), values.double().sum(-1), atol=1e-4)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_matches_float64(offset: float) -> None:
    x, weight = torch.randn(9, 130), torch.randn(130)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
    got = norms.rms_norm(x, weight, 1e-6, weight_offset=offset)
    assert torch.allclose(got.double(), expected, atol=1e-5)


def test_add_rms_norm_normalises_the_rounded_sum() -> None:
    x, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    weight = torch.randn(64)
    y, total = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, (x.float() + residual.float()).bfloat16())
    assert torch.equal(y, norms.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_activations_do_not_depend_on_the_rows_beside(rows: int) -> None:
    gate_up = torch.randn(rows, 2 * 101) * 4
    for run in (ops.silu_mul, ops.gelu_tanh_mul, lambda g: ops.silu_mul(g, 1.0)):
        together = run(gate_up)
        for t in range(rows):
            assert torch.equal(together[t : t + 1], run(gate_up[t : t + 1]))


def test_activations_match_float64() -> None:
    gate_up = torch.randn(4, 64) * 20
    gate, up = gate_up.double().chunk(2, -1)
    assert torch.allclose(ops.silu_mul(gate_up).double(), torch.nn.functional.silu(gate) * up, rtol=1e-5)
    clamped = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
    assert torch.allclose(ops.silu_mul(gate_up, 10.0).double(), clamped, rtol=1e-5)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.allclose(ops.gelu_tanh_mul(gate_up).double(), gelu, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_and_leaves_the_rest(interleaved: bool) -> None:
    x = torch.randn(5, 3, 24)
    positions = torch.tensor([0, 1, 17, 1000, 40000])
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16)
    before = x.clone()
    ops.rope(x, positions, inv_freq, rotary_dim=16, interleaved=interleaved, scale=1.5)
    assert torch.equal(x[..., 16:], before[..., 16:])
    angle = (positions.float()[:, None] * inv_freq).double()[:, None]
    pairs = before[..., :16].double()
    a, b = (pairs[..., 0::2], pairs[..., 1::2]) if interleaved else (pairs[..., :8], pairs[..., 8:])
    got = x[..., :16].double()
    c, d = (got[..., 0::2], got[..., 1::2]) if interleaved else (got[..., :8], got[..., 8:])
    assert torch.allclose(c, 1.5 * (a * angle.cos() - b * angle.sin()), atol=1e-4)
    assert torch.allclose(d, 1.5 * (b * angle.cos() + a * angle.sin()), atol=1e-4)


class Pages:
    """Random rows over shuffled pages, with every unowned page poisoned by NaN."""

    def __init__(self, rows: list[tuple[int, int]], dtype: torch.dtype, kv_heads: int = 2, dim: int = 16) -> None:
        self.rows = rows
        blocks = [-(-(start + count) // 64) for start, count in rows]
        order = torch.randperm(sum(blocks)) + 1
        self.table = torch.zeros((len(rows), max(blocks) + 1), dtype=torch.int32)
        pages = torch.full((sum(blocks) + 2, kv_heads, 64, dim), math.nan)
        self.k, self.v = pages.to(dtype), pages.clone().to(dtype)
        self.keys, self.values = [], []
        for r, (start, count) in enumerate(rows):
            own, order = order[: blocks[r]], order[blocks[r] :]
            self.table[r, : blocks[r]] = own.int()
            at = torch.arange(start + count)
            slots = own[at // 64] * 64 + at % 64
            for storage, kept in ((self.k, self.keys), (self.v, self.values)):
                written = torch.randn(start + count, kv_heads, dim)
                attention.write_pages(written, storage, slots)
                kept.append(written.to(dtype).double())
        counts = torch.tensor([0] + [count for _, count in rows])
        self.offsets = counts.cumsum(0).int()
        self.starts = torch.tensor([start for start, _ in rows], dtype=torch.int32)

    def call(self, run, q: torch.Tensor, **options) -> torch.Tensor:
        bounds = {"max_q_len": max(c for _, c in self.rows), "max_context": max(s + c for s, c in self.rows)}
        return run(q, self.k, self.v, self.table, self.offsets, self.starts, **options, **bounds)

    def expected(self, q: torch.Tensor, scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
        out = []
        for r, (start, count) in enumerate(self.rows):
            queries = q[self.offsets[r] : self.offsets[r + 1]].double()
            group = q.shape[1] // self.k.shape[1]
            keys = self.keys[r].repeat_interleave(group, 1)
            values = self.values[r].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            where, at = torch.arange(start, start + count)[:, None], torch.arange(start + count)
            visible = at <= where
            if window is not None:
                visible &= at > where - window
            scores = scores.masked_fill(~visible, -math.inf)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat(out)


@pytest.mark.parametrize("window", [None, 5, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_paged_attention_matches_float64(dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(3)
    pages = Pages([(0, 1), (0, 70), (63, 1), (64, 3), (130, 65)], dtype)
    q = torch.randn(int(pages.offsets[-1]), 6, 16)
    for softcap in (None, 2.0):
        got = pages.call(ops.paged_attention, q, scale=0.3, window=window, softcap=softcap)
        assert torch.allclose(got.double(), pages.expected(q, 0.3, window, softcap), atol=2e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_attention_of_a_token_does_not_depend_on_the_cut(window: int | None) -> None:
    torch.manual_seed(4)
    whole = Pages([(0, 150)], torch.float32)
    q = torch.randn(150, 4, 16)
    together = whole.call(ops.paged_attention, q, scale=0.25, window=window, softcap=None)
    for cut in (1, 16, 33, 64):
        for start in range(0, 150, cut):
            count = min(cut, 150 - start)
            whole.rows, whole.starts = [(start, count)], torch.tensor([start], dtype=torch.int32)
            whole.offsets = torch.tensor([0, count], dtype=torch.int32)
            part = whole.call(ops.paged_attention, q[start : start + count], scale=0.25, window=window, softcap=None)
            assert torch.equal(part, together[start : start + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_linear_rows_stand_alone(dtype: torch.dtype) -> None:
    weight = torch.randn(1100, 77).to(dtype)
    served = linear.ReferenceLinear(plain(weight), torch.device("cpu"), ops.NumericsConfig())
    x = torch.randn(64, 77)
    guarded = torch.full((64, 1102), math.nan)
    served(x, guarded[:, 1:-1])
    assert torch.allclose(guarded[:, 1:-1].double(), x.double() @ weight.double().T, atol=1e-3)
    assert guarded[:, 0].isnan().all() and guarded[:, -1].isnan().all()
    for count in (1, 2, 3, 8, 16, 33):
        alone = torch.empty(count, 1100)
        served(x[-count:].clone(), alone)
        assert torch.equal(alone, guarded[-count:, 1:-1])


def test_linear_stacks_parts_of_different_formats_with_biases() -> None:
    a, b, bias = torch.randn(5, 32), torch.randn(7, 32).bfloat16(), torch.randn(7)
    weight = ops.prepare_linear([plain(a), plain(b)], [None, bias])
    x = torch.randn(3, 32)
    expected = torch.cat((x @ a.T, x @ b.float().T + bias), dim=-1)
    # Kernels may round activations to int8 blocks, as ggml does; the tolerance allows it.
    assert torch.allclose(ops.linear(x, weight), expected, atol=0.15)
    assert ops.linear(x.bfloat16(), weight, out_dtype=torch.float32).dtype == torch.float32
    assert ops.linear(x[:0], weight).shape == (0, 12)
    with pytest.raises(ValueError, match="expected"):
        ops.linear(x[:, :16], weight)


def test_reference_experts_match_float64_and_rows_stand_alone() -> None:
    torch.manual_seed(5)
    gate, up, down = torch.randn(4, 24, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 24)
    parts = (plain(gate), plain(up))
    served = linear.ReferenceExperts(parts, plain(down), torch.device("cpu"), ops.NumericsConfig())
    x, ids = torch.randn(6, 16), torch.randint(0, 4, (6, 2))
    weights = torch.rand(6, 2)
    got = served(x, ids, weights, 1.5)
    for t in range(6):
        expected = torch.zeros(16, dtype=torch.float64)
        for slot in range(2):
            e = ids[t, slot]
            g = (gate[e].double() @ x[t].double()).clamp(max=1.5)
            u = (up[e].double() @ x[t].double()).clamp(-1.5, 1.5)
            expected += weights[t, slot].double() * (down[e].double() @ (g * torch.sigmoid(g) * u))
        assert torch.allclose(got[t].double(), expected, atol=1e-4)
        assert torch.equal(served(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], 1.5)[0], got[t])


def test_embedding_clamps_ids() -> None:
    table = torch.randn(10, 8)
    got = ops.embedding(torch.tensor([0, 9, -1, 99], dtype=torch.int32), plain(table), torch.float32)
    assert torch.equal(got, table[[0, 9, 0, 9]])


def test_explain_names_a_kernel_for_every_operation() -> None:
    weight = ops.prepare_linear([plain(torch.randn(4, 32))])
    rows = ops.explain("cpu", weights=[weight])
    assert {row.op for row in rows} >= {"linear", "embedding", "rms_norm", "paged_attention", "write_pages", "rope"}
    assert all(row.kernel for row in rows)
